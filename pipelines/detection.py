"""Train a network that finds objects, on images with boxes, and end with a validated INT8 model.

enginery run pipelines/detection.py --data DIR
"""

from pipelines.resnet50 import whole_chain

detection = whole_chain(
    "detection",
    "Images with boxes -> INT8 model that finds objects, proved as accurate as the FP32 one.",
    task="detection",
    recipe={
        "architecture": "detection/retinanet_resnet50_fpn",
        "image_size": 512,
        "epochs": 24,
        "global_batch_size": 32,
        "learning_rate": 0.0024,  # per 256 images, so 0.0003 here
        "train": {
            "optimizer": "adamw",
            "weight_decay": 0.05,
            "label_smoothing": 0.0,
            "resize_ratio": 1.0,  # objects at the edges count
            "augmentation": {"min_area": 0.5, "max_aspect_ratio": 1.2},
        },
    },
)

if __name__ == "__main__":
    from enginery.cli.main import run_this

    run_this(__file__)
