"""Quantize a model of your own: from a checkpoint or an ONNX file to a validated INT8 model.

    enginery run pipelines/quantize.py --model FILE --data DIR

The dataset gives the images to calibrate with (its training split) and to validate with.
"""

from typing import Any

from kfp import dsl

from components.export.component import export_own
from enginery.cluster.resources import apply_resources
from pipelines import graph


@dsl.pipeline(name="quantize", description="Own checkpoint or ONNX file -> INT8 model, proved as accurate as FP32.")
def quantize(
    model: str,
    data: str,
    architecture: str = "",
    image_size: int = 224,
    calibration_method: str = "auto",
    num_calibration_images: int = 512,
    max_drop_points: float = 0.5,
    latency_budget: str = "",
    registered_model: str = "",
    seed: int = 0,
    preprocess: dict[str, Any] = {},  # noqa: B006
    export: dict[str, Any] = {},  # noqa: B006
    validate: dict[str, Any] = {},  # noqa: B006
    gate: dict[str, Any] = {},  # noqa: B006
    promote: dict[str, Any] = {},  # noqa: B006
) -> None:
    """The chain from export on."""
    dataset = graph.prepare(data=data, task="classification", seed=seed, settings=preprocess)
    bundle = export_own(
        model=model,
        dataset=dataset.outputs["dataset"],
        architecture=architecture,
        image_size=image_size,
        calibration_method=calibration_method,
        num_calibration_images=num_calibration_images,
        max_drop_points=max_drop_points,
        settings=export,
        gate_settings=gate,
    )
    apply_resources(bundle.set_display_name("export"), "export")
    graph.prove_and_promote(
        bundle,
        dataset,
        max_drop_points=max_drop_points,
        latency_budget=latency_budget,
        registered_model=registered_model,
        validate_settings=validate,
        gate_settings=gate,
        promote_settings=promote,
        source=model,
    )


if __name__ == "__main__":
    from enginery.cli.main import run_this

    run_this(__file__)
