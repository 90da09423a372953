"""Train a network that segments images, on images with PNG masks, and end with a validated INT8 model.

enginery run pipelines/segmentation.py --data DIR
"""

from pipelines.resnet50 import whole_chain

segmentation = whole_chain(
    "segmentation",
    "Images with masks -> INT8 model that segments, proved as accurate as the FP32 one.",
    task="segmentation",
    recipe={
        "architecture": "segmentation/deeplabv3_resnet50",
        "image_size": 512,
        "epochs": 24,
        "global_batch_size": 32,
        "learning_rate": 0.0024,  # per 256 images, so 0.0003 here
        "train": {
            "optimizer": "adamw",
            "weight_decay": 0.05,
            "label_smoothing": 0.0,
            "resize_ratio": 1.0,
            "augmentation": {"min_area": 0.5, "max_aspect_ratio": 1.2},
        },
    },
)

if __name__ == "__main__":
    from enginery.cli.main import run_this

    run_this(__file__)
