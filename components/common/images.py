"""The container image of each step, in one place: what pipelines compile with."""

import os

REGISTRY = os.environ.get("ENGINERY_IMAGE_REGISTRY", "ghcr.io/enginery")
TAG = os.environ.get("ENGINERY_IMAGE_TAG", "0.1.0")


def image_for(step: str) -> str:
    """Image reference of a step, such as "ghcr.io/enginery/train:0.1.0"."""
    return f"{REGISTRY}/{step}:{TAG}"
