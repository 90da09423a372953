"""The graph that TensorRT is asked to build, and what becomes of a graph that it refuses: without TensorRT."""

import onnx
import pytest

from components.common.contracts.errors import EngineryError
from components.common.process.steplog import StepLog
from components.export import backends
from components.export.backends import TensorRTBackend
from components.export.blocks import find_blocks
from components.export.config import ExportConfig
from components.export.mixed import Compiled
from components.export.placement import quantizable_layers

from ..measurements import engine_entry
from ..networks import shapes_of


@pytest.fixture
def tensorrt(resnet18, tmp_path, monkeypatch):
    """A backend whose TensorRT refuses the first graphs, by their number, and what it was asked to build."""
    path, model, _, scales = resnet18
    asked: list[tuple[int, bool, int]] = []  # level, whether weights are stored in INT8, layers in INT8

    def builds(num_refused: int) -> tuple[TensorRTBackend, list[tuple[int, bool, int]]]:
        def compile_plan(settings, shapes, file, graph, **options):
            made = onnx.load(file)
            weights = [entry for entry in made.graph.initializer if len(entry.dims) == 4]
            stored = any(entry.data_type == onnx.TensorProto.INT8 for entry in weights)
            layers = [node for node in made.graph.node if node.op_type in ("Conv", "Gemm")]
            produced = {name: node.op_type for node in made.graph.node for name in node.output}
            in_int8 = sum(produced.get(node.input[1]) == "DequantizeLinear" for node in layers)
            asked.append((settings.optimization_level, stored, in_int8))
            if len(asked) <= num_refused:
                raise EngineryError(f"no kernel for {file}", code="build-failed")
            return engine_entry(source_onnx=file.name, tensorrt_version="8.6.1")

        monkeypatch.setattr(backends, "compile_plan", compile_plan)
        monkeypatch.setattr(backends, "onnx_file_for", lambda precision: "int8.onnx")  # of TensorRT's version
        backend = TensorRTBackend(
            config=ExportConfig(optimization_level=3),
            shapes=shapes_of("resnet18"),
            fp32=model,
            graph=model,
            scales=scales,
            reference=Compiled(name="FP16", precision="fp16", excluded=(), graph=model, file=path),
            folder=tmp_path,
            cache=None,
            log=StepLog("export"),
        )
        return backend, asked

    return builds


def test_a_graph_that_tensorrt_refuses_is_built_in_another_form_and_the_next_ones_in_that_form(tensorrt, resnet18):
    backend, asked = tensorrt(2)
    every = len(quantizable_layers(resnet18[1]))
    built = backend.compile("INT8 everywhere", ())
    assert asked == [(3, True, every), (3, False, every), (2, False, every)]
    assert (built.entry.weights, built.excluded) == ("qdq", ())
    forms = [form.partition(": ")[0] for form in built.entry.failed_forms]
    assert forms == ["weights in INT8, level 3", "weights in float behind QuantizeLinear, level 3"]
    assert not [form for form in built.entry.failed_forms if str(backend.folder) in form]  # a temporary folder
    kept = quantizable_layers(resnet18[1])[0]
    assert backend.compile("mixed 1", (kept,)).excluded == (kept,)
    assert asked[3:] == [(2, False, every - 1)]


def test_a_graph_that_tensorrt_builds_in_no_form_is_refused_with_all_that_was_tried(tensorrt, resnet18):
    backend, asked = tensorrt(99)
    with pytest.raises(EngineryError, match="in no form") as caught:
        backend.compile("INT8 everywhere", ())
    kinds = {block.kind for block in find_blocks(resnet18[1]) if block.layers}
    assert len(asked) == 3 + (len(kinds) if len(kinds) > 1 else 0)
    assert str(caught.value).count("no kernel for int8.onnx") == len(asked)
