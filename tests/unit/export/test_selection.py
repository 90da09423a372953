"""INT8 chosen by measurement, on a small network trained on real digits."""

import copy
import itertools

import numpy as np
import onnx
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from components.common.contracts.records import LayerCost
from components.common.contracts.transforms import ShapeSpec
from components.common.data.evaluation import Predictions, top_classes
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.torch import TorchRunner
from components.export.calibration import collect_with_onnxruntime, compute_scale
from components.export.config import CALIBRATION_METHODS as EVERY_METHOD
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors, quantizable_layers
from components.export.qdq import Arithmetic
from components.export.selection import Budget, Ranking, Selection, rank_layers

SHAPES = ShapeSpec(height=8, width=8)
CALIBRATION_METHODS = [method for method in EVERY_METHOD if method != "smoothquant"]  # convolutions are not smoothed
DEFAULT = Budget(max_top1_drop_points=0.5, min_relative_top1_pct=99.0)
WIDTHS = (3, 16, 16, 16, 32, 32, 32)
HARD_CONV = 3  # reads the tensor with the outliers
NUM_IMAGES = 756  # the first 256 calibrate, the others choose


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 3, 8, 8] float32 and labels, in random order."""
    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    images = (bunch.images / 8.0 - 1.0)[order]
    return np.repeat(images[:, None], 3, axis=1).astype(np.float32), bunch.target[order].astype(np.int32)


@pytest.fixture(scope="module")
def trained(digits) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise(WIDTHS)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2 if index in (1, 3) else 1, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], 10))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    images, labels = (torch.from_numpy(array[:1200]) for array in digits)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(12):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch].long()).backward()
            optimizer.step()
    return model.eval()


def with_outliers(model: nn.Module, factor: float, conv: int = HARD_CONV) -> nn.Module:
    """The same function, with one channel of one inner tensor `factor` times as large: ReLU passes factors on."""
    hard = copy.deepcopy(model)
    convs = [module for module in hard if isinstance(module, nn.Conv2d)]
    with torch.no_grad():
        convs[conv - 1].weight[0] *= factor
        convs[conv - 1].bias[0] *= factor
        convs[conv].weight[:, 0] /= factor
    return hard


class Search:
    """A selection over a model on the digits, and the ranking of its layers, by the runtime of the candidates."""

    def __init__(
        self, model, digits, folder, methods=("max",), runner=OpenVINORunner, deadline=float("inf"), **options
    ):
        self.runner, self.file, self.digits, self.deadline = runner, folder / "candidate.onnx", digits, deadline
        export_onnx(model, folder / "fp32.onnx", SHAPES)
        proto = onnx.load(folder / "fp32.onnx")
        seen = collect_with_onnxruntime(folder / "fp32.onnx", activation_tensors(proto), [digits[0][:256]])
        self.selection = Selection(
            model=proto,
            scales={method: {name: compute_scale(seen[name], method) for name in seen} for method in methods},
            measure=self.measure,
            deadline=deadline,
            arithmetic=Arithmetic(weight_bits=7, activations="unsigned"),  # the same on every CPU
            **{"budget": DEFAULT, **options},
        )
        self.method = self.selection.choose_method()

    def logits(self, model, images):
        onnx.save(model, self.file)
        run = self.runner(self.file, SHAPES)
        try:
            return run.infer(images)
        finally:
            run.close()

    def measure(self, models, text):
        images, labels = (array[256:NUM_IMAGES] for array in self.digits)
        return {
            name: Predictions(top=top_classes(self.logits(model, images)), labels=labels)
            for name, model in models.items()
        }

    def rank(self):
        self.ranking = rank_layers(
            self.selection.model,
            self.selection.scales["max"],
            self.selection.arithmetic,
            lambda model: self.logits(model, self.digits[0][:64]),
            deadline=self.deadline,
            progress=lambda *_: None,
        )
        return self.ranking

    def exclude(self):
        self.excluded = self.selection.exclude_layers(self.method, self.rank)
        return self.excluded


def test_an_easy_model_keeps_everything_in_int8(trained, digits, tmp_path):
    found = Search(trained, digits, tmp_path, list(CALIBRATION_METHODS))
    search = found.selection
    assert search.fp32_top1_pct > 90  # it did learn to read
    assert [trial.method for trial in search.trials] == list(CALIBRATION_METHODS)
    chosen = search.trial(found.method, ())
    assert chosen is not None
    assert chosen.within_budget
    assert chosen.agreement_pct == max(trial.agreement_pct for trial in search.trials if trial.within_budget)
    assert search.exclude_layers(found.method, lambda: pytest.fail("nothing needs to be ranked")) == ()
    assert len(search.trials) == 4  # nothing else was tried


@pytest.mark.parametrize("runner", [OpenVINORunner, TorchRunner])
def test_fallback_repairs_a_layer_with_outliers_the_same_way_each_time(trained, digits, tmp_path, runner):
    hard = with_outliers(trained, 1000.0)
    first, again = (Search(hard, digits, tmp_path, runner=runner) for _ in range(2))
    search = first.selection
    (ruined,) = search.trials
    assert ruined.delta_top1_points < -10
    assert not ruined.within_budget
    layers = quantizable_layers(search.model)
    assert first.exclude() == (layers[HARD_CONV],)
    assert first.ranking.layers[0].name == layers[HARD_CONV]
    assert {layer.name for layer in first.ranking.layers} >= set(layers)
    assert search.trial("max", first.excluded).within_budget
    assert (again.exclude(), again.ranking, again.selection.trials) == (first.excluded, first.ranking, search.trials)


@pytest.mark.parametrize(
    ("num_changed", "num_lost", "expected"),
    [
        ((40, 8, 20, 10), (0, 0, 0, 0), "percentile"),  # top-1 is the same for all
        ((40, 8, 20, 10), (0, 6, 0, 0), "mse"),  # 0.6 points: over budget
        ((8, 8, 8, 8), (0, 0, 0, 0), "max"),
        ((9, 8, 8, 9), (0, 0, 0, 0), "percentile"),  # of equals the first
        ((0, 40, 40, 60), (6, 0, 0, 0), "percentile"),  # within budget comes first
        ((0, 0, 0, 40), (300, 20, 400, 10), "percentile"),  # none is: the one closest to FP32 needs the fewest layers
    ],
)
def test_the_candidate_within_budget_that_agrees_most_with_fp32_is_taken(num_changed, num_lost, expected):
    fp32 = np.repeat([1, 0], [100, 900])  # of 1,000 images, all of class 0

    def measure(models, text):
        found = {"fp32": fp32}
        for method, changed, lost in zip(CALIBRATION_METHODS, num_changed, num_lost, strict=True):
            found[method] = fp32.copy()
            found[method][:changed] = 2  # wrong, as before, but another class
            found[method][500 : 500 + lost] = 2
        labels = np.zeros(1000, np.int32)
        return {name: Predictions(top=top[:, None].astype(np.int32), labels=labels) for name, top in found.items()}

    search = FakeSelection(scales={name: {} for name in CALIBRATION_METHODS}, measure=measure)
    assert search.choose_method() == expected


def test_a_budget_that_nothing_holds_leaves_no_layer_in_int8(trained, digits, tmp_path):
    # FP32 itself is as good as FP32, so even a budget of zero is held in the end.
    hard = with_outliers(with_outliers(trained, 1e4), 1e4, conv=1)
    found = Search(hard, digits, tmp_path, budget=Budget(max_top1_drop_points=0.0, min_relative_top1_pct=100.0))
    assert found.selection.trial("max", found.exclude()).within_budget


def test_out_of_time_stops_with_what_it_has(trained, digits, tmp_path):
    hard = with_outliers(with_outliers(trained, 1000.0), 1000.0, conv=5)
    found = Search(hard, digits, tmp_path, deadline=0.0)
    excluded = found.exclude()
    assert len(found.ranking.layers) == 1  # one layer is always measured
    assert found.selection.out_of_time
    assert [len(trial.excluded) for trial in found.selection.trials] == [0, 1]
    assert found.selection.trial("max", excluded) == found.selection.trials[-1]  # what is taken was measured


class FakeSelection(Selection):
    """The search without models; over layers, costs simply add up."""

    def __init__(self, *, scales=None, measure=None, costs=None):
        super().__init__(
            model=None,
            scales=scales or {},
            measure=measure,
            budget=DEFAULT,
            deadline=float("inf"),
            arithmetic=Arithmetic(),
        )
        self.costs, self.tried = costs, []

    def _quantized(self, method, excluded):
        return None

    def _holds(self, method, excluded):
        if excluded:
            self.tried.append(excluded)
        return sum(cost for name, cost in self.costs.items() if name not in excluded) <= 10


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({"a": 20.0, "b": 1.0}, ("a",)),
        ({"a": 20.0, "b": 8.0, "c": 6.0}, ("a", "b")),
        # The ranking is wrong about "b": it goes back into INT8.
        ({"a": 20.0, "b": 0.0, "c": 15.0, "d": 1.0}, ("a", "c")),
        ({f"l{i}": 11.0 for i in range(9)}, tuple(f"l{i}" for i in range(9))),
    ],
)
def test_the_fewest_layers_are_left_out(costs, expected):
    search = FakeSelection(costs=costs)
    layers = tuple(LayerCost(name=name, operator="Conv", cost_nats=0.0) for name in costs)
    assert search.exclude_layers("max", lambda: Ranking(layers=layers, num_images=1)) == expected
    assert len(search.tried) <= 4 * len(costs)


def predictions(num_right: int, num_images: int) -> Predictions:
    top = (np.arange(num_images) >= num_right)[:, None].astype(np.int32)
    return Predictions(top=top, labels=np.zeros(num_images, np.int32))


@pytest.mark.parametrize(
    ("fp32", "own", "points", "share", "holds"),
    [
        (1000, 995, 0.5, 99.0, True),
        (1000, 994, 0.5, 99.0, False),
        (500, 496, 0.5, 99.5, False),
        (500, 496, 0.5, 99.2, True),
    ],
)
def test_budget(fp32, own, points, share, holds):
    budget = Budget(max_top1_drop_points=points, min_relative_top1_pct=share)
    assert budget.holds(predictions(fp32, 1000), predictions(own, 1000)) is holds


@pytest.mark.parametrize(
    ("num_regressed", "num_validation_images", "holds"),
    # 1.0 points are allowed. Of 400 images here, 3 are 0.75 points and 5 of 719 there, of which 2 can be proved to be
    # within. 250 prove nothing in any case.
    [(0, 719, True), (1, 719, True), (3, 719, False), (3, 0, True), (3, 5000, True), (5, 5000, False), (3, 250, True)],
)
def test_the_budget_is_what_the_gate_would_pass(num_regressed, num_validation_images, holds):
    budget = Budget(max_top1_drop_points=1.0, min_relative_top1_pct=0.0, num_validation_images=num_validation_images)
    assert budget.holds(predictions(400, 400), predictions(400 - num_regressed, 400)) is holds
