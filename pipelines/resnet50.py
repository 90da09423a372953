"""Train ResNet-50 (or another classifier) on a folder of images and end with a validated INT8 model.

enginery run pipelines/resnet50.py --data DIR
"""

from typing import Any

from kfp import dsl

from pipelines import graph


@dsl.pipeline(name="resnet50", description="Labelled images -> INT8 model, proved as accurate as the FP32 one.")
def resnet50(
    data: str,
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
    dataset = graph.prepare(data=data, seed=seed, settings=preprocess)
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
