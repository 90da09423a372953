"""Train ResNet-50 (or another classifier) on a folder of images and end with a validated INT8 model.

enginery run pipelines/resnet50.py --data DIR
"""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kfp import dsl
from kfp.dsl.graph_component import GraphComponent

from components.common.tasks import TASKS, TaskName
from components.export.component import export as export_step
from components.train.component import train as train_step
from enginery.cluster.resources import apply_resources
from pipelines import graph


def whole_chain(
    name: str,
    description: str,
    *,
    task: TaskName = "classification",
    recipe: Mapping[str, Any] = MappingProxyType({}),
    in_parts: bool = False,
) -> GraphComponent:
    """Return the pipeline of the whole chain.

    Args:
        name: of the pipeline.
        description: shown beside it.
        task: what the images are labelled for.
        recipe: other defaults of inputs, among them a network of that task.
        in_parts: add the input num_parts, and have as many machines pack.
    """

    def chain(
        data: str,
        architecture: str = "resnet50",
        image_size: int = 224,
        epochs: int = 90,
        global_batch_size: int = 256,
        learning_rate: float = 0.2,
        calibration_method: str = "auto",
        num_calibration_images: int = 512,
        max_drop_points: float = 0.5,
        latency_budget: str = "",
        registered_model: str = "",
        seed: int = 0,
        preprocess: dict[str, Any] = {},  # noqa: B006
        train: dict[str, Any] = {},  # noqa: B006
        export: dict[str, Any] = {},  # noqa: B006
        validate: dict[str, Any] = {},  # noqa: B006
        gate: dict[str, Any] = {},  # noqa: B006
        promote: dict[str, Any] = {},  # noqa: B006
        num_parts: int = 8,
    ) -> None:
        """The whole chain."""
        if in_parts:
            dataset = graph.prepare_in_parts(data=data, task=task, seed=seed, num_parts=num_parts, settings=preprocess)
        else:
            dataset = graph.prepare(data=data, task=task, seed=seed, settings=preprocess)
        checkpoint = train_step(
            dataset=dataset.outputs["dataset"],
            architecture=architecture,
            image_size=image_size,
            epochs=epochs,
            global_batch_size=global_batch_size,
            learning_rate=learning_rate,
            seed=seed,
            settings=train,
        )
        apply_resources(checkpoint, "train")
        bundle = export_step(
            checkpoint=checkpoint.outputs["checkpoint"],
            dataset=dataset.outputs["dataset"],
            calibration_method=calibration_method,
            num_calibration_images=num_calibration_images,
            max_drop_points=max_drop_points,
            settings=export,
            gate_settings=gate,
        )
        apply_resources(bundle, "export")
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

    # KFP makes an input of each parameter in the signature, and gives their values by position.
    unused = {*(() if in_parts else ("num_parts",)), *(("image_size",) if TASKS[task].of_text else ())}
    inputs = [
        each.replace(default=recipe.get(each.name, each.default))
        for each in inspect.signature(chain).parameters.values()
        if each.name not in unused
    ]

    def with_inputs(*values: Any) -> None:
        chain(**{each.name: value for each, value in zip(inputs, values, strict=True)})

    with_inputs.__doc__ = chain.__doc__
    with_inputs.__signature__ = inspect.Signature(inputs, return_annotation=None)  # type: ignore[attr-defined]
    return dsl.pipeline(name=name, description=description)(with_inputs)


resnet50 = whole_chain("resnet50", "Labelled images -> INT8 model, proved as accurate as the FP32 one.")

if __name__ == "__main__":
    from enginery.cli.main import run_this

    run_this(__file__)
