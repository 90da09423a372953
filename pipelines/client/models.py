"""What a server says of its models: the classifier that takes image files, and the network behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common.errors import EngineryError, UserError
from pipelines.client.transport import Transport


@dataclass(frozen=True, kw_only=True)
class ClassifierModel:
    """A model from an image file to labels. Names are the server's."""

    name: str
    image_input: str  # BYTES, one image file
    labels_output: str  # BYTES [k], the likeliest first
    probabilities_output: str  # FP32 [k]
    batched: bool  # whether the shapes begin with a batch


@dataclass(frozen=True, kw_only=True)
class NetworkModel:
    """The network itself: normalized tensors to logits."""

    name: str
    input: str  # FP32
    shape: tuple[int, ...]  # of one image, such as (3, 224, 224)
    output: str  # FP32 [classes]
    max_batch_size: int
    config: Mapping[str, Any]  # as Triton has it

    @property
    def batches(self) -> bool:
        """Whether the server puts requests together."""
        return "dynamic_batching" in self.config


async def find_classifier(transport: Transport, name: str | None) -> ClassifierModel:
    """The model of this name, or the only one of the server that takes image files.

    Raises:
        UserError: there is none or more than one, or the named one is no such model.
    """
    if name is not None:
        config = await transport.config(name)
        if (model := _classifier(await transport.metadata(name), config)) is None:
            raise UserError(f"the model {name} of this server does not take image files to labels; {_WANTED}")
        return model
    names = sorted({entry["name"] for entry in await transport.index() if entry.get("state", "READY") == "READY"})
    found = []
    for other in names:
        if (model := _classifier(await transport.metadata(other), await transport.config(other))) is not None:
            found.append(model)
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"this server has {len(found)} models: {_listed(found)}; choose one with --model")
    raise UserError(f"this server has no model that takes image files ({', '.join(names) or 'no models'}); {_WANTED}")


_WANTED = "such a model has one BYTES input and the outputs BYTES and FP32, as `enginery serve` sets it up"


async def find_network(transport: Transport, classifier: str) -> NetworkModel:
    """The network that an image model hands its tensors to, by the steps of its ensemble.

    Raises:
        EngineryError: the ensemble has no such step.
    """
    config = await transport.config(classifier)
    names = [step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", [])] or [classifier]
    for name in names:
        if (model := await network(transport, name)) is not None:
            return model
    raise EngineryError(f"none of the models behind {classifier} ({', '.join(names)}) takes tensors")


async def network(transport: Transport, name: str) -> NetworkModel | None:
    """The model as a network; None where it does not turn one FP32 image tensor into FP32."""
    metadata, config = await transport.metadata(name), await transport.config(name)
    inputs, outputs = metadata.get("inputs", []), metadata.get("outputs", [])
    if len(inputs) != 1 or inputs[0]["datatype"] != "FP32" or not outputs or outputs[0]["datatype"] != "FP32":
        return None
    max_batch_size = int(config.get("max_batch_size", 0))
    shape = tuple(int(size) for size in inputs[0]["shape"][1 if max_batch_size else 0 :])
    if len(shape) != 3 or min(shape) < 1:
        return None
    return NetworkModel(
        name=name,
        input=inputs[0]["name"],
        shape=shape,
        output=outputs[0]["name"],
        max_batch_size=max_batch_size,
        config=config,
    )


def _classifier(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> ClassifierModel | None:
    inputs, outputs = metadata.get("inputs", []), metadata.get("outputs", [])
    if len(inputs) != 1 or inputs[0]["datatype"] != "BYTES":
        return None
    labels = [entry["name"] for entry in outputs if entry["datatype"] == "BYTES"]
    probabilities = [entry["name"] for entry in outputs if entry["datatype"] == "FP32"]
    if len(labels) != 1 or len(probabilities) != 1:
        return None
    return ClassifierModel(
        name=metadata["name"],
        image_input=inputs[0]["name"],
        labels_output=labels[0],
        probabilities_output=probabilities[0],
        batched=int(config.get("max_batch_size", 0)) > 0,
    )


def _listed(models: Sequence[ClassifierModel]) -> str:
    return ", ".join(model.name for model in models)
