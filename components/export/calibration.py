"""Calibration: its images, streaming histograms of activations, the scale each method reads from them, a cache."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

from components.common.contracts.digests import digest_bytes, digest_json
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import Artifact, DatasetManifest, write_atomically
from components.common.contracts.records import MIN_SELECTION_IMAGES
from components.common.contracts.transforms import TransformSpec
from components.common.data.loader import Batch, Loader
from components.common.runtimes.onnx_files import read_onnx
from components.common.runtimes.torch import TorchGraph
from components.export.config import ExportConfig

_MAX_KEPT_BYTES = 1_500_000_000  # 2,000 images of 250 px


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A run of consecutive images of the training split: a stratified sample, since preprocess ordered it so."""

    dataset: Artifact[DatasetManifest]
    transform: TransformSpec
    start: int
    num_images: int
    batch_size: int
    device_id: int | None  # GPU to decode on; None for the CPU
    _kept: list[Batch] = field(default_factory=list, init=False, repr=False, compare=False)

    def __iter__(self) -> Iterator[Batch]:
        """Batches by the evaluation transform; the last one may be smaller. The first ones are kept in memory."""
        kept = [*self._kept]
        yield from kept
        num_kept = sum(len(batch.images) for batch in kept)
        position, end = 0, self.start + self.num_images
        if num_kept == self.num_images:
            return
        loader = Loader(self.dataset, "train", self.transform, batch_size=self.batch_size, device_id=self.device_id)
        for batch in loader:
            first, last = max(self.start + num_kept - position, 0), min(end - position, len(batch.images))
            position += len(batch.images)
            if last > first:
                own = batch.part(slice(first, last))
                if 4 * 3 * self.transform.crop_size**2 * (position - self.start) <= _MAX_KEPT_BYTES:
                    kept.append(own)
                    self._kept.extend(kept[len(self._kept) :])  # passes may overlap
                yield own
            if position >= end:
                return

    def digest(self) -> str:
        """Digest of the images' contents and of what is done to them."""
        images = [entry["sha256"] for entry in self._listed()]
        return digest_json({"images": images, "transform": self.transform.model_dump(mode="json")})

    def ids(self) -> tuple[str, ...]:
        """Keys of the images in the training split's listing."""
        return tuple(entry["key"] for entry in self._listed())

    def _listed(self) -> list[dict[str, Any]]:
        with self.dataset.file("train.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in islice(lines, self.start, self.start + self.num_images)]


def split_samples(
    config: ExportConfig, dataset: Artifact[DatasetManifest], transform: TransformSpec, device_id: int | None
) -> tuple[Samples, Samples | None]:
    """The images to calibrate with, and the others to choose by; None where too few are left to tell anything.

    Both are from the training split. Validation images decide later, and would be no evidence had they chosen too.
    """
    available = dataset.manifest.splits["train"].num_images
    choosing = config.num_selection_images > 0 and (config.calibration_method == "auto" or config.fallback)
    # Of a small dataset calibration gets at most half, so that something is left to choose by.
    num_calibration = min(config.num_calibration_images, max(available // 2, 1) if choosing else available)
    num_selection = min(config.num_selection_images, available - num_calibration) if choosing else 0
    if num_selection < MIN_SELECTION_IMAGES:
        num_calibration, num_selection = min(config.num_calibration_images, available), 0

    def samples(start: int, num_images: int) -> Samples:
        return Samples(
            dataset=dataset,
            transform=transform,
            start=start,
            num_images=num_images,
            batch_size=min(32, num_images),
            device_id=device_id,
        )

    return samples(0, num_calibration), samples(num_calibration, num_selection) if num_selection else None


NUM_BINS = 2048
INT8_MAX = 127
# Scale of a tensor that was always zero. Any positive number would do; this one is also normal in float16.
ZERO_TENSOR_SCALE = 2.0**-14

_MIN_EXPONENT = -100  # keeps NUM_BINS / 2**exponent finite in float32
_CHUNK = 1 << 17  # values binned at a time: temporaries stay in the CPU's cache, 5x faster than whole tensors
_NUM_INT8_LEVELS = 128  # magnitudes of a symmetric INT8 code, and the smallest range that entropy tries, in bins
_MSE_STRIDE = 8  # bins between the ranges that `mse` tries


@dataclass
class Histogram:
    """Magnitudes of one tensor over all samples: bin i counts |x| in [i, i + 1) * `bin_width`."""

    name: str
    counts: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    exponent: int = _MIN_EXPONENT
    """The bins cover [0, 2**exponent), the smallest such range that holds `max_abs`."""
    max_abs: float = 0.0
    channel_max: np.ndarray | None = None
    """Largest magnitude by index of the last axis, [C] float32; None where nobody asked for it."""

    @property
    def bin_width(self) -> float:
        """Width of a bin, in the tensor's units."""
        return 2.0**self.exponent / NUM_BINS

    @property
    def num_values(self) -> int:
        """Values counted so far."""
        return int(self.counts.sum())

    def add(self, values: np.ndarray) -> None:
        """Counts `values` (any shape, floating point).

        Raises:
            EngineryError: a value is NaN or infinite.
        """
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        if flat.size == 0:
            return
        low, high = float(flat.min()), float(flat.max())  # a NaN anywhere makes both NaN
        self._grow(low, high)
        if self.channel_max is not None:
            by_channel = flat.reshape(-1, self.channel_max.size)
            largest = np.maximum(by_channel.max(axis=0), -by_channel.min(axis=0))
            self.channel_max = np.maximum(self.channel_max, largest)
        # Multiplying by a power of two is exact, so a value's bin is the same whatever batch it arrives in.
        bins_per_unit = np.float32(1.0 / self.bin_width)
        offset = NUM_BINS if low < 0 else 0
        for start in range(0, flat.size, _CHUNK):
            codes = (flat[start : start + _CHUNK] * bins_per_unit).astype(np.intp)  # towards zero
            if offset:
                signed = np.bincount(codes + offset, minlength=2 * NUM_BINS)
                self.counts += signed[NUM_BINS:]
                self.counts[1:] += signed[NUM_BINS - 1 : 0 : -1]
            else:
                self.counts += np.bincount(codes, minlength=NUM_BINS)

    def add_tensor(self, values: torch.Tensor) -> None:
        """Counts `values` where they lie, on a GPU or the CPU, into the same bins as `add`.

        Raises:
            EngineryError: a value is NaN or infinite.
        """
        flat = values.detach().float().flatten()
        if flat.numel() == 0:
            return
        low, high = (float(bound) for bound in torch.aminmax(flat))
        self._grow(low, high)
        if self.channel_max is not None:
            lowest, highest = torch.aminmax(flat.reshape(-1, self.channel_max.size), dim=0)
            self.channel_max = np.maximum(self.channel_max, torch.maximum(highest, -lowest).cpu().numpy())
        codes = (flat.abs() * (1.0 / self.bin_width)).to(torch.int32)  # towards zero
        self.counts += torch.bincount(codes, minlength=NUM_BINS).cpu().numpy()

    def _grow(self, low: float, high: float) -> None:
        """Widens the range to hold `low` and `high`, by adding neighbouring bins together."""
        if not (np.isfinite(low) and np.isfinite(high)):
            raise EngineryError(
                f"calibration: tensor '{self.name}' holds a NaN or infinite value (range [{low}, {high}]). "
                "Check the checkpoint and the calibration images: the FP32 model must be finite on them.",
                code="activation-not-finite",
            )
        self.max_abs = max(self.max_abs, -low, high)
        exponent = max(int(np.frexp(self.max_abs)[1]), _MIN_EXPONENT)
        doublings = exponent - self.exponent
        if doublings <= 0:
            return
        merged = np.zeros_like(self.counts)
        bins_per_bin = min(2**doublings, NUM_BINS)
        merged[: NUM_BINS // bins_per_bin] = self.counts.reshape(-1, bins_per_bin).sum(axis=1)
        self.counts, self.exponent = merged, exponent


def compute_scale(histogram: Histogram, method: str, percentile: float = 99.99) -> float:
    """The symmetric INT8 scale (real value of code 1) of a tensor.

    Args:
        histogram: the tensor's magnitudes over the calibration samples.
        method: one of `RANGES`. None wins on every network: measure, then choose.
        percentile: in (0, 100], for the method of this name only.

    Raises:
        EngineryError: no samples.
    """
    if histogram.num_values == 0:
        message = f"calibration: tensor '{histogram.name}' saw no samples. Give at least one batch of images."
        raise EngineryError(message, code="no-calibration-images")
    if histogram.max_abs == 0.0:
        return ZERO_TENSOR_SCALE
    return min(RANGES[method](histogram, percentile), histogram.max_abs) / INT8_MAX


def _percentile_amax(histogram: Histogram, percentile: float) -> float:
    """The magnitude below which `percentile` % of all values (zeros included) lie, linear inside a bin."""
    below = np.cumsum(histogram.counts)
    target = percentile / 100.0 * below[-1]
    index = int(np.searchsorted(below, target))
    inside = 1.0 - (below[index] - target) / histogram.counts[index]
    # A percentile inside bin 0 (nearly all zeros) would make the scale vanish: half a bin is the floor.
    return float(max(index + inside, 0.5) * histogram.bin_width)


def _entropy_amax(histogram: Histogram) -> float:
    """The range whose 128-level quantization loses least information.

    It minimizes the Kullback-Leibler divergence between the tensor's distribution and its INT8 image (S. Migacz, "8-bit
    Inference with TensorRT", GTC 2017).
    For a range of i bins, P is the histogram with everything above clipped into bin i - 1, and Q spreads each of
    the 128 levels evenly over its non-empty bins. KL(P, Q) needs only sums over levels, which are differences of
    cumulative sums, so that all ranges are evaluated at once: 5 ms a tensor where the loop takes a second.
    """
    counts = histogram.counts.astype(np.float64)
    counts[0] = counts[1]  # the zeros after a ReLU are exact at any scale and would drown the rest
    num_used = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
    if num_used <= _NUM_INT8_LEVELS:
        return histogram.max_abs

    def cumulative(values: np.ndarray) -> np.ndarray:
        return np.concatenate(([0.0], np.cumsum(values)))

    below, below_nonzero = cumulative(counts), cumulative(counts > 0)
    below_plogp = cumulative(_xlogy(counts, counts))
    ranges = np.arange(_NUM_INT8_LEVELS, num_used + 1)  # [R] bins
    edges = ranges[:, None] * np.arange(_NUM_INT8_LEVELS + 1) // _NUM_INT8_LEVELS  # [R, 129]
    level_sum = np.diff(below[edges], axis=1)  # [R, 128]
    level_bins = np.diff(below_nonzero[edges], axis=1)
    level_q = level_sum / np.maximum(level_bins, 1.0)

    total, inside, last = below[-1], below[ranges], counts[ranges - 1]
    clipped = total - inside
    sum_plogp = below_plogp[ranges] - _xlogy(last, last) + _xlogy(last + clipped, last + clipped)
    sum_plogq = _xlogy(level_sum, level_q).sum(axis=1) + _xlogy(clipped, level_q[:, -1])
    divergence = (sum_plogp - sum_plogq) / total - np.log(total) + np.log(np.maximum(inside, 1.0))
    divergence[(last == 0) & (clipped > 0)] = np.inf  # Q is zero where P is not
    best = len(ranges) - 1 - int(np.argmin(divergence[::-1]))  # of equals the widest, as NVIDIA's tools do
    return float(ranges[best]) * histogram.bin_width


def _mse_amax(histogram: Histogram) -> float:
    """The range with the least squared quantization error, each bin standing for its centre."""
    centres = (np.arange(NUM_BINS) + 0.5) * histogram.bin_width  # [2048]
    centres[0] = 0.0  # mostly exact zeros (ReLU, padding), which every scale represents exactly
    used = np.flatnonzero(histogram.counts)
    centres, counts = centres[used], histogram.counts[used].astype(np.float64)
    ranges = np.arange(_MSE_STRIDE, used[-1] + 1 + _MSE_STRIDE, _MSE_STRIDE) * histogram.bin_width  # [R]
    scales = (ranges / INT8_MAX)[:, None]
    error = np.minimum(np.rint(centres / scales), INT8_MAX) * scales - centres  # [R, used]
    return float(ranges[int(np.argmin((error * error) @ counts))])


def _xlogy(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Elementwise x * log(y), and 0 where x is 0."""
    return np.where(x > 0, x * np.log(np.where(y > 0, y, 1.0)), 0.0)


# The largest magnitude that stays in range, by each method of `records.CALIBRATION_METHODS`.
RANGES: dict[str, Callable[[Histogram, float], float]] = {
    "max": lambda histogram, percentile: histogram.max_abs,
    "percentile": _percentile_amax,
    "entropy": lambda histogram, percentile: _entropy_amax(histogram),
    "mse": lambda histogram, percentile: _mse_amax(histogram),
    "smoothquant": lambda histogram, percentile: _mse_amax(histogram),  # of what smoothing leaves as it is
}


# Images per run of ONNX Runtime, whatever the batch. All intermediate tensors of a run are held at once: 90 MB for
# ResNet-50 at 224 px, which the allocator reuses; with 8 images it returns them to the system, at half the speed.
_IMAGES_PER_RUN = 2


def collect_with_torch(
    model: onnx.ModelProto,
    tensors: Sequence[str],
    batches: Iterable[torch.Tensor],
    device: torch.device,
    progress: Callable[[int], None] | None = None,
    channels: Mapping[str, int] | None = None,
) -> dict[str, Histogram]:
    """Runs the FP32 graph with PyTorch over the calibration images and returns the histogram of each tensor.

    Args:
        model: FP32 graph with one image input.
        tensors: names from `placement.activation_tensors`.
        batches: [B, C, H, W] float32, normalized as for the model. Read once, one at a time.
        device: what the graph runs on.
        progress: called with the number of images seen so far, after every batch.
        channels: length of the last axis of those tensors whose `channel_max` is wanted.

    Raises:
        UnsupportedOperators: PyTorch has no counterpart for an operator of the graph.
        EngineryError: the graph has no such tensor, there are no batches, or a tensor is not finite.
    """
    _check_known(model, tensors, "the model")
    graph = TorchGraph(model, device)
    return _collected(tensors, batches, lambda images: graph.run(images, keep=tensors)[1], progress, channels)


def collect_with_onnxruntime(
    fp32_path: Path,
    tensors: Sequence[str],
    batches: Iterable[np.ndarray],
    progress: Callable[[int], None] | None = None,
    channels: Mapping[str, int] | None = None,
) -> dict[str, Histogram]:
    """Runs the FP32 model over the calibration images and returns the histogram of each tensor.

    Args:
        fp32_path: ONNX file with one image input.
        tensors: names from `placement.activation_tensors`.
        batches: [B, C, H, W] float32 arrays, normalized as for the model. Read once, one at a time.
        progress: called with the number of images seen so far, after every two.
        channels: length of the last axis of those tensors whose `channel_max` is wanted.

    Raises:
        EngineryError: the file has no such tensor, there are no batches, or a tensor is not finite.
    """
    model = read_onnx(fp32_path)
    input_name = model.graph.input[0].name
    _check_known(model, tensors, str(fp32_path))
    # Asked for nothing, ONNX Runtime gives everything.
    outputs = [name for name in tensors if name != input_name] or [model.graph.output[0].name]
    add_outputs(model, outputs)
    session = ort.InferenceSession(
        model.SerializeToString(),
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["ConvAddActivationFusion"],  # loses outputs of two convolutions that are added
    )
    del model
    # [b, C, H, W] float32 each
    runs = (
        np.ascontiguousarray(batch[start : start + _IMAGES_PER_RUN], dtype=np.float32)
        for batch in batches
        for start in range(0, len(batch), _IMAGES_PER_RUN)
    )

    def values_of(images: np.ndarray) -> dict[str, np.ndarray]:
        return {input_name: images, **dict(zip(outputs, session.run(outputs, {input_name: images}), strict=True))}

    return _collected(tensors, runs, values_of, progress, channels)


def add_outputs(model: onnx.ModelProto, tensors: Iterable[str]) -> None:
    """Let a model give these float32 tensors, too, but for its inputs."""
    known = {value.name for value in (*model.graph.output, *model.graph.input)}
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in tensors if name not in known
    )


def _collected(
    tensors: Sequence[str],
    batches: Iterable[Any],
    values_of: Callable[[Any], Mapping[str, Any]],
    progress: Callable[[int], None] | None,
    channels: Mapping[str, int] | None,
) -> dict[str, Histogram]:
    """Histograms of what a model computes from each batch; see the two functions above."""
    histograms = {name: Histogram(name) for name in tensors}
    for name, num_channels in (channels or {}).items():
        histograms[name].channel_max = np.zeros(num_channels, np.float32)
    num_images = 0
    for images in batches:
        values = values_of(images)
        for name, histogram in histograms.items():
            add = histogram.add_tensor if isinstance(values[name], torch.Tensor) else histogram.add
            add(values[name])
        num_images += len(images)
        if progress is not None:
            progress(num_images)
    if num_images == 0:
        raise EngineryError(
            "calibration: no images. Give at least one batch; 512 images are usual.", code="no-calibration-images"
        )
    return histograms


def _check_known(model: onnx.ModelProto, tensors: Sequence[str], source: str) -> None:
    known = {name for node in model.graph.node for name in node.output} | {model.graph.input[0].name}
    if missing := [name for name in tensors if name not in known]:
        message = f"calibration: {source} has no tensor named {missing[:3]}. Was it exported again since?"
        raise EngineryError(message, code="unknown-tensor")


Histograms = dict[str, Histogram]


def cached_histograms(
    folder: Path | None, address: Mapping[str, Any], collect: Callable[[], Histograms], warn: Callable[[str], None]
) -> tuple[Histograms, bool]:
    """The histograms of `address`, from the cache or collected now and kept. Returns them and whether they were kept.

    Histograms serve every calibration method, so the method is not part of the address: changing it costs nothing.
    A file is believed only if it holds the address and the digest of its content; a damaged one is replaced.

    Args:
        folder: where files are kept; None for nowhere.
        address: what the histograms depend on: model, images, transform, kind of histogram. JSON values.
        collect: makes them.
        warn: called with a damaged file, or a folder that can't be written.
    """
    if folder is None:
        return collect(), False
    file = folder / f"{digest_json(address).removeprefix('sha256:')}.npz"
    if file.exists():
        try:
            return _read(file, address), True
        except Exception as error:  # readers of archives raise anything on damaged bytes
            warn(f"the calibration cache {file} is damaged ({error}): calibrating again")
    histograms = collect()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, _written(histograms, address))
    except OSError as error:
        warn(f"can't keep the calibration in {folder}: {error.strerror or error}")
    return histograms, False


def _written(histograms: Histograms, address: Mapping[str, Any]) -> bytes:
    ordered = list(histograms.values())
    by_channel = [np.zeros(0, np.float32) if entry.channel_max is None else entry.channel_max for entry in ordered]
    arrays = {
        "counts": np.stack([histogram.counts for histogram in ordered]),  # [T, 2048] int64
        "exponents": np.array([histogram.exponent for histogram in ordered], np.int64),
        "max_abs": np.array([histogram.max_abs for histogram in ordered], np.float64),
        "num_channels": np.array([len(maxima) for maxima in by_channel], np.int64),  # 0 where nobody asked
        "channel_max": np.concatenate(by_channel),
    }
    head = {"address": dict(address), "names": list(histograms), "content": _content_digest(arrays)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _read(file: Path, address: Mapping[str, Any]) -> Histograms:
    with np.load(file, allow_pickle=False) as stored:
        head = json.loads(stored["head"].tobytes())
        arrays = {name: stored[name] for name in ("counts", "exponents", "max_abs", "num_channels", "channel_max")}
    if head["address"] != json.loads(json.dumps(dict(address))):
        raise ValueError("it belongs to another calibration")
    if head["content"] != _content_digest(arrays) or arrays["counts"].shape != (len(head["names"]), NUM_BINS):
        raise ValueError("its content does not match its digest")
    by_channel = np.split(arrays["channel_max"], np.cumsum(arrays["num_channels"])[:-1])
    rows = zip(head["names"], arrays["counts"], arrays["exponents"], arrays["max_abs"], by_channel, strict=True)
    return {
        name: Histogram(name, counts.copy(), int(exponent), float(max_abs), maxima.copy() if maxima.size else None)
        for name, counts, exponent, max_abs, maxima in rows
    }


def _content_digest(arrays: Mapping[str, np.ndarray]) -> str:
    return digest_bytes(b"".join(np.ascontiguousarray(arrays[name]).tobytes() for name in sorted(arrays)))
