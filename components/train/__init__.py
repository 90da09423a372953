"""Train an image classifier with DALI loading and automatic mixed precision, on one GPU or many.

Reads:   a Dataset.
Writes:  a Checkpoint: weights.safetensors, mllog.txt, manifest.json (architecture, classes, TransformSpec, metrics).
Needs:   a GPU for real work; runs on the CPU too, in FP32.
Stopped: the same command resumes from the last checkpoint; SIGTERM saves first and ends with exit code 75.
"""
