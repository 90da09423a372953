"""The life of a step's process: start and end, logs, locks, disk, GPU monitor."""
