"""The generated config.pbtxt files, as Triton's own schema and golden files have them, and batching by measurements."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from components.common.contracts.records import Batching, BenchmarkReport, BenchmarkRow, LatencyBudget
from components.common.contracts.transforms import ShapeSpec
from enginery.serving.repository import ModelNames, batching_for, model_config

GOLDEN = Path(__file__).parent / "golden"
NAMES = ModelNames(ensemble="classifier")
SHAPES = ShapeSpec(height=224, width=224)
BATCHING = Batching(
    preferred_batch_size=48, queue_delay_us=1250, max_queue_size=900, num_instances=2, reason="within 7 ms"
)
UNMEASURED = BATCHING.model_copy(update={"preferred_batch_size": None, "queue_delay_us": 0, "num_instances": 1})
PLANS = {"9.0": "int8-9.0.plan", "8.0": "int8-8.0.plan"}
COUNTED = ("STATISTICS", "IMAGE", "SHADOW_KEYS")
OPTIONS: dict[str, Any] = {
    "ensemble": {"parameters": {"bundle_digest": "sha256:12", "version": "3"}},
    "preprocess": {"instances": 4},
    "labels": {},
    "cpu": {"batching": UNMEASURED},
    "gpu": {"instances": 2, "plans": PLANS},
}


def config_of(kind: Any, **options: Any) -> str:
    own = {"output_size": [1000], "top_k": 5, "batching": BATCHING, "counted": COUNTED, **options}
    return model_config(kind, NAMES, SHAPES, **own)


CONFIGS = {kind: config_of(kind, **options) for kind, options in OPTIONS.items()}


def parsed(config: str) -> ModelConfig:
    return text_format.Parse(config, ModelConfig())


@pytest.mark.parametrize("name", CONFIGS)
def test_golden(name, request: pytest.FixtureRequest) -> None:
    text, file = CONFIGS[name], GOLDEN / f"{name}.pbtxt"
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
    models = {(config := parsed(CONFIGS[kind])).name: config for kind in ("preprocess", "gpu", "labels")}
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
    config = parsed(config_of("ensemble", parameters={"model": odd}))
    assert config.parameters["model"].string_value == odd


# --- batching from invented measurements


def row(batch: int, images_per_s: float, p99_ms: float, streams: int = 1, **other) -> BenchmarkRow:
    values = {"precision": "int8", "runtime": "tensorrt", "with_transfers": True, **other}
    values |= {"batch_size": batch, "num_streams": streams, "images_per_s": images_per_s, "num_iterations": 100}
    return BenchmarkRow(**values, p50_ms=0.9 * p99_ms, p90_ms=p99_ms, p99_ms=p99_ms)


ROWS = (
    row(1, 1_000, 1.0),
    row(8, 5_000, 1.6),
    row(32, 12_000, 2.7),
    row(64, 12_300, 5.2),
    row(128, 12_500, 10.2),
    row(32, 14_000, 4.4, streams=2),
)


def report(*rows: BenchmarkRow, budget_ms: float | None = None) -> BenchmarkReport:
    budget = LatencyBudget(budget_ms=budget_ms, chosen=None) if budget_ms is not None else None
    return BenchmarkReport(bundle_digest="sha256:0", rows=rows, latency_budget=budget)


@pytest.mark.parametrize(
    ("budget_ms", "batch", "instances", "delay_ms"),
    [
        (10.0, 32, 2, 0.9),  # two batches of 4.4 ms, and 0.9 ms for one image are left
        (9.0, 32, 2, 0.2),  # the rest of the budget is shorter than one image takes
        (8.0, 32, 1, 0.9),  # two streams would take 8.8 ms
        (5.0, 8, 1, 0.9),
        (3.0, 1, 1, 0.0),  # a batch of one waits for nobody
        (0.1, 1, 1, 0.0),  # nothing stays within: the shortest
    ],
)
def test_within_a_latency_budget(budget_ms, batch, instances, delay_ms) -> None:
    found = batching_for("int8", "tensorrt", report(*ROWS, budget_ms=budget_ms))
    assert (found.preferred_batch_size, found.num_instances) == (batch, instances)
    assert found.queue_delay_us == pytest.approx(1e3 * delay_ms, abs=1)
    p99_ms = next(row.p99_ms for row in ROWS if (row.batch_size, row.num_streams) == (batch, instances))
    if budget_ms > 1:
        assert 2 * p99_ms + found.queue_delay_us / 1e3 <= budget_ms + 1e-3


def test_without_a_budget_the_smallest_batch_that_is_nearly_as_fast() -> None:
    found = batching_for("int8", "tensorrt", report(*ROWS[:5]))
    assert (found.preferred_batch_size, found.queue_delay_us) == (32, 900)
    assert "no latency budget: batch 32, 12,000 images/s" in found.reason
    assert "unsure" not in found.reason
    busy = row(32, 12_000, 2.7, others_pct=60.0)
    assert "(p99 2.70 ms), unsure: other processes took 60 %" in batching_for("int8", "tensorrt", report(busy)).reason
    assert "12,000 sentences/s" in batching_for("int8", "tensorrt", report(*ROWS[:5]), unit="sentences").reason


CPU = (row(1, 100, 10, runtime="openvino"), row(16, 400, 40, runtime="openvino"))


def test_only_rows_of_what_is_served_count() -> None:
    others = (
        row(128, 90_000, 1.0, precision="fp16"),
        row(128, 90_000, 1.0, runtime="openvino"),
        row(128, 90_000, 1.0, with_transfers=False),
    )
    assert batching_for("int8", "tensorrt", report(*ROWS[:2], *others)).preferred_batch_size == 8
    streams = row(16, 600, 60, 2, runtime="openvino")  # the Python backend has none
    found = batching_for("int8", "openvino", report(*CPU, streams))
    assert (found.num_instances, found.preferred_batch_size) == (1, 16)
    for budget_ms in (None, 200.0):  # on a CPU nobody waits for others
        assert batching_for("int8", "openvino", report(*CPU, budget_ms=budget_ms)).queue_delay_us == 0


def test_the_queue_holds_what_is_served_in_the_time_to_wait() -> None:
    slow = (row(1, 20, 50, runtime="openvino"), row(4, 30, 140, runtime="openvino"))
    found = batching_for("int8", "openvino", report(*slow), max_wait_s=2)
    assert found.max_queue_size == 60
    assert batching_for("int8", "openvino", report(*slow), max_wait_s=0.1).max_queue_size == 16  # four batches
    assert batching_for("int8", "tensorrt", report(*ROWS)).max_queue_size == 1024  # and not 28,000


@pytest.mark.parametrize("benchmark", [None, report(row(8, 10, 1, precision="fp32"))])
def test_without_measurements(benchmark) -> None:
    found = batching_for("int8", "tensorrt", benchmark)
    assert (found.preferred_batch_size, found.queue_delay_us, found.max_queue_size) == (None, 0, 128)
    assert "no speed of INT8 by tensorrt was measured" in found.reason
