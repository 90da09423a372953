"""Measure a champion again, on the validation split of another data set than the one it was promoted with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from components.common.artifacts import ALL_FILES, Artifact, BundleManifest, DatasetManifest, load
from components.common.errors import EngineryError, RuntimeUnavailable
from components.common.records import Precision
from components.common.registry import RegisteredVersion, Registry
from components.common.standing import check_tags

if TYPE_CHECKING:
    from components.common.runners import Runner

_CPU_BATCH_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Remeasured:
    """What a version shows on other images."""

    precision: Precision
    top1_pct: float
    right: np.ndarray  # [N] bool, in the split's order
    runtime: str


def remeasure(
    registry: Registry,
    version: RegisteredVersion,
    precision: Precision,
    data: Artifact[DatasetManifest],
    progress: Callable[[int, int], None],
) -> Remeasured:
    """Run a registered version's bundle, as it lies in the registry, over a validation split.

    Args:
        registry: that holds it.
        version: the version.
        precision: which one to run.
        data: the images.
        progress: called with images done and images in all.

    Raises:
        RuntimeUnavailable: nothing here runs it.
        EngineryError: its files are gone or changed, or its classes are others than the data set's.
    """
    with registry.files(version, "bundle") as path:
        bundle = load(path, BundleManifest, verify=ALL_FILES)
        check_tags(version, {"bundle": bundle.digest})
        if bundle.manifest.classes != data.manifest.classes:
            raise EngineryError(
                f"its {len(bundle.manifest.classes)} classes are not the {len(data.manifest.classes)} of the data set "
                f"{data.path}"
            )
        try:
            return _measure(bundle, precision, data, progress)
        except ModuleNotFoundError as error:
            raise RuntimeUnavailable(
                f"{error.name} is not installed here, and measuring needs PyTorch, DALI, and OpenVINO or TensorRT"
            ) from error


def _measure(
    bundle: Artifact[BundleManifest],
    precision: Precision,
    data: Artifact[DatasetManifest],
    progress: Callable[[int, int], None],
) -> Remeasured:
    import torch  # here and below: the image of promote has none of these

    from components.common.evaluation import predict
    from components.common.loader import Loader

    runner = _runner(bundle, precision)
    try:
        on_gpu = torch.cuda.is_available()
        largest = bundle.manifest.shapes.max_batch
        loader = Loader(
            data,
            "val",
            bundle.manifest.transform,
            batch_size=largest if on_gpu else min(_CPU_BATCH_SIZE, largest),
            device_id=0 if on_gpu else None,
        )
        num_images = data.manifest.splits["val"].num_images
        found = predict({precision: runner}, loader, num_images, progress)[precision]
    finally:
        runner.close()
    return Remeasured(precision=precision, top1_pct=found.top1_pct, right=found.right, runtime=runner.runtime)


def _runner(bundle: Artifact[BundleManifest], precision: Precision) -> "Runner":
    """TensorRT where the bundle has a plan for this GPU, else OpenVINO on the ONNX file."""
    from components.common.runners.tensorrt_library import plan_mismatches, why_no_tensorrt

    manifest = bundle.manifest
    engine = next((engine for engine in manifest.engines if engine.precision == precision), None)
    reasons = []
    if engine is not None:
        missing = why_no_tensorrt() or "; ".join(plan_mismatches(engine))
        if not missing:
            from components.common.runners.tensorrt import TensorRTRunner

            return TensorRTRunner(bundle.file(engine.file), manifest.shapes, engine)
        reasons.append(f"its plan {engine.file} does not run here ({missing})")
    if precision != "fp16" and precision in manifest.models:
        from components.common.runners.openvino import OpenVINORunner
        from components.common.serving import fit_model

        file = fit_model(manifest.int8_on_cpus).file if precision == "int8" else manifest.models[precision]
        try:
            return OpenVINORunner(bundle.file(file), manifest.shapes)
        except RuntimeError as error:
            reasons.append(f"OpenVINO does not load its {file}: {' '.join(str(error).split())[:300]}")
            raise RuntimeUnavailable(f"nothing here runs its {precision.upper()}: {'; '.join(reasons)}") from error
    reasons.append("a CPU has no FP16 arithmetic" if precision == "fp16" else f"it has no {precision.upper()} model")
    raise RuntimeUnavailable(f"nothing here runs its {precision.upper()}: {'; '.join(reasons)}")
