"""The chain of resnet50.py for a data set so large that several machines pack it, a part each.

enginery submit pipelines/resnet50_parts.py --data s3://BUCKET/imagenet --num-parts 16
"""

from typing import Any

from kfp import dsl

from pipelines import graph


@dsl.pipeline(
    name="resnet50-parts",
    description="Very many labelled images, packed in parts -> INT8 model, proved as accurate as the FP32 one.",
)
def resnet50_parts(
    data: str,
    num_parts: int = 8,
    architecture: str = "resnet50",
    image_size: int = 224,
    epochs: int = 90,
    global_batch_size: int = 256,
    learning_rate: float = 0.2,
    calibration_method: str = "auto",
    num_calibration_images: int = 512,
    max_top1_drop_points: float = 0.5,
    latency_budget: str = "",
    registered_model: str = "",
    seed: int = 0,
    preprocess: dict[str, Any] = {},  # noqa: B006
    train: dict[str, Any] = {},  # noqa: B006
    export: dict[str, Any] = {},  # noqa: B006
    validate: dict[str, Any] = {},  # noqa: B006
    gate: dict[str, Any] = {},  # noqa: B006
    promote: dict[str, Any] = {},  # noqa: B006
) -> None:
    """The whole chain."""
    dataset = graph.prepare_in_parts(data=data, seed=seed, num_parts=num_parts, settings=preprocess)
    checkpoint = graph.fit(
        dataset,
        architecture=architecture,
        image_size=image_size,
        epochs=epochs,
        global_batch_size=global_batch_size,
        learning_rate=learning_rate,
        seed=seed,
        settings=train,
    )
    bundle = graph.quantize(
        checkpoint,
        dataset,
        calibration_method=calibration_method,
        num_calibration_images=num_calibration_images,
        max_top1_drop_points=max_top1_drop_points,
        settings=export,
        gate_settings=gate,
    )
    graph.prove_and_promote(
        bundle,
        dataset,
        max_top1_drop_points=max_top1_drop_points,
        latency_budget=latency_budget,
        registered_model=registered_model,
        validate_settings=validate,
        gate_settings=gate,
        promote_settings=promote,
    )


if __name__ == "__main__":
    from enginery.cli.main import run_this

    run_this(__file__)
