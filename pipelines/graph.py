"""The parts of the graph that pipelines share."""

from typing import Any

from kfp import dsl

from components.common.tasks import TaskName
from components.gate.component import gate
from components.merge.component import merge
from components.preprocess.component import list_parts, preprocess, preprocess_part
from components.promote.component import promote
from components.validate.component import validate
from enginery.cluster.resources import apply_resources

Settings = dict[str, Any]
# Recipe of networks for boxes and masks, as it trained RetinaNet and DeepLabV3 on an H200.
DENSE_RECIPE: Settings = {
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
}


def prepare(*, data: str, task: TaskName, seed: int, settings: Settings) -> dsl.PipelineTask:
    """Images to a dataset."""
    return apply_resources(preprocess(data=data, task=task, seed=seed, settings=settings), "preprocess")


def prepare_in_parts(*, data: str, task: TaskName, seed: int, num_parts: int, settings: Settings) -> dsl.PipelineTask:
    """Images to a dataset that several machines pack at the same time."""
    parts = apply_resources(list_parts(num_parts=num_parts), "preprocess")
    with dsl.ParallelFor(items=parts.output, name="parts") as part:
        packed = preprocess_part(data=data, task=task, seed=seed, part=part, settings=settings)
        apply_resources(packed.set_display_name("preprocess"), "preprocess")
    return apply_resources(merge(parts=dsl.Collected(packed.outputs["dataset_part"])), "merge")


def prove_and_promote(
    bundle: dsl.PipelineTask,
    dataset: dsl.PipelineTask,
    *,
    max_drop_points: float,
    latency_budget: str,
    registered_model: str,
    validate_settings: Settings,
    gate_settings: Settings,
    promote_settings: Settings,
    source: str = "",
) -> None:
    """A bundle to a verdict, and to the registry if it passes. `source` is the user's own model, which names it."""
    measured = validate(
        bundle=bundle.outputs["bundle"],
        dataset=dataset.outputs["dataset"],
        max_drop_points=max_drop_points,
        latency_budget=latency_budget,
        settings=validate_settings,
        gate_settings=gate_settings,
    )
    apply_resources(measured, "validate")
    decided = gate(report=measured.outputs["report"], max_drop_points=max_drop_points, settings=gate_settings)
    apply_resources(decided, "gate")
    promoted = promote(
        bundle=bundle.outputs["bundle"],
        report=measured.outputs["report"],
        verdict=decided.outputs["verdict"],
        dataset=dataset.outputs["dataset"],
        registered_model=registered_model,
        source=source,
        settings=promote_settings,
    )
    apply_resources(promoted, "promote")
