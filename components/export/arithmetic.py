"""How INT8 is written for CPUs: weights of 8 or 7 bits, activations with or without a sign, chosen by measurement."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx
import torch

from components.common.contracts.instruction_sets import SATURATING, instruction_set
from components.common.contracts.records import CpuModel, CpuTrial
from components.common.runtimes.onnxruntime import new_session
from components.common.runtimes.runner import to_numpy
from components.export.placement import has_unsigned_activations
from components.export.qdq import Arithmetic, insert_qdq
from components.export.selection import Candidates

NUM_IMAGES = 64
# Rounding in another order moves the error of a whole network by some per cent: 0.2 % and 2 % on two networks. Sums
# that saturate make it twice as large and more.
_EXCESS = 1.25
_CLOSE = 1.1  # errors this near each other: the faster file is taken
_TURNS, _TURN_S, _BATCH = 3, 0.2, 16


def first_arithmetic(fp32: onnx.ModelProto) -> Arithmetic:
    """What calibrations are compared with on this CPU: never saturating, unsigned where the network allows it."""
    return Arithmetic(
        weight_bits=7 if instruction_set() in SATURATING else 8,
        activations="unsigned" if has_unsigned_activations(fp32) else "signed",
    )


def cpu_models(activations: Literal["signed", "unsigned"], weight_bits: int | None) -> tuple[CpuModel, ...]:
    """The files for CPUs: one with 8-bit weights, and one that is exact on every CPU.

    Args:
        activations: of both.
        weight_bits: chosen by measurement on this CPU; None where nothing was measured on it.
    """
    here = instruction_set()
    unfit = tuple(name for name in SATURATING if weight_bits is None or name != here)
    unfit += (here,) if weight_bits == 7 else ()
    return (
        CpuModel(file="int8_cpu.onnx", weight_bits=8, activations=activations, saturates_on=unfit),
        CpuModel(file="int8_cpu_7bit.onnx", weight_bits=7, activations=activations, saturates_on=()),
    )


@dataclass(kw_only=True)
class ArithmeticSearch:
    """Writes one calibration in several ways and compares OpenVINO's logits with FP32's and with a simulation.

    A simulation in floating point can't saturate: where OpenVINO is further from FP32 than the simulation is, sums
    did. That needs no labels, and shows on few images.
    """

    fp32: onnx.ModelProto
    scales: Mapping[str, float]
    batches: list[torch.Tensor]  # [B, 3, H, W] float32 each, normalized; `NUM_IMAGES` in all
    candidates: Candidates
    trials: list[CpuTrial] = field(default_factory=list)

    def choose(self) -> Arithmetic:
        """The activations that are more accurate or faster, and 8-bit weights unless they saturate here."""
        self._images = np.concatenate([to_numpy(images) for images in self.batches])
        self._expected = self.candidates.logits(self.fp32, self.batches)
        first = first_arithmetic(self.fp32)
        chosen = first
        if first.activations == "unsigned":
            signed = Arithmetic(weight_bits=first.weight_bits)
            own, other = self._trial(first), self._trial(signed)
            close = max(own.logits_error, other.logits_error) <= _CLOSE * min(own.logits_error, other.logits_error)
            if close:
                own, other = self._time(first, signed)
                chosen = first if (own.images_per_s or 0) >= (other.images_per_s or 0) else signed
            elif other.logits_error < own.logits_error:
                chosen = signed
        eight, seven = (Arithmetic(weight_bits=bits, activations=chosen.activations) for bits in (8, 7))
        eight_bits = self._trial(eight)
        if first.weight_bits == 8 and not eight_bits.saturates:
            return eight
        seven_bits = self._trial(seven)
        better = not eight_bits.saturates and eight_bits.logits_error <= seven_bits.logits_error
        return eight if better else seven

    def _trial(self, arithmetic: Arithmetic) -> CpuTrial:
        wanted = arithmetic.weight_bits, arithmetic.activations
        if known := [trial for trial in self.trials if (trial.weight_bits, trial.activations) == wanted]:
            return known[0]
        model = insert_qdq(self.fp32, self.scales, arithmetic=arithmetic)
        error = self._error(self.candidates.logits(model, self.batches))
        session = new_session(model.SerializeToString(), optimize=False)
        shapes = self.candidates.shapes
        (simulated,) = session.run([shapes.output_name], {shapes.input_name: self._images})
        simulated_error = self._error(simulated)
        self.trials.append(
            CpuTrial(
                weight_bits=arithmetic.weight_bits,
                activations=arithmetic.activations,
                instruction_set=instruction_set(),
                logits_error=error,
                simulated_error=simulated_error,
                saturates=error > _EXCESS * simulated_error,
            )
        )
        return self.trials[-1]

    def _error(self, logits: np.ndarray) -> float:
        """RMS of the difference to FP32, over the RMS of FP32. logits: [N, classes]."""
        return float(np.linalg.norm(logits - self._expected) / (np.linalg.norm(self._expected) or 1.0))

    def _time(self, *ways: Arithmetic) -> list[CpuTrial]:
        """The speed of each, measured by turns, added to what is known of it."""
        models = {way: insert_qdq(self.fp32, self.scales, arithmetic=way) for way in ways}
        names = {way: f"{way.weight_bits}-{way.activations}" for way in ways}
        speeds: dict[Arithmetic, list[float]] = {way: [] for way in ways}
        with self.candidates.runners({names[way]: model for way, model in models.items()}) as runners:
            for _ in range(_TURNS):
                for way in ways:
                    timing = runners[names[way]].measure(
                        min(_BATCH, self.candidates.shapes.max_batch),
                        warmup_s=_TURN_S / 4,
                        duration_s=_TURN_S,
                        min_iterations=2,
                    )
                    speeds[way].append(timing.images_per_s)
        timed = []
        for index, trial in enumerate(self.trials):
            way = Arithmetic(weight_bits=trial.weight_bits, activations=trial.activations)
            if way in speeds:
                self.trials[index] = trial.model_copy(update={"images_per_s": statistics.median(speeds[way])})
                timed.append(self.trials[index])
        return timed
