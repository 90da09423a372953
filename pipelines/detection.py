"""Train a network that finds objects, on images with boxes, and end with a validated INT8 model.

enginery run pipelines/detection.py --data DIR
"""

from pipelines.graph import DENSE_RECIPE
from pipelines.resnet50 import whole_chain

detection = whole_chain(
    "detection",
    "Images with boxes -> INT8 model that finds objects, proved as accurate as the FP32 one.",
    task="detection",
    recipe={"architecture": "detection/retinanet_resnet50_fpn", **DENSE_RECIPE},
)

if __name__ == "__main__":
    from enginery.cli.main import run_this

    run_this(__file__)
