"""Engines for another GPU: from the Bundle of an earlier run to plans that were measured on the GPU here.

    enginery engines BUNDLE --data DIR

ONNX files, scales and the layers kept out of INT8 stay as they are, so nothing is trained or calibrated again.
"""

from typing import Any

from kfp import dsl

from components.export.component import export_engines
from enginery.cluster.resources import apply_resources
from pipelines import graph


@dsl.pipeline(name="engines", description="Bundle of another machine -> TensorRT engines, proved on the GPU here.")
def engines(
    model: str,
    data: str,
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
    """The chain from export on, which finds a Bundle and builds its engines only."""
    dataset = graph.prepare(data=data, task="classification", seed=seed, settings=preprocess)
    bundle = export_engines(model=model, dataset=dataset.outputs["dataset"], settings=export)
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
    )


if __name__ == "__main__":
    from enginery.cli.main import run_this

    run_this(__file__)
