"""The container image of each step, in one place: what pipelines compile with."""

import os

REGISTRY = os.environ.get("ENGINERY_IMAGE_REGISTRY", "ghcr.io/enginery")
TAG = os.environ.get("ENGINERY_IMAGE_TAG", "0.2.0")
# Steps that need little share an image.
IMAGE_OF = {
    "preprocess": "preprocess",
    "merge": "preprocess",
    "train": "train",
    "export": "export",
    "validate": "validate",
    "analyze": "analyze",
    "gate": "promote",
    "promote": "promote",
}


def image_for(step: str) -> str:
    """Image reference of a step, such as "ghcr.io/enginery/train:0.2.0"."""
    return reference(IMAGE_OF[step], REGISTRY, TAG)


def reference(image: str, registry: str, tag: str, digest: str = "") -> str:
    """An image by its digest, or by its tag where there is none."""
    return f"{registry}/{image}@{digest}" if digest else f"{registry}/{image}:{tag}"
