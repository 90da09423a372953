"""Videos of digits, and a way to analyze them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits

from components.analyze.config import AnalyzeConfig
from components.analyze.run import analyze
from components.common.contracts.manifests import AnalysisManifest, Artifact, BundleManifest, load
from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog
from tests.conftest import Bundle, Shared
from tests.steps import step
from tests.unit.conftest import Proved
from tests.unit.shapes import Chain

SHOWN = (3, 7, 1, 8)
PER_DIGIT = 12


def digit_frames(size: tuple[int, int] = (96, 128), per_digit: int = PER_DIGIT) -> list[np.ndarray]:
    """[H, W, 3] uint8 each: `per_digit` frames of each digit in SHOWN."""
    digits = load_digits()
    images = [image for shown in SHOWN for image in digits.images[digits.target == shown][:per_digit]]
    scaled = [Image.fromarray(np.uint8(image * 255 / 16)).resize(size[::-1]).convert("RGB") for image in images]
    return [np.asarray(image) for image in scaled]


def write_video(path: Path, frames: list[np.ndarray], codec: str = "libx264", **options: str) -> Path:
    form = {".264": "h264"}.get(path.suffix)
    scheduling = os.sched_getscheduler(0), os.sched_getparam(0)
    with av.open(str(path), "w", format=form) as container:
        stream = container.add_stream(codec, rate=30)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.options = "yuv420p", options
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    os.sched_setscheduler(0, *scheduling)  # SVT-AV1 of root makes this thread a real-time one, and what it starts
    return path


def pictures_of(path: Path) -> list[np.ndarray]:
    """Its frames as others decode them, [H, W, 3] uint8 each."""
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.fixture(scope="session")
def bundle(proved: Proved) -> Bundle:
    return load(proved.folder / "bundle", BundleManifest)


@pytest.fixture(scope="session")
def detector(detection_chain: Chain, shared: Shared) -> Bundle:
    """Trained for seconds, and made surer, so that it finds something."""

    def build(folder: Path) -> None:
        same = {"architecture": "detection/fcos_small", "image_size": 64, "resize_ratio": 1.0}
        settings = {**same, "epochs": 20, "optimizer": "adamw", "global_batch_size": 16, "learning_rate": 0.064}
        settings |= {"num_processes": 1, "label_smoothing": 0.0}
        step("train", folder / "checkpoint", settings, dataset=detection_chain.dataset)
        weights = load_file(folder / "checkpoint" / "weights.safetensors")
        for name in (name for name in weights if name.endswith("logits.bias")):
            weights[name] += 1.0
        save_file(weights, folder / "surer.safetensors")
        settings = {**same, "tensorrt": "off", "num_ranking_images": 0, "mixed_engines": 0}
        settings |= {"num_calibration_images": 16}
        source = {"model": folder / "surer.safetensors", "dataset": detection_chain.dataset}
        step("export", folder / "bundle", settings, **source)

    return load(shared("detector", build) / "bundle", BundleManifest)


@pytest.fixture(scope="session")
def segmenter(segmentation_chain: Chain) -> Bundle:
    return load(segmentation_chain.bundle, BundleManifest)


Analyze = Callable[..., Artifact[AnalysisManifest]]


@pytest.fixture
def run_analysis(bundle: Bundle, tmp_path: Path) -> Analyze:
    def run(*sources: Path | str, model: Bundle = bundle, **settings: Any) -> Artifact[AnalysisManifest]:
        config = resolve(AnalyzeConfig, "analyze", {"sources": [str(source) for source in sources], **settings})
        return analyze(config, model, tmp_path / "analysis", StepLog("analyze"))

    return run


def lines(analysis: Artifact[AnalysisManifest], name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in analysis.file(name).read_text().splitlines()]
