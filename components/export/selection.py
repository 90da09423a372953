"""INT8 chosen by measurement: which calibration, and which layers stay out so that the model keeps its accuracy."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnx

from components.common.evaluation import Predictions
from components.common.records import Trial
from components.common.statistics import drop_upper, paired_difference
from components.export.calibration import CalibrationMethod
from components.export.qdq import Arithmetic, insert_qdq
from components.export.sensitivity import Ranking

Scales = dict[str, float]
Measure = Callable[[Mapping[str, onnx.ModelProto], str], dict[str, Predictions]]
"""Predictions of each model, by name, on the selection images; the text says what is measured."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What INT8 may cost."""

    max_top1_drop_points: float
    min_relative_top1_pct: float
    num_validation_images: int = 0  # that the gate's proof will rest on; 0 where it judges the measured drop alone

    def holds(self, fp32: Predictions, own: Predictions) -> bool:
        """Whether the gate would pass it, were as large a share of the validation images lost and gained as here."""
        found = paired_difference(fp32.right, own.right)
        drop = -found.delta_points
        allowed = min(self.max_top1_drop_points, (1 - self.min_relative_top1_pct / 100) * fp32.top1_pct)
        count, times = self.num_validation_images, self.num_validation_images / found.num_images
        if count and drop_upper(count, 0, 0) <= allowed:  # with fewer images no layer in float makes a proof
            drop = max(drop, drop_upper(count, round(times * found.num_lost), round(times * found.num_gained)))
        return round(drop - allowed, 9) <= 0  # percentages carry rounding noise; a value of exactly the limit holds


@dataclass(kw_only=True)
class Selection:
    """Measures candidates against FP32 on the same images and remembers all of them."""

    model: onnx.ModelProto  # FP32
    scales: dict[CalibrationMethod, Scales]
    measure: Measure
    budget: Budget
    deadline: float  # on the clock of time.monotonic(): nothing new is tried after it
    arithmetic: Arithmetic  # of the candidates; those measured in another one don't count
    trials: list[Trial] = field(default_factory=list)
    out_of_time: bool = False
    _fp32: Predictions | None = None

    def choose_method(self) -> CalibrationMethod:
        """Measure every method with all layers in INT8, and take the one that predicts FP32's class most often.

        Those within the budget come first. Top-1 itself tells too little: of the images whose class changes, about as
        many are gained as are lost, so that most differences are noise. Of equals `max` is taken, which clips nothing
        that it has seen.
        """
        models = {method.value: self._quantized(method, ()) for method in self.scales}
        predictions = self.measure({"fp32": self.model, **models}, "comparing calibrations")
        self._fp32 = fp32 = predictions["fp32"]
        for method in self.scales:
            self._remember(method, (), predictions[method.value])
        inside = [method for method in self.scales if self._held(method, ())]
        candidates = sorted(inside or self.scales, key=lambda method: method != CalibrationMethod.MAX)
        return max(candidates, key=lambda method: predictions[method.value].agreement_pct(fp32))  # of equals the first

    def exclude_layers(self, method: CalibrationMethod, rank: Callable[[], Ranking]) -> tuple[str, ...]:
        """The fewest layers that must stay out of INT8 for the budget to hold, in the order of what they cost.

        Layers are ranked only if the budget does not hold with all of them in INT8. First the shortest beginning of
        the ranking that brings the model within budget, by doubling and bisection; then each layer of it, the cheapest
        first, goes back into INT8 if the budget holds without it. When time runs out, the search stops where it is:
        with the shortest list seen to hold, or the next longer beginning.
        """
        if self._holds(method, ()):
            return ()
        names = [layer.name for layer in rank().layers]
        self._late()  # which may have ended the ranking
        if not names:
            return ()
        low, high = 0, 1  # `low` layers are too few
        while high < len(names) and not self._holds(method, tuple(names[:high])):
            low, high = high, min(2 * high, len(names))
            if self._late():
                break
        while high - low > 1 and not self._late():
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds(method, tuple(names[:middle])) else (middle, high)
        excluded = names[:high]
        for name in reversed(names[:high]):
            if len(excluded) == 1 or self._late():
                break
            fewer = [other for other in excluded if other != name]
            if self._holds(method, tuple(fewer)):
                excluded = fewer
        self._holds(method, tuple(excluded))  # out of time, it may not have been measured yet
        return tuple(excluded)

    @property
    def fp32_top1_pct(self) -> float:
        """top-1 of FP32 on the selection images."""
        assert self._fp32 is not None  # choose_method comes first
        return self._fp32.top1_pct

    def trial(self, method: CalibrationMethod, excluded: tuple[str, ...]) -> Trial | None:
        """What was measured of a candidate; None if it was not."""
        wanted = (method.value, excluded, self.arithmetic.weight_bits, self.arithmetic.activations)
        found = (t for t in self.trials if (t.method, t.excluded, t.weight_bits, t.activations) == wanted)
        return next(found, None)

    def _held(self, method: CalibrationMethod, excluded: tuple[str, ...]) -> bool:
        trial = self.trial(method, excluded)
        return trial is not None and trial.within_budget

    def _holds(self, method: CalibrationMethod, excluded: tuple[str, ...]) -> bool:
        if self.trial(method, excluded) is None:
            text = f"{len(excluded)} layer{'' if len(excluded) == 1 else 's'} out of INT8"
            self._remember(method, excluded, self.measure({"int8": self._quantized(method, excluded)}, text)["int8"])
        return self._held(method, excluded)

    def _quantized(self, method: CalibrationMethod, excluded: tuple[str, ...]) -> onnx.ModelProto:
        return insert_qdq(self.model, self.scales[method], exclude=excluded, arithmetic=self.arithmetic)

    def _remember(self, method: CalibrationMethod, excluded: tuple[str, ...], own: Predictions) -> None:
        assert self._fp32 is not None  # choose_method comes first
        difference = paired_difference(self._fp32.right, own.right)
        self.trials.append(
            Trial(
                method=method.value,
                excluded=excluded,
                top1_pct=own.top1_pct,
                delta_top1_points=difference.delta_points,
                low_points=difference.low_points,
                high_points=difference.high_points,
                agreement_pct=own.agreement_pct(self._fp32),
                within_budget=self.budget.holds(self._fp32, own),
                weight_bits=self.arithmetic.weight_bits,
                activations=self.arithmetic.activations,
            )
        )

    def _late(self) -> bool:
        self.out_of_time = self.out_of_time or time.monotonic() > self.deadline
        return self.out_of_time
