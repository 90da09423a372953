"""What this machine or a cluster can do, and the exact fix for each thing missing."""
