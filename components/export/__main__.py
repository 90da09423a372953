"""`python -m components.export`: the container's command and the laptop's."""

from components.common.process.step import Step
from components.export.config import ExportConfig

STEP = Step(
    name="export",
    config=ExportConfig,
    inputs={
        "model": "Checkpoint that train wrote, an .onnx file, or weights (.safetensors, .pt, .pth) of --architecture.",
        "dataset": "Dataset that preprocess wrote; its training split gives the calibration images.",
    },
)

if __name__ == "__main__":
    STEP.command()()
