"""What this machine can do, and the exact fix for each thing missing. `enginery.doctor.report` runs the checks."""
