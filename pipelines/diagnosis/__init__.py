"""What this machine can do, and the exact fix for each thing missing. `pipelines.diagnosis.report` runs the checks."""
