"""A release: one registered version as a folder that is checked offline. docs/release.md says what is in it."""
