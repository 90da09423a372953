"""The config.pbtxt files of a model repository, in the text format of Triton's message ModelConfig."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.common.records import Batching
from components.common.shapes import ShapeSpec
from components.common.triton.opening import VERSION

PARAMETER = "max_pending_requests"  # as components/common/triton/pending.py reads it, which needs the server's Python

GPU_PREPROCESS_INSTANCES = 4  # decoders beside a GPU; more cores carry more


@dataclass(frozen=True)
class Enum:
    """A word of the schema, which is written without quotes."""

    word: str


def pbtxt(message: Mapping[str, object], indent: str = "") -> str:
    """A message as text: one line a field, repeated fields of plain values in brackets."""
    lines = []
    for name, value in message.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name} {{\n{pbtxt(value, indent + '  ')}{indent}}}\n")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            lines += [f"{indent}{name} {{\n{pbtxt(item, indent + '  ')}{indent}}}\n" for item in value]
        elif isinstance(value, list | tuple):
            lines.append(f"{indent}{name}: [ {', '.join(map(_plain, value))} ]\n")
        else:
            lines.append(f"{indent}{name}: {_plain(value)}\n")
    return "".join(lines)


def _plain(value: object) -> str:
    if isinstance(value, Enum):
        return value.word
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


@dataclass(frozen=True, kw_only=True)
class ModelNames:
    """The models of a repository."""

    ensemble: str

    @property
    def preprocess(self) -> str:
        """Encoded image to the network's input."""
        return f"{self.ensemble}_preprocess"

    @property
    def network(self) -> str:
        """Input to logits."""
        return f"{self.ensemble}_model"

    @property
    def labels(self) -> str:
        """Logits to names and probabilities."""
        return f"{self.ensemble}_labels"


def ensemble_config(
    names: ModelNames, shapes: ShapeSpec, top_k: int, parameters: Mapping[str, str]
) -> dict[str, object]:
    """Encoded images in, labels and probabilities out. `parameters` tell a client what is served."""

    def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> dict[str, object]:
        return {
            "model_name": model,
            "model_version": -1,
            "input_map": [{"key": key, "value": value} for key, value in inputs.items()],
            "output_map": [{"key": key, "value": value} for key, value in outputs.items()],
        }

    return {
        "name": names.ensemble,
        "platform": "ensemble",
        "max_batch_size": shapes.max_batch,
        **_VERSION_POLICY,
        "input": [_tensor("IMAGE", "TYPE_STRING", [1])],
        "output": [_tensor("LABELS", "TYPE_STRING", [top_k]), _tensor("PROBABILITIES", "TYPE_FP32", [top_k])],
        "ensemble_scheduling": {
            "step": [
                step(names.preprocess, {"IMAGE": "IMAGE"}, {shapes.input_name: "preprocessed"}),
                step(names.network, {shapes.input_name: "preprocessed"}, {shapes.output_name: "scores"}),
                step(
                    names.labels,
                    {shapes.output_name: "scores"},
                    {"LABELS": "LABELS", "PROBABILITIES": "PROBABILITIES"},
                ),
            ]
        },
        "parameters": [{"key": key, "value": {"string_value": value}} for key, value in parameters.items()],
    }


def preprocess_config(names: ModelNames, shapes: ShapeSpec, batching: Batching, instances: int) -> dict[str, object]:
    """Decoding by DALI in the Python backend. It has the same bounds as the network behind it, and waits for nobody."""
    return {
        "name": names.preprocess,
        "backend": "python",
        "max_batch_size": shapes.max_batch,
        **_VERSION_POLICY,
        "input": [_tensor("IMAGE", "TYPE_STRING", [1])],
        "output": [_tensor(shapes.input_name, "TYPE_FP32", _image(shapes))],
        "dynamic_batching": {"max_queue_delay_microseconds": 0},
        "instance_group": [{"count": instances, "kind": Enum("KIND_CPU")}],
        **_bound(batching),
    }


def labels_config(names: ModelNames, shapes: ShapeSpec, num_classes: int, top_k: int) -> dict[str, object]:
    """Names and probabilities of the likeliest classes."""
    return {
        "name": names.labels,
        "backend": "python",
        "max_batch_size": shapes.max_batch,
        **_VERSION_POLICY,
        "input": [_tensor(shapes.output_name, "TYPE_FP32", [num_classes])],
        "output": [_tensor("LABELS", "TYPE_STRING", [top_k]), _tensor("PROBABILITIES", "TYPE_FP32", [top_k])],
        "dynamic_batching": {"max_queue_delay_microseconds": 0},
        "instance_group": [{"count": 1, "kind": Enum("KIND_CPU")}],
    }


def cpu_network_config(
    names: ModelNames, shapes: ShapeSpec, num_classes: int, batching: Batching, labels_file: str
) -> dict[str, object]:
    """The network by OpenVINO in the Python backend."""
    return {
        "name": names.network,
        "backend": "python",
        **_network(shapes, num_classes, batching, labels_file),
        "instance_group": [{"count": 1, "kind": Enum("KIND_CPU")}],
        **_bound(batching),
    }


def gpu_network_config(
    names: ModelNames,
    shapes: ShapeSpec,
    num_classes: int,
    batching: Batching,
    labels_file: str,
    plans: Mapping[str, str],
) -> dict[str, object]:
    """The network by TensorRT. `plans`: file in the version's folder by compute capability, such as "9.0"."""
    sizes = _graph_sizes(batching.preferred_batch_size or shapes.opt_batch, shapes)
    graphs = [
        {
            "batch_size": size,
            "input": [{"key": shapes.input_name, "value": {"dim": _image(shapes)}}],
            # Batches between two sizes run as the larger one.
            "graph_lower_bound": {
                "batch_size": below + 1,
                "input": [{"key": shapes.input_name, "value": {"dim": _image(shapes)}}],
            },
        }
        for below, size in zip((0, *sizes), sizes, strict=False)
    ]
    return {
        "name": names.network,
        "backend": "tensorrt",
        "platform": "tensorrt_plan",
        # A GPU that is not named here finds no file: a plan for another one would not run, or not as measured.
        "default_model_filename": "no_plan_for_this_gpu",
        "cc_model_filenames": [{"key": key, "value": value} for key, value in sorted(plans.items())],
        **_network(shapes, num_classes, batching, labels_file),
        "instance_group": [{"count": batching.num_instances, "kind": Enum("KIND_GPU")}],
        "optimization": {"cuda": {"graphs": True, "graph_spec": graphs, "output_copy_stream": True}},
    }


_VERSION_POLICY = {"version_policy": {"specific": {"versions": [int(VERSION)]}}}


def _network(shapes: ShapeSpec, num_classes: int, batching: Batching, labels_file: str) -> dict[str, object]:
    preferred = batching.preferred_batch_size
    output = {**_tensor(shapes.output_name, "TYPE_FP32", [num_classes]), "label_filename": labels_file}
    return {
        "max_batch_size": shapes.max_batch,
        **_VERSION_POLICY,
        "input": [_tensor(shapes.input_name, "TYPE_FP32", _image(shapes))],
        "output": [output],
        "dynamic_batching": {
            **({"preferred_batch_size": [preferred]} if preferred else {}),
            "max_queue_delay_microseconds": batching.queue_delay_us,
        },
        "model_warmup": [
            {
                "name": f"batch of {size}",
                "batch_size": size,
                "inputs": [
                    {
                        "key": shapes.input_name,
                        "value": {"data_type": Enum("TYPE_FP32"), "dims": _image(shapes), "random_data": True},
                    }
                ],
            }
            for size in sorted({1, preferred or 1})
        ],
    }


def _graph_sizes(largest: int, shapes: ShapeSpec) -> tuple[int, ...]:
    """Batches that get a CUDA graph: powers of two, and the preferred one."""
    sizes = {2**power for power in range(10)} | {largest}
    return tuple(sorted(size for size in sizes if shapes.min_batch <= size <= min(largest, shapes.max_batch)))


def _bound(batching: Batching) -> dict[str, object]:
    """How many requests may wait. Our own models look after it: see components/common/triton/pending.py."""
    return {"parameters": [{"key": PARAMETER, "value": {"string_value": str(batching.max_queue_size)}}]}


def _tensor(name: str, data_type: str, dims: Sequence[int]) -> dict[str, object]:
    return {"name": name, "data_type": Enum(data_type), "dims": list(dims)}


def _image(shapes: ShapeSpec) -> list[int]:
    return list(shapes.input_shape(1)[1:])
