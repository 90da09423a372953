"""INT8 on CPUs that one does not have: oneDNN limited to less than this CPU can do."""

import json
import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from components.common.contracts.errors import RuntimeUnavailable
from components.common.contracts.instruction_sets import SATURATING, VARIABLE, available, instruction_set
from components.common.contracts.records import CpuModel
from components.common.runtimes.selection import fit_model, not_measured_here
from components.export.qdq import Arithmetic, insert_qdq
from tests.processes import run_python
from tests.unit.networks import onnx_model

WAYS = {
    "signed": Arithmetic(),
    "unsigned": Arithmetic(activations="unsigned"),
    "signed_7bit": Arithmetic(weight_bits=7),
    "unsigned_7bit": Arithmetic(weight_bits=7, activations="unsigned"),
}
SCALES = {"r": 1 / 127, "d": 288 / 127, "e": 9000 / 127}
SMALL_CODES = {"images": 1 / 127, "d": 1000 / 127, "e": 1000 / 127}  # but for the first convolution's
# In a process of its own, since oneDNN reads the variable once. Prints each file's answers and kernels.
PROBE = """
import json, sys
from pathlib import Path
import numpy as np
from components.common.contracts.instruction_sets import instruction_set
from components.common.runtimes.openvino import OpenVINORunner
from components.common.contracts.transforms import ShapeSpec

folder, answers, kernels = Path(sys.argv[1]), {}, {}
images = np.load(folder / "images.npy")
for file in sorted(folder.glob("*.onnx")):
    runner = OpenVINORunner(file, ShapeSpec(height=8, width=8))
    answers[file.stem] = runner.infer(images).tolist()
    kernels[file.stem] = [
        node.get_rt_info()["primitiveType"].astype(str)
        for node in runner._compiled.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].astype(str) == "Convolution"
    ]
print(json.dumps([instruction_set(), answers, kernels]))
"""

# Behind it, a choice; of "fp32.onnx" as on an instruction set that no list names.
CHOICE = """
import onnx
import torch
from components.export import quantization
from components.export.selection import Candidates

SATURATING = quantization.SATURATING
quantization._CLOSE = float("inf")  # unsigned activations are as accurate as signed ones, and faster
shapes = ShapeSpec(channels=32, height=8, width=8)
candidates = Candidates(shapes=shapes, device=torch.device("cpu"), directory=folder, log=None)
speeds = {"unsigned": 2.0, "signed": 1.0}
for file, scales in json.loads(sys.argv[2]).items():
    quantization.SATURATING = () if file == "fp32.onnx" else SATURATING
    search = quantization.ArithmeticSearch(
        fp32=onnx.load(folder / file),
        scales=scales,
        batches=[torch.from_numpy(np.load(folder / "images.npy"))],
        candidates=candidates,
    )
    search._time = lambda *ways, search=search: [
        search._trial(way).model_copy(update={"images_per_s": speeds[way.activations]}) for way in ways
    ]
    chosen = search.choose()
    eight, seven = quantization.cpu_models(chosen.activations, chosen)
    print(json.dumps([chosen.weight_bits, eight.signed_weight_bits, eight.saturates_on, seven.saturates_on]))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two convolutions with the largest activations and weights there are, in FP32 and in each way of INT8."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("files")
    images = np.ones((2, 32, 8, 8), np.float32)
    images[1] = rng.uniform(0, 1, images.shape[1:])
    w1, w2 = np.ones((32, 32, 3, 3)), rng.choice([-1.0, 1.0], (16, 32, 1, 1), p=[0.1, 0.9])
    fp32 = network(w1, w2, after="Relu")
    np.save(folder / "images.npy", images)
    models = {"fp32": fp32, **{name: insert_qdq(fp32, SCALES, arithmetic=way) for name, way in WAYS.items()}}
    models["signed_input"] = network(w1, rng.normal(0, 0.1, w2.shape).clip(-1, 1), after="Identity")
    for name, model in models.items():
        onnx.save(model, folder / f"{name}.onnx")
    return folder


def network(w1: np.ndarray, w2: np.ndarray, *, after: str) -> onnx.ModelProto:
    """Two convolutions; what the first reads comes out of `after`."""
    nodes = [
        helper.make_node(after, ["images"], ["r"]),
        helper.make_node("Conv", ["r", "w1"], ["c"], "first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "w2"], ["e"], "second"),
        helper.make_node("GlobalAveragePool", ["e"], ["g"]),
        helper.make_node("Flatten", ["g"], ["logits"]),
    ]
    weights = {"w1": w1.astype(np.float32), "w2": w2.astype(np.float32)}
    return onnx_model(nodes, {"images": ["N", 32, 8, 8]}, {"logits": ["N", 16]}, weights)


@pytest.fixture(scope="module")
def simulated(files):
    """Logits of the files, computed in floating point."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    images = np.load(files / "images.npy")
    return {
        file.stem: ort.InferenceSession(file, options, providers=["CPUExecutionProvider"]).run(
            None, {"images": images}
        )[0]
        for file in files.glob("*.onnx")
    }


NORMALIZED = """
import sys
from pathlib import Path
import numpy as np
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.openvino import OpenVINORunner
from tests.unit.refusals import refuses

with refuses("cpu-without-avx"):
    OpenVINORunner(Path(sys.argv[1]), ShapeSpec(height=8, width=8)).infer(np.ones((2, 3, 8, 8), np.float32))
"""


@pytest.mark.skipif(not available(), reason="oneDNN's instruction sets are those of x86-64")
@pytest.mark.parametrize("sizes", [["N", 3, 8, 8], [2, 3, 8, 8]])  # OpenVINO finds out with images, or before
def test_layer_normalization_without_avx_is_refused(tmp_path, sizes) -> None:
    node = helper.make_node("LayerNormalization", ["images", "scale"], ["logits"])
    model = onnx_model([node], {"images": sizes}, {"logits": sizes}, {"scale": np.ones(8, np.float32)})
    onnx.save(model, tmp_path / "model.onnx")
    done = run_python("-c", NORMALIZED, tmp_path / "model.onnx", **{VARIABLE: "SSE41"})
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not available(), reason="oneDNN's instruction sets are those of x86-64")
@pytest.mark.parametrize(
    ("limit", "chooses"),
    [
        *((limit, limit == "AVX2") for limit in (*available(), "")),  # importing what chooses takes seconds
        *(pytest.param(limit, True, marks=pytest.mark.slow) for limit in available()[:1] if limit != "AVX2"),
    ],
)
def test_7_bit_weights_are_exact_and_chosen_where_sums_saturate(files, simulated, limit, chooses):
    cases = {"fp32.onnx": (SCALES, [7, None]), "signed_input.onnx": (SMALL_CODES, [8, 7])}
    scales = json.dumps({file: scales for file, (scales, _) in cases.items()})
    done = run_python("-c", PROBE + (CHOICE if chooses else ""), files, scales, **{VARIABLE: limit})
    assert done.returncode == 0, done.stderr
    first, *choices = map(json.loads, done.stdout.splitlines())
    here, answers, kernels = first
    assert here == (limit or available()[0])
    # Shows that the limit took effect. AMX has kernels of both names.
    kernel = {"SSE41": "sse4", "AVX2": "avx2", "AVX2_VNNI": "avx2", "AVX512_CORE_AMX": "amx|avx512"}.get(here, "avx512")
    for name in WAYS:
        assert all(re.search(kernel, used) and used.lower().endswith("i8") for used in kernels[name]), kernels
    error = {
        name: float(np.abs(np.asarray(answers[name]) - expected).max() / np.abs(expected).max())
        for name, expected in simulated.items()
    }
    assert max(error["fp32"], error["signed_7bit"], error["unsigned_7bit"]) < 0.02, error
    assert (error["unsigned"] > 0.2) is (here in SATURATING), error
    assert len(choices) == (len(cases) if chooses else 0)
    for (_, bits), (*found, eight_saturates_on, seven_saturates_on) in zip(cases.values(), choices, strict=False):
        assert found == (bits if limit in SATURATING else [8, None])
        assert (limit in eight_saturates_on, seven_saturates_on) == (found[0] == 7, [])


def cpu(tmp_path, flags: str):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : fpu sse4_1 {flags}\n")
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        ("avx2", "", "AVX2"),
        ("avx2 avx_vnni", "", "AVX2_VNNI"),
        ("avx2 avx_vnni", "avx2", "AVX2"),
        ("avx2 avx512bw avx512dq avx512vl", "", "AVX512_CORE"),
        ("avx2 avx512bw avx512dq avx512vl avx512_vnni amx_int8", "", "AVX512_CORE_AMX"),
        ("avx2 avx512bw avx512dq avx512vl avx512_vnni amx_int8", "AVX512_CORE_BF16", "AVX512_CORE_VNNI"),
        ("avx2 avx512bw avx512dq avx512vl avx512_vnni amx_int8", "AVX512_CORE", "AVX512_CORE"),
        ("", "AVX512_CORE_VNNI", "SSE41"),  # a limit adds nothing
        ("avx2 avx_vnni", "AVX512_CORE_VNNI", "AVX2"),  # oneDNN's set of that name is without AVX-VNNI
    ],
)
@pytest.mark.parametrize("variable", [VARIABLE, "DNNL_MAX_CPU_ISA"])
def test_the_widest_set_within_the_limit(tmp_path, monkeypatch, flags, limit, expected, variable):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(variable, limit)
    assert instruction_set(cpu(tmp_path, flags)) == expected


def test_an_x86_cpu_of_which_nothing_is_known_gets_what_is_right_on_each(tmp_path, monkeypatch):
    for machine, expected in {"x86_64": "SSE41", "aarch64": "aarch64"}.items():
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert instruction_set(tmp_path / "nothing") == expected


def test_a_verdict_of_another_cpu_or_of_none_is_named(monkeypatch):
    monkeypatch.setattr("components.common.runtimes.selection.instruction_set", lambda: "AVX2")
    assert not_measured_here("int8", ["AVX2"]) == not_measured_here("fp32", []) == ""
    for measured_on, note in {("SSE41",): "measured with SSE41", (): "no verdict on this model is of a CPU"}.items():
        assert note in not_measured_here("int8", measured_on)


def test_a_cpu_takes_the_fit_file_or_refuses(monkeypatch):
    eight = CpuModel(file="int8_cpu.onnx", weight_bits=8, activations="unsigned", saturates_on=SATURATING)
    seven = CpuModel(file="int8_cpu_7bit.onnx", weight_bits=7, activations="unsigned", saturates_on=())
    checked = eight.model_copy(update={"saturates_on": ("SSE41", "AVX512_CORE")})  # export has measured AVX2
    for here, expected in {"AVX2": seven, "AVX2_VNNI": eight, "aarch64": eight}.items():
        monkeypatch.setattr("components.common.runtimes.selection.instruction_set", lambda here=here: here)
        assert fit_model([eight, seven]) == expected
        assert fit_model([checked, seven]) == checked
    monkeypatch.setattr("components.common.runtimes.selection.instruction_set", lambda: "AVX2")
    with pytest.raises(RuntimeUnavailable, match=r"INT8 with AVX2: .*int8_cpu.onnx \(8-bit.*AVX2, AVX512_CORE, SSE41"):
        fit_model([eight])
