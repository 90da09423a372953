"""Registered models: versions, aliases, why one is the champion, and comparisons."""
