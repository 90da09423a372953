"""Checks of what this machine or a cluster can do, with the exact fix for each thing missing."""
