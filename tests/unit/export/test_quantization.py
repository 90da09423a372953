"""The export step from weights to a bundle, on real digits: samples, cache, what is left out, and bad input."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn

from components.common.contracts.errors import UserError
from components.common.contracts.instruction_sets import SATURATING, instruction_set
from components.common.contracts.manifests import BundleManifest, load
from components.common.contracts.records import CALIBRATION_METHODS, CpuTrial
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import ShapeSpec, transform_for
from components.common.process.steplog import StepLog
from components.common.runtimes import tensorrt
from components.common.runtimes.architectures import build_model
from components.common.runtimes.onnxruntime import new_session
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.selection import fit_model
from components.export import calibration, quantization
from components.export.backends import Int8Plans
from components.export.calibration import split_samples
from components.export.config import CACHE_VARIABLE, ExportConfig
from components.export.onnx_export import export_onnx
from components.export.placement import GraphIndex, activation_tensors
from components.export.qdq import Arithmetic, insert_qdq
from components.export.run import run
from components.export.selection import Candidates, Selection

from ..networks import random_images, small_vit, with_outliers
from ..onnx_outputs import run_ort

NUM_TRAINING = 480
SMALL = {"tensorrt": "off", "num_ranking_images": 2, "mixed_engines": 0}


class Said(StepLog):
    """A log that remembers what a person would read."""

    def __init__(self) -> None:
        super().__init__("export")
        self.lines: list[str] = []

    def _say(self, kind: str, text: str) -> None:
        self.lines.append(f"{kind}: {text}")


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    layers = []
    for inputs, outputs, stride in ((3, 16, 2), (16, 16, 1), (16, 32, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(32, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    path = tmp_path_factory.mktemp("network") / "own.onnx"
    export_onnx(model.eval(), path, ShapeSpec(height=32, width=32))
    return path


@pytest.fixture(scope="module")
def export(network, digits_dataset, tmp_path_factory):
    """`export(**settings)`: the step into a new directory. Returns the bundle and what was said."""

    def exported(model: Path = network, **settings):
        log, output = Said(), tmp_path_factory.mktemp("export") / "bundle"
        config = resolve(ExportConfig, "export", {**SMALL, **settings})
        run(config, log, model=model, dataset=digits_dataset.path, output=output)
        return load(output, BundleManifest, verify=(".onnx",)), log.lines

    return exported


@pytest.fixture(scope="module")
def plain(export):
    """A bundle whose method is given: nothing is chosen."""
    return export(calibration_method="mse", fallback=False)[0]


def samples_of(dataset, **settings):
    config = resolve(ExportConfig, "export", settings)
    return split_samples(config, dataset, transform_for(32, resize_ratio=1.0), None)


def dequantized_reads(model: onnx.ModelProto, operator: str = "Conv") -> dict[str, list[bool]]:
    """True, by convolution, if its images and its weights come out of DequantizeLinear, by its name."""
    made_by = {output: node.op_type for node in model.graph.node for output in node.output}
    return {
        node.name: [made_by.get(tensor) == "DequantizeLinear" for tensor in node.input[:2]]
        for node in model.graph.node
        if node.op_type == operator
    }


def images_of(samples) -> np.ndarray:
    return np.concatenate([batch.images.numpy() for batch in samples])


@pytest.mark.parametrize("num_kept", [0, 70, 150])
def test_images_are_decoded_once_where_memory_allows(digits_dataset, monkeypatch, num_kept):
    side = samples_of(digits_dataset)[0].transform.crop_size
    monkeypatch.setattr(calibration, "_MAX_KEPT_BYTES", 12 * side**2 * num_kept)
    _, selection = samples_of(digits_dataset, num_calibration_images=100, num_selection_images=150)
    next(overtaken := iter(selection))
    passes = [list(selection), list(overtaken), list(selection)]
    kept = 0
    for first, again in zip(passes[0], passes[2], strict=True):
        assert torch.equal(first.images, again.images)
        assert torch.equal(first.labels, again.labels)
        kept += len(first.images) * (first.images is again.images)
    assert num_kept - 32 < kept <= num_kept
    assert sum(len(batch.images) for batch in passes[0]) == 150


def test_plans_are_compared_on_as_many_images_as_candidates(network, digits_dataset, tmp_path, monkeypatch):
    shapes, (_, samples) = ShapeSpec(height=32, width=32), samples_of(digits_dataset)
    monkeypatch.setattr(tensorrt, "TensorRTRunner", lambda *_: OpenVINORunner(network, shapes))
    plans = SimpleNamespace(samples=samples, num_images=80, shapes=shapes, output=tmp_path, log=Said())
    assert Int8Plans._accuracy(plans, [], {}) == {}
    assert sum(len(batch.images) for batch in samples._kept) == 80


def test_images_to_choose_by_are_none_of_those_that_calibrate(digits_dataset):
    calibration, selection = samples_of(digits_dataset, num_calibration_images=100, num_selection_images=150)
    first, second = images_of(calibration), images_of(selection)
    assert (len(first), len(second)) == (100, 150)
    every, _ = samples_of(digits_dataset, num_calibration_images=250, num_selection_images=0)
    np.testing.assert_array_equal(images_of(every), np.concatenate([first, second]))


@pytest.mark.parametrize(
    ("calibration", "selection", "expected"),
    [
        (512, 2000, (240, 240)),  # of few images, half are left to choose by
        (100, 2000, (100, 380)),
        (512, 0, (480, None)),
        (512, 50, (480, None)),  # too few to tell anything: all calibrate
    ],
)
def test_numbers_of_images(digits_dataset, calibration, selection, expected):
    own = samples_of(digits_dataset, num_calibration_images=calibration, num_selection_images=selection)
    assert tuple(samples.num_images if samples else None for samples in own) == expected


def test_images_are_stratified_and_the_digest_covers_them_and_the_transform(digits_dataset):
    samples, _ = samples_of(digits_dataset, num_calibration_images=50)
    listed = [json.loads(line) for line in digits_dataset.file("train.jsonl").read_text().splitlines()]
    labels = {entry["key"]: entry["label"] for entry in listed}
    assert len(set(samples.ids())) == 50
    counts = np.bincount([labels[key] for key in samples.ids()], minlength=10)
    assert (counts.min() >= 4, counts.max() <= 6) == (True, True)
    digests = [samples.digest()]
    for changes in ({"num_images": 51}, {"start": 1}, {"transform": transform_for(48, resize_ratio=1.0)}):
        digests.append(replace(samples, **changes).digest())
    assert len(set(digests)) == 4
    assert samples_of(digits_dataset, num_calibration_images=50)[0].digest() == digests[0]


def test_auto_tries_every_method_and_records_all(export):
    bundle, lines = export(max_batch=8, mixed_engines=1)
    calibration = bundle.manifest.calibration
    entry = calibration.selection
    methods = [method for method in CALIBRATION_METHODS if method != "smoothquant"]  # which needs LayerNormalizations
    assert [trial.method for trial in entry.trials[: len(methods)]] == methods
    assert (calibration.num_images, entry.num_images, entry.runtime) == (240, 240, "openvino")
    assert bundle.manifest.shapes.opt_batch == 8
    assert not any(line.startswith("warning") for line in lines), lines
    placement = bundle.manifest.placement
    assert (placement.runtime, [trial.name for trial in placement.trials[:2]]) == ("openvino", ["FP32", "INT8"])
    served = dequantized_reads(onnx.load(bundle.file(fit_model(bundle.manifest.cpu_models).file)))
    assert {name for name, reads in served.items() if reads != [True, True]} == set(placement.chosen.excluded)
    assert all(trial.agreement_pct is not None for trial in placement.trials)


@pytest.mark.parametrize(("placement_s", "leaves_time"), [(1.0, True), (100.0, False)])
def test_a_search_for_accuracy_leaves_time_for_speed_if_that_is_enough(export, monkeypatch, placement_s, leaves_time):
    found = []

    def take_all_time(search: Selection, *_: object) -> tuple[str, ...]:
        found.append((search, search.deadline))
        time.sleep(max(0.0, search.deadline - time.monotonic()) if leaves_time else 0.0)
        return ()

    monkeypatch.setattr(Selection, "exclude_layers", take_all_time)
    monkeypatch.setattr(quantization, "_PLACEMENT_S", placement_s)
    bundle, lines = export(search_seconds=8.0, mixed_engines=1)
    ((search, deadline),) = found
    assert (search.deadline > deadline, bundle.manifest.placement is not None) == (leaves_time, leaves_time), lines


def test_smoothing_is_chosen_where_channels_have_outliers(export, tmp_path):
    source = tmp_path / "own.onnx"
    export_onnx(with_outliers(small_vit(), 300.0), source, ShapeSpec(height=32, width=32))
    bundle, _ = export(source, num_calibration_images=64, num_selection_images=150, fallback=False)
    calibration = bundle.manifest.calibration
    assert calibration.method == "smoothquant"
    assert bundle.manifest.placement is None
    assert {trial.method for trial in calibration.selection.trials} == set(CALIBRATION_METHODS)
    assert bundle.file("fp32.onnx").read_bytes() == source.read_bytes()  # it stays as it is
    fp32, int8 = (onnx.load(bundle.file(name)) for name in ("fp32.onnx", "int8.onnx"))
    assert {node.name for node in fp32.graph.node} < {node.name for node in int8.graph.node}
    images = random_images(bundle.manifest.shapes, 16)
    expected = run_ort(fp32, images)["logits"]
    for name in ("int8.onnx", "int8_fp16.onnx", *(model.file for model in bundle.manifest.cpu_models)):
        actual = run_ort(onnx.load(bundle.file(name)), images)["logits"]
        assert np.linalg.norm(actual - expected) < 0.3 * np.linalg.norm(expected), name
    mse, _ = export(source, calibration_method="mse", num_calibration_images=64, fallback=False)
    actual = run_ort(onnx.load(mse.file("int8.onnx")), images)["logits"]
    assert np.linalg.norm(actual - expected) > 0.6 * np.linalg.norm(expected)
    own, lines = export(calibration_method="smoothquant", fallback=False)
    assert any("there is nothing to smooth" in line for line in lines)
    assert own.manifest.calibration.method == "smoothquant"


@pytest.mark.parametrize("faster", ["float", "int8"])
def test_attention_scores_are_in_int8_where_that_is_faster(export, tmp_path, monkeypatch, faster):
    """The answer depends on the CPU, so that the speeds are given here."""

    def speeds(search, *ways):
        known = [search._trial(way) for way in ways]
        return [trial.model_copy(update={"images_per_s": 1.0 + (trial.scores == faster)}) for trial in known]

    monkeypatch.setattr(quantization.ArithmeticSearch, "_time", speeds)
    export_onnx(small_vit(), tmp_path / "own.onnx", ShapeSpec(height=32, width=32))
    bundle, _ = export(tmp_path / "own.onnx", calibration_method="max", fallback=False)
    assert {trial.scores for trial in bundle.manifest.calibration.cpu_trials} == {"float", "int8"}
    chosen = fit_model(bundle.manifest.cpu_models)
    assert chosen.scores == faster
    products = GraphIndex(onnx.load(bundle.file("fp32.onnx")).graph).score_products()
    own, others = (dequantized_reads(onnx.load(bundle.file(file)), "MatMul") for file in (chosen.file, "int8.onnx"))
    assert sum(own[name] != others[name] for name in own) == (len(products) if faster == "int8" else 0)
    assert len(products) == 2


@pytest.mark.parametrize(("error", "chosen"), [(1.2, "int8"), (1.3, "float")])
def test_the_faster_way_is_taken_where_errors_are_near(monkeypatch, error, chosen):
    ways, errors = [Arithmetic(), Arithmetic(scores="int8")], [1.0, error]
    common = {"instruction_set": "AVX2", "simulated_error": 1.0, "saturates": False}
    trials = [
        CpuTrial(**asdict(way), **common, logits_error=value, images_per_s=10 * value)
        for way, value in zip(ways, errors, strict=True)
    ]
    search = quantization.ArithmeticSearch(fp32=None, scales={}, batches=[], candidates=None, trials=trials)
    monkeypatch.setattr(search, "_time", lambda *_: trials)
    assert search._better(*ways).scores == chosen


def test_without_fallback_or_choice_nothing_is_measured(plain):
    calibration = plain.manifest.calibration
    assert (calibration.method, calibration.selection, calibration.excluded) == ("mse", None, ())
    assert calibration.num_images == NUM_TRAINING  # nothing is kept back


def test_the_file_for_cpus_is_the_one_that_openvino_runs_as_simulated(plain):
    """Weights of 7 bits without VNNI, of 8 bits with it: by measured logits, whatever CPU this is."""
    trials = plain.manifest.calibration.cpu_trials
    assert {trial.instruction_set for trial in trials} == {instruction_set()}
    chosen = fit_model(plain.manifest.cpu_models)
    own = next(t for t in trials if Arithmetic.of(t) == Arithmetic.of(chosen))
    assert not own.saturates
    assert {trial.weight_bits for trial in trials} == ({7, 8} if instruction_set() in SATURATING else {8})
    codes = [
        numpy_helper.to_array(tensor)
        for tensor in onnx.load(plain.file("int8_cpu_7bit.onnx")).graph.initializer
        if tensor.data_type == TensorProto.INT8 and len(tensor.dims) == 4
    ]
    assert {int(np.abs(values).max()) for values in codes} == {63}


@pytest.mark.parametrize("behind", [nn.Identity(), nn.ReLU(), nn.Flatten(2)])
@pytest.mark.parametrize("activations", ["signed", "unsigned"])
def test_openvino_computes_concatenated_tensors_as_they_are_written(behind, activations, tmp_path):
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(16, 10, 1)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            both = behind(torch.cat([nn.functional.silu(self.first(images)), self.second(images)], dim=1))
            return self.last(both.reshape(-1, 16, 30, 30)).mean((2, 3))

    _expect_openvino_as_simulated(Joined, tmp_path, activations=activations)


def _expect_openvino_as_simulated(kind, tmp_path, **changes):
    torch.manual_seed(0)
    network = kind().eval()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d):
            nn.init.uniform_(layer.weight, 0.5, 3.0)
            nn.init.normal_(layer.bias)
    shapes, images = ShapeSpec(height=32, width=32), torch.randn(8, 3, 32, 32)
    export_onnx(network, tmp_path / "fp32.onnx", shapes)
    fp32 = onnx.load(tmp_path / "fp32.onnx")
    way = replace(quantization.first_arithmetic(fp32), **changes)
    onnx.save(insert_qdq(fp32, dict.fromkeys(activation_tensors(fp32), 0.03), arithmetic=way), tmp_path / "int8.onnx")
    runner = OpenVINORunner(tmp_path / "int8.onnx", shapes)
    session = new_session((tmp_path / "int8.onnx").read_bytes())
    expected = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
    np.testing.assert_allclose(runner.infer(images.numpy()), expected, atol=0.02 * np.ptp(expected))
    runner.close()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_openvino_scales_convolutions_without_a_bias_once(zeros, scaled, tmp_path):
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 10, 3, bias=zeros)
            if zeros:
                nn.init.zeros_(self.first.bias)
            self.gamma = nn.Parameter(torch.rand(10, 1, 1) + 0.5)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            stem = self.first(images) * self.gamma if scaled else self.first(images)
            return (stem + stem.sigmoid()).mean((2, 3))

    _expect_openvino_as_simulated(Residual, tmp_path)


@pytest.mark.parametrize("reshaped", [False, True])
def test_openvino_takes_the_scales_of_the_right_channels_of_tokens(reshaped, tmp_path):
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 24, bias=False)
            self.norm, self.last = nn.BatchNorm1d(24 if reshaped else 16), nn.Linear(24 if reshaped else 16, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            tokens = self.first(images).flatten(2).transpose(1, 2)
            if not reshaped:
                return self.last(self.norm(tokens.mean(1)))
            tokens = self.middle(tokens)
            return self.last(self.norm(tokens.flatten(0, 1)).reshape_as(tokens).mean(1))

    _expect_openvino_as_simulated(Tokens, tmp_path)


def test_the_cache_serves_the_same_images_and_no_others(plain, export, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    bundles = [
        export(fallback=False, **changes)[0]
        for changes in (
            {"calibration_method": "max"},
            {"calibration_method": "mse"},  # the histograms serve every method
            {"calibration_method": "max", "num_calibration_images": 100},
        )
    ]
    calibrations = [bundle.manifest.calibration for bundle in bundles]
    assert [calibration.cached for calibration in calibrations] == [False, True, False]
    assert len({calibration.digest for calibration in calibrations}) == 3
    assert calibrations[1].digest == plain.manifest.calibration.digest
    assert bundles[1].file("int8.onnx").read_bytes() == plain.file("int8.onnx").read_bytes()


def test_all_int8_files_leave_the_same_layers_in_float(plain, export, tmp_path, monkeypatch):
    """Also of a model whose nodes have no names, and whose last output other passes rename."""
    model = onnx.load(plain.file("fp32.onnx"))
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, tmp_path / "own.onnx")
    last = [node for node in model.graph.node if node.op_type == "Conv"][-1].output[0]

    def exclude_two(search, method, ranking, num_layers):
        names = [name for names in ranking for name in names]
        assert [layer.name for layer in ranking.measured] == names
        first = next(name for name in names if ranking.operators[name] == "Conv" and name != last)
        search.holds(method, (first, last))
        return (first, last)

    monkeypatch.setattr(quantization.Selection, "exclude_layers", exclude_two)
    bundle, _ = export(tmp_path / "own.onnx", calibration_method="max")
    excluded = bundle.manifest.calibration.excluded
    assert bundle.manifest.num_quantized_layers == bundle.manifest.num_quantizable_layers - 2
    for name in ("int8.onnx", "int8_fp16.onnx", "int8_cpu.onnx", "int8_cpu_7bit.onnx"):
        reads = dequantized_reads(onnx.load(bundle.file(name)))
        assert set(excluded) <= set(reads)
        for layer, quantized in reads.items():
            assert quantized == [layer not in excluded] * 2, (name, layer)


def test_too_few_images_to_choose_by(export):
    bundle, lines = export(num_selection_images=10)
    assert (bundle.manifest.calibration.method, bundle.manifest.calibration.selection) == ("max", None)
    assert any("export.num_selection_images is 10: max is taken" in line for line in lines)


def test_weights_and_fewer_calibration_images_than_classes(export, tmp_path):
    torch.manual_seed(0)
    state = build_model("squeezenet1_1", 10).state_dict()
    torch.save(state, tmp_path / "model.pt")
    own = {"architecture": "squeezenet1_1", "image_size": 32}
    bundle, lines = export(tmp_path / "model.pt", num_calibration_images=4, num_selection_images=0, **own)
    assert bundle.manifest.calibration.num_images == 4
    assert "warning: 4 calibration images for 10 classes: some classes are not seen" in lines
    state["features.0.weight"][0] = float("nan")
    torch.save(state, tmp_path / "nan.pt")
    with pytest.raises(UserError, match=r"'features.0.weight' in .*nan.pt") as error:
        export(tmp_path / "nan.pt", **own)
    assert error.value.code == "weights-not-finite"


def test_an_operator_that_pytorch_lacks_and_a_search_that_finds_nothing(export, tmp_path, monkeypatch):
    class Resizing(nn.Module):
        """Its operator has no counterpart in the PyTorch runner."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 10, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return nn.functional.interpolate(self.conv(images), scale_factor=0.5).mean((2, 3))

    export_onnx(Resizing().eval(), tmp_path / "own.onnx", ShapeSpec(height=32, width=32))
    monkeypatch.setattr(quantization.Budget, "holds", lambda *_: False)  # so that layers are ranked
    bundle, lines = export(tmp_path / "own.onnx")
    calibration = bundle.manifest.calibration
    assert {layer.name for layer in calibration.selection.ranking} == {"/conv/Conv", "/ReduceMean"}
    assert set(calibration.excluded) == {"/conv/Conv", "/ReduceMean"}
    assert {model.activations for model in bundle.manifest.cpu_models} == {"signed"}  # nothing in it is never negative
    assert any("INT8 is not within the budget on training images" in line for line in lines)


def test_the_last_line_of_a_pass_names_no_time_that_is_left(plain, digits_dataset, tmp_path):
    class Watched(Said):
        def progress(self, phase, done, total, detail="", *, unit=""):
            self.lines.append((done, total, detail))

    log, (_, selection) = Watched(), samples_of(digits_dataset)
    candidates = Candidates(shapes=plain.manifest.shapes, device=torch.device("cpu"), directory=tmp_path, log=log)
    models, number = {"fp32": onnx.load(plain.file("fp32.onnx"))}, selection.num_images
    with candidates.measure(models, selection, number, "comparing", lambda: "60 s left") as advance:
        advance(["fp32"], number)
    assert log.lines[0][2] == "60 s left"
    assert log.lines[-1] == (number, number, "")


def test_runners_are_closed_when_one_of_them_fails(plain, digits_dataset, tmp_path):
    closed = []

    class Fragile(Candidates):
        def _runner(self, file):
            if file.stem == "broken":
                raise UserError("it does not load", code="broken")
            runner = super()._runner(file)
            object.__setattr__(runner, "close", lambda: closed.append(file.stem))
            return runner

    _, selection = samples_of(digits_dataset)
    fp32 = onnx.load(plain.file("fp32.onnx"))
    candidates = Fragile(shapes=plain.manifest.shapes, device=torch.device("cpu"), directory=tmp_path, log=Said())
    models = {"fp32": fp32, "max": fp32, "broken": fp32}
    with (
        pytest.raises(UserError, match="does not load"),
        candidates.measure(models, selection, selection.num_images, "comparing", lambda: "60 s left"),
    ):
        pass
    assert sorted(closed) == ["fp32", "max"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp")]
