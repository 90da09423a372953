"""The steps of the chain: one package per step, and what they share in `common`."""

import os

# Else ONNX Runtime, from its import on, keeps an identifier of the machine and sends to its maker what is run.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
