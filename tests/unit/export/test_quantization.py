"""The export step from weights to a bundle, on real digits: samples, cache, what is left out, and bad input."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn

from components.common.contracts.errors import UserError
from components.common.contracts.instruction_sets import SATURATING, instruction_set
from components.common.contracts.manifests import BundleManifest, load
from components.common.contracts.records import LayerCost
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import ShapeSpec, transform_for
from components.common.process.steplog import StepLog
from components.common.runtimes.architectures import build_model
from components.common.runtimes.selection import fit_model
from components.export import quantization
from components.export.calibration import split_samples
from components.export.config import CACHE_VARIABLE, ExportConfig
from components.export.onnx_export import export_onnx
from components.export.run import run
from components.export.selection import Ranking

NUM_TRAINING = 480
SMALL = {"tensorrt": "off", "num_ranking_images": 2}


class Said(StepLog):
    """A log that remembers what a person would read."""

    def __init__(self) -> None:
        super().__init__("export")
        self.lines: list[str] = []

    def _say(self, kind: str, text: str) -> None:
        self.lines.append(f"{kind}: {text}")


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Path:
    """Four convolutions."""
    torch.manual_seed(0)
    layers = []
    for inputs, outputs, stride in ((3, 16, 2), (16, 16, 1), (16, 32, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(32, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    path = tmp_path_factory.mktemp("network") / "own.onnx"
    export_onnx(model.eval(), path, ShapeSpec(height=32, width=32))
    return path


@pytest.fixture
def export(network, digits_dataset, tmp_path):
    """`export(**settings)`: the step into a new directory. Returns the bundle and what was said."""
    count = iter(range(9))

    def exported(model: Path = network, **settings):
        log, output = Said(), tmp_path / f"bundle{next(count)}"
        config = resolve(ExportConfig, "export", {**SMALL, **settings})
        run(config, log, model=model, dataset=digits_dataset.path, output=output)
        return load(output, BundleManifest, verify=(".onnx",)), log.lines

    return exported


def samples_of(dataset, **settings):
    config = resolve(ExportConfig, "export", settings)
    return split_samples(config, dataset, transform_for(32, resize_ratio=1.0), None)


def dequantized_reads(model: onnx.ModelProto) -> dict[str, list[bool]]:
    """Whether the images and the weights of each convolution come out of DequantizeLinear, by its name."""
    made_by = {output: node.op_type for node in model.graph.node for output in node.output}
    return {
        node.name: [made_by.get(tensor) == "DequantizeLinear" for tensor in node.input[:2]]
        for node in model.graph.node
        if node.op_type == "Conv"
    }


class TestSamples:
    def test_images_to_choose_by_are_none_of_those_that_calibrate(self, digits_dataset):
        calibration, selection = samples_of(digits_dataset, num_calibration_images=100, num_selection_images=150)
        first = np.concatenate([batch.images.numpy() for batch in calibration])
        second = np.concatenate([batch.images.numpy() for batch in selection])
        assert (len(first), len(second)) == (100, 150)
        every, _ = samples_of(digits_dataset, num_calibration_images=250, num_selection_images=0)
        np.testing.assert_array_equal(
            np.concatenate([batch.images.numpy() for batch in every]), np.concatenate([first, second])
        )

    @pytest.mark.parametrize(
        ("calibration", "selection", "expected"),
        [
            (512, 2000, (240, 240)),  # of few images, half are left to choose by
            (100, 2000, (100, 380)),
            (512, 0, (480, None)),
            (512, 50, (480, None)),  # too few to tell anything: all calibrate
        ],
    )
    def test_sizes(self, digits_dataset, calibration, selection, expected):
        own = samples_of(digits_dataset, num_calibration_images=calibration, num_selection_images=selection)
        assert tuple(samples.num_images if samples else None for samples in own) == expected

    def test_digest_covers_images_and_transform(self, digits_dataset):
        digests = {
            samples.digest()
            for size, count in ((32, 100), (32, 101), (48, 100))
            for samples in (
                split_samples(
                    resolve(ExportConfig, "export", {"num_calibration_images": count}),
                    digits_dataset,
                    transform_for(size, resize_ratio=1.0),
                    None,
                )[0],
            )
        }
        assert len(digests) == 3
        assert samples_of(digits_dataset)[0].digest() == samples_of(digits_dataset)[0].digest()


def test_auto_tries_every_method_and_records_all(export):
    bundle, lines = export(max_batch=32)
    calibration = bundle.manifest.calibration
    entry = calibration.selection
    assert [trial.method for trial in entry.trials[:4]] == ["max", "percentile", "entropy", "mse"]
    assert (calibration.num_images, entry.num_images) == (240, 240)
    assert entry.runtime == "openvino"
    assert not any(line.startswith("warning") for line in lines), lines


def test_the_file_for_cpus_is_the_one_that_openvino_runs_as_simulated(export):
    """Weights of 7 bits without VNNI, of 8 bits with it: by measured logits, whatever CPU this is."""
    bundle, _ = export(calibration_method="max", num_selection_images=0)
    trials = bundle.manifest.calibration.cpu_trials
    assert {trial.instruction_set for trial in trials} == {instruction_set()}
    chosen = fit_model(bundle.manifest.int8_on_cpus)
    own = next(t for t in trials if (t.weight_bits, t.activations) == (chosen.weight_bits, chosen.activations))
    assert not own.saturates
    assert {trial.weight_bits for trial in trials} == ({7, 8} if instruction_set() in SATURATING else {8})
    codes = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in onnx.load(bundle.file("int8_cpu_7bit.onnx")).graph.initializer
        if tensor.data_type == TensorProto.INT8 and len(tensor.dims) == 4
    }
    assert codes
    assert {int(np.abs(values).max()) for values in codes.values()} == {63}


def test_the_cache_serves_the_same_images_and_no_others(export, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    options = {"num_selection_images": 0}
    first, _ = export(calibration_method="max", **options)
    again, _ = export(calibration_method="mse", **options)  # the histograms serve every method
    other, _ = export(calibration_method="max", num_calibration_images=100, **options)
    assert [bundle.manifest.calibration.cached for bundle in (first, again, other)] == [False, True, False]
    digests = {bundle.manifest.calibration.digest for bundle in (first, again, other)}
    assert len(digests) == 3
    fresh, _ = export(calibration_method="mse", cache=str(tmp_path / "empty"), **options)
    assert fresh.manifest.calibration.digest == again.manifest.calibration.digest
    assert fresh.file("int8.onnx").read_bytes() == again.file("int8.onnx").read_bytes()


def test_all_int8_files_leave_the_same_layers_in_float(export, monkeypatch):
    def exclude_two(search, method, rank):
        layers = rank().layers
        assert layers == tuple(sorted(layers, key=lambda layer: -layer.cost_nats))
        excluded = tuple(layer.name for layer in layers if layer.operator == "Conv")[:2]
        search._holds(method, excluded)
        return excluded

    monkeypatch.setattr(quantization.Selection, "exclude_layers", exclude_two)
    bundle, _ = export(calibration_method="max")
    excluded = bundle.manifest.calibration.excluded
    assert len(excluded) == 2
    assert bundle.manifest.num_quantized_layers == bundle.manifest.num_quantizable_layers - 2
    for name in ("int8.onnx", "int8_fp16.onnx", "int8_cpu.onnx", "int8_cpu_7bit.onnx"):
        for layer, quantized in dequantized_reads(onnx.load(bundle.file(name))).items():
            assert quantized == [layer not in excluded] * 2, (name, layer)


def test_without_fallback_or_choice_nothing_is_measured(export):
    bundle, _ = export(calibration_method="mse", fallback=False)
    calibration = bundle.manifest.calibration
    assert (calibration.method, calibration.selection, calibration.excluded) == ("mse", None, ())
    assert calibration.num_images == NUM_TRAINING  # nothing is kept back


def test_too_few_images_to_choose_by(export):
    bundle, lines = export(num_selection_images=10)
    assert bundle.manifest.calibration.method == "max"
    assert bundle.manifest.calibration.selection is None
    assert any("training images are left to measure INT8 on: max is taken" in line for line in lines)


def test_the_images_are_named_and_stratified(export, digits_dataset):
    bundle, _ = export(num_calibration_images=50, num_selection_images=0)
    calibration = bundle.manifest.calibration
    listed = [json.loads(line) for line in digits_dataset.file("train.jsonl").read_text().splitlines()]
    labels = {entry["key"]: entry["label"] for entry in listed}
    assert len(set(calibration.ids)) == 50
    assert calibration.images_digest.startswith("sha256:")
    counts = np.bincount([labels[key] for key in calibration.ids], minlength=10)
    assert counts.min() >= 4
    assert counts.max() <= 6


def test_weights_and_fewer_calibration_images_than_classes(export, tmp_path):
    torch.manual_seed(0)
    torch.save(build_model("squeezenet1_1", 10).state_dict(), tmp_path / "model.pt")
    few = {"num_calibration_images": 4, "num_selection_images": 0}
    bundle, lines = export(tmp_path / "model.pt", architecture="squeezenet1_1", image_size=32, **few)
    assert bundle.manifest.calibration.num_images == 4
    assert "warning: 4 calibration images for 10 classes: some classes are not seen" in lines


def test_a_search_that_finds_nothing_says_so(export, monkeypatch):
    layers = (LayerCost(name="/0/Conv", operator="Conv", cost_nats=1.0),)
    monkeypatch.setattr(quantization, "rank_layers", lambda *_, **__: Ranking(layers=layers, num_images=1))
    monkeypatch.setattr(quantization.Budget, "holds", lambda *_: False)
    bundle, lines = export(calibration_method="max")
    assert bundle.manifest.calibration.excluded == ("/0/Conv",)
    assert any("INT8 is not within the budget on training images" in line for line in lines)


def test_weights_that_are_not_finite(export, tmp_path):
    state = build_model("squeezenet1_1", 10).state_dict()
    state["features.0.weight"][0] = float("nan")
    torch.save(state, tmp_path / "nan.pt")
    with pytest.raises(UserError, match=r"the weights 'features.0.weight' in .*nan.pt hold NaN or infinity"):
        export(tmp_path / "nan.pt", architecture="squeezenet1_1", image_size=32)


def test_an_operator_that_pytorch_lacks_is_no_obstacle(export, tmp_path, monkeypatch):
    class Resizing(nn.Module):
        """Its operator has no counterpart in the PyTorch runner."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 10, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return nn.functional.interpolate(self.conv(images), scale_factor=0.5).mean((2, 3))

    export_onnx(Resizing().eval(), tmp_path / "own.onnx", ShapeSpec(height=32, width=32))
    monkeypatch.setattr(quantization.Budget, "holds", lambda *_: False)  # so that layers are ranked
    bundle, _ = export(tmp_path / "own.onnx")
    calibration = bundle.manifest.calibration
    assert {layer.name for layer in calibration.selection.ranking} == {"/conv/Conv", "/ReduceMean"}
    assert set(calibration.excluded) == {"/conv/Conv", "/ReduceMean"}
    assert {model.activations for model in bundle.manifest.cpu_models} == {"signed"}  # nothing in it is never negative


def test_own_model_without_names_and_with_a_small_batch(export, tmp_path, monkeypatch):
    """The last node has no name, and other passes rename its output: leaving it out of INT8 still finds it."""
    first, _ = export(num_selection_images=0)
    model = onnx.load(first.file("fp32.onnx"))
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, tmp_path / "own.onnx")
    last = [node for node in model.graph.node if node.op_type == "Conv"][-1].output[0]

    def exclude_last(search, method, rank):
        search._holds(method, (last,))
        return (last,)

    monkeypatch.setattr(quantization.Selection, "exclude_layers", exclude_last)
    bundle, _ = export(tmp_path / "own.onnx", max_batch=8, calibration_method="max")
    assert bundle.manifest.shapes.opt_batch == 8
    assert bundle.manifest.num_quantized_layers == bundle.manifest.num_quantizable_layers - 1


def test_runners_are_closed_when_one_of_them_fails(digits_dataset, export, tmp_path):
    from components.export.selection import Candidates

    bundle, _ = export(num_selection_images=0)
    closed = []

    class Fragile(Candidates):
        def _runner(self, file):
            if file.stem == "broken":
                raise UserError("it does not load")
            runner = super()._runner(file)
            object.__setattr__(runner, "close", lambda: closed.append(file.stem))
            return runner

    _, selection = samples_of(digits_dataset)
    fp32 = onnx.load(bundle.file("fp32.onnx"))
    candidates = Fragile(shapes=bundle.manifest.shapes, device=torch.device("cpu"), directory=tmp_path, log=Said())
    with pytest.raises(UserError, match="does not load"):
        candidates.predictions({"fp32": fp32, "max": fp32, "broken": fp32}, selection, "comparing")
    assert sorted(closed) == ["fp32", "max"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp")]
