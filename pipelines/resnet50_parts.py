"""The chain of resnet50.py for a dataset so large that several machines pack it, a part each.

enginery submit pipelines/resnet50_parts.py --data s3://BUCKET/imagenet --num-parts 16
"""

from pipelines.resnet50 import whole_chain

resnet50_parts = whole_chain(
    "resnet50-parts",
    "Very many labelled images, packed in parts -> INT8 model, proved as accurate as the FP32 one.",
    in_parts=True,
)

if __name__ == "__main__":
    from enginery.cli.main import run_this

    run_this(__file__)
