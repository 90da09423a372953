"""The generated config.pbtxt files: as Triton's own schema reads them, and as their golden files."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from components.common.contracts.records import Batching
from components.common.contracts.transforms import ShapeSpec
from enginery.serving.repository import (
    ModelNames,
    cpu_network_config,
    ensemble_config,
    gpu_network_config,
    labels_config,
    pbtxt,
    preprocess_config,
)

GOLDEN = Path(__file__).parent / "golden"
NAMES = ModelNames(ensemble="classifier")
SHAPES = ShapeSpec(height=224, width=224)
BATCHING = Batching(
    preferred_batch_size=48, queue_delay_us=1250, max_queue_size=900, num_instances=2, reason="within 7 ms"
)
UNMEASURED = BATCHING.model_copy(update={"preferred_batch_size": None, "queue_delay_us": 0, "num_instances": 1})
PLANS = {"9.0": "int8-9.0.plan", "8.0": "int8-8.0.plan"}
CONFIGS = {
    "ensemble": ensemble_config(NAMES, SHAPES, 5, {"bundle_digest": "sha256:12", "version": "3"}),
    "preprocess": preprocess_config(NAMES, SHAPES, BATCHING, 4),
    "labels": labels_config(NAMES, SHAPES, 1000, 5),
    "cpu": cpu_network_config(NAMES, SHAPES, 1000, UNMEASURED, "labels.txt"),
    "gpu": gpu_network_config(NAMES, SHAPES, 1000, BATCHING, "labels.txt", PLANS),
}


def parsed(config: dict[str, object]) -> ModelConfig:
    return text_format.Parse(pbtxt(config), ModelConfig())


@pytest.mark.parametrize("name", CONFIGS)
def test_golden(name, request: pytest.FixtureRequest) -> None:
    text, file = pbtxt(CONFIGS[name]), GOLDEN / f"{name}.pbtxt"
    if request.config.getoption("--update-golden"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), "run `make golden` and read the diff"
    config = parsed(CONFIGS[name])  # by Triton's own schema
    assert list(config.version_policy.specific.versions) == [1]
    # With a queue policy, Triton sleeps between batches.
    assert not config.dynamic_batching.HasField("default_queue_policy")


def test_cuda_graphs_leave_no_batch_out() -> None:
    """Every size up to the preferred one belongs to just one graph, which is at most twice as large."""
    graphs = parsed(CONFIGS["gpu"]).optimization.cuda.graph_spec
    covered = [(graph.graph_lower_bound.batch_size, graph.batch_size) for graph in graphs]
    assert covered == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 48)]
    for bound in (*graphs, *(graph.graph_lower_bound for graph in graphs)):
        assert list(bound.input["images"].dim) == [3, 224, 224]


def test_the_tensors_of_the_ensemble_fit_together() -> None:
    models = {config["name"]: parsed(config) for config in (CONFIGS[key] for key in ("preprocess", "gpu", "labels"))}
    ensemble = parsed(CONFIGS["ensemble"])
    known = {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        model = models[step.model_name]
        for tensor in model.input:
            assert known[step.input_map[tensor.name]] == (tensor.data_type, list(tensor.dims))
        for tensor in model.output:
            known[step.output_map[tensor.name]] = (tensor.data_type, list(tensor.dims))
    for tensor in ensemble.output:
        assert known[tensor.name] == (tensor.data_type, list(tensor.dims))
    assert ensemble.parameters["bundle_digest"].string_value == "sha256:12"


def test_text_that_needs_quoting_is_read_back() -> None:
    odd = 'a "quoted" name \\ with ünïcode\n'
    config = parsed(ensemble_config(NAMES, SHAPES, 1, {"model": odd}))
    assert config.parameters["model"].string_value == odd
