"""Train an image classifier with DALI loading and automatic mixed precision.

Reads:   a Dataset.
Writes:  a Checkpoint: weights.safetensors and manifest.json with the architecture, classes, TransformSpec and metrics.
Needs:   a GPU for real work; runs on the CPU too, in FP32.
"""
