"""Train a network that segments images, on images with PNG masks, and end with a validated INT8 model.

enginery run pipelines/segmentation.py --data DIR
"""

from pipelines.graph import DENSE_RECIPE
from pipelines.resnet50 import whole_chain

segmentation = whole_chain(
    "segmentation",
    "Images with masks -> INT8 model that segments, proved as accurate as the FP32 one.",
    task="segmentation",
    recipe={"architecture": "segmentation/deeplabv3_resnet50", **DENSE_RECIPE},
)

if __name__ == "__main__":
    from enginery.cli.main import run_this

    run_this(__file__)
