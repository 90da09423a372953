"""Find images that are the same but for size, compression, brightness, a mirror or a crop of up to a tenth.

Each image has a thumbnail, made when it was decoded. The magnitudes of its spectrum, which shifts, mirrors and
brightness hardly change, are its hash, and images of the most similar hashes are candidates. Of each pair, one
thumbnail is aligned with the other, and their details must agree there, pixel by pixel. See
docs/decisions/0052-near-duplicates.md.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from components.common.dataset.shards import THUMBNAIL_SIDE

Array = npt.NDArray[Any]  # float32
Thumbnails = npt.NDArray[np.uint8]  # [N, 48, 48] gray
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_SIDE = THUMBNAIL_SIDE
_NUM_WAVES = 12  # per side and direction: the frequencies 0 to 11 cycles
_MIN_DETAIL = 1.0  # gray levels; an image with less is plain, and like any other plain one
_DIMENSIONS = 40  # of a hash
_SAMPLE = 2_500  # images that the directions of the hashes are taken from
_MIN_SIMILARITY = 0.5  # cosine of two hashes; of crops, 99 of 100 have more
_FEW = 100  # images; with fewer, mean and spread of the hashes say too little for that
_NUM_PARTNERS = 2  # candidates of an image in each split
_NUM_PROBES, _NUM_TRAIN_PROBES = 8, 3  # cells that a validation image looks into, and a training image
_CELL, _MAX_CELL = 1_000, 50_000  # images of a cell: those whose hashes lie around one centre
_LEAST_PAIRS, _PAIRS_PER_IMAGE = 1_000, 0.1  # that are aligned at most, the most similar ones
_CHUNK = 512  # images or pairs worked on at a time: they stay in the processor's cache
_MIN_CORRELATION = 0.96  # of the details of aligned thumbnails: chosen on textures and on the digits
_MAX_SCALE, _MAX_SHIFT = 1.15, 0.08  # of what is aligned, in units of the side
_SLACK = 0.01  # of the side, that a crop may seem to lie outside of the whole
_BORDER = 2  # pixels, where smoothing sees less
_GLANCE, _MIN_GLANCE = 12, 0.5  # px; the correlation below which candidates are not even aligned: 3 of 4 have less
# Sides of the thumbnails that are aligned, each from where the one before ended: steps, and the least correlation.
_LEVELS = ((12, 5, 0.75), (24, 4, 0.8), (_SIDE, 3, 0))


@dataclass(frozen=True, kw_only=True)
class NearPairs:
    """Pairs of near-duplicates."""

    first: Indices
    """[P] image numbers, each below that of `second`."""
    second: Indices
    correlation: Array
    """[P] of the details of the aligned thumbnails, 0.96 to 1."""
    is_mirrored: Mask
    is_cropped: Mask
    num_plain: int
    """Images without details, about which nothing can be said."""
    num_aligned: int
    """Candidates whose pixels were compared."""


def find_near_pairs(thumbnails: Thumbnails, numbers: Indices, in_val: Mask, *, num_threads: int) -> NearPairs:
    """Find near-duplicates among images of different content.

    Args:
        thumbnails: [N, 48, 48] of all images; may lie on disk.
        numbers: [M] ascending, of the images to compare.
        in_val: [M], the split of each of these; an image looks for its likes in both.
        num_threads: that work at once.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        hashes, detail = _hashes(thumbnails, numbers, pool)
        has_detail = detail >= _MIN_DETAIL
        known = numbers[has_detail]
        first, second = (known[place] for place in _candidates(hashes[has_detail], in_val[has_detail], pool))

        def compare(chunk: slice) -> "_Fit":
            return _compare(thumbnails[first[chunk]].astype(np.float32), thumbnails[second[chunk]].astype(np.float32))

        fits = [_Fit(*np.empty((3, 0))), *pool.map(compare, _chunks(len(first)))]
    correlation, is_mirrored, scale = (np.concatenate(parts) for parts in zip(*fits, strict=True))
    same = correlation >= _MIN_CORRELATION
    return NearPairs(
        first=first[same],
        second=second[same],
        correlation=correlation[same],
        is_mirrored=is_mirrored[same] > 0,
        is_cropped=np.abs(scale[same] - 1) > _SLACK,
        num_plain=int((~has_detail).sum()),
        num_aligned=len(first),
    )


def _chunks(number: int) -> list[slice]:
    return [slice(start, min(start + _CHUNK, number)) for start in range(0, number, _CHUNK)]


# --- Hashes


def _hashes(thumbnails: Thumbnails, numbers: Indices, pool: ThreadPoolExecutor) -> tuple[Array, Array]:
    """Hashes of length 1, [M, 40], and how much detail the images have, [M] gray levels.

    The spectra of photographs are alike. So a hash is what tells a spectrum from the others of the dataset: principal
    components, each in units of its deviation (whitening).
    """
    sample = numbers[:: max(1, len(numbers) // _SAMPLE)]
    spectra = np.concatenate([_spectra(thumbnails[sample[chunk]])[0] for chunk in _chunks(len(sample))])
    mean = spectra.mean(axis=0)
    variances, directions = np.linalg.eigh(np.cov(spectra, rowvar=False, bias=True))  # in ascending order
    variances, directions = variances[-_DIMENSIONS:], directions[:, -_DIMENSIONS:]
    scaled = (directions / np.sqrt(variances + 0.01 * variances[-1] + 1e-9)).astype(np.float32)
    hashes = np.empty((len(numbers), scaled.shape[1]), np.float32)
    detail = np.empty(len(numbers), np.float32)

    def fill(chunk: slice) -> None:
        spectra, detail[chunk] = _spectra(thumbnails[numbers[chunk]])
        own = (spectra - mean) @ scaled
        hashes[chunk] = own / (np.linalg.norm(own, axis=1, keepdims=True) + 1e-6)

    for _ in pool.map(fill, _chunks(len(numbers))):
        pass
    return hashes, detail


_PHASES = 2 * np.pi / _SIDE * np.outer(np.arange(_SIDE), np.arange(_NUM_WAVES))
_WAVES = (np.hanning(_SIDE)[:, None] * np.concatenate([np.cos(_PHASES), np.sin(_PHASES)], axis=1)).astype(np.float32)
_RADIUS = np.hypot(np.arange(_NUM_WAVES)[:, None], np.arange(_NUM_WAVES))  # cycles per side
_SEEN = (_RADIUS >= 1) & (_RADIUS < _NUM_WAVES)
_SLANTED = _SEEN & (np.arange(_NUM_WAVES)[:, None] > 0) & (np.arange(_NUM_WAVES) > 0)
_FINE = _RADIUS >= 3


def _spectra(thumbnails: Thumbnails) -> tuple[Array, Array]:
    """Roots of the magnitudes of waves, [N, 218], and the deviation of those of 3 cycles and more, [N].

    An image and its mirror have the same: of slanted waves, the sum and the absolute difference of both directions.
    """
    images = thumbnails.astype(np.float32)
    images -= images.mean(axis=(1, 2), keepdims=True)
    parts = _WAVES.T @ (images @ _WAVES)  # [N, 24, 24]: cosines and sines, down by across
    cos_cos, cos_sin = parts[:, :_NUM_WAVES, :_NUM_WAVES], parts[:, :_NUM_WAVES, _NUM_WAVES:]
    sin_cos, sin_sin = parts[:, _NUM_WAVES:, :_NUM_WAVES], parts[:, _NUM_WAVES:, _NUM_WAVES:]
    falling = np.square(cos_cos - sin_sin) + np.square(cos_sin + sin_cos)  # powers
    rising = np.square(cos_cos + sin_sin) + np.square(cos_sin - sin_cos)
    power = falling + rising
    total = np.sqrt(power[:, _SEEN].sum(axis=1, keepdims=True)) + 1e-3
    detail = np.sqrt(power[:, _FINE].sum(axis=1)) / (np.hanning(_SIDE) ** 2).sum()
    falling, rising = (np.sqrt(np.sqrt(own) / total[:, :, None]) for own in (falling, rising))
    return np.concatenate([(falling + rising)[:, _SEEN], np.abs(falling - rising)[:, _SLANTED]], axis=1), detail


# --- Candidates


def _candidates(hashes: Array, in_val: Mask, pool: ThreadPoolExecutor) -> Indices:
    """Pairs of similar hashes, the smaller number first: [2, P].

    A validation image has at most 2 partners in each split, a training image 2 in its own. Where these are more than is
    aligned, the most similar are taken, of pairs within the splits and, twice as many, of those across.
    """
    rows, columns, similarity = (
        np.concatenate(parts) for parts in zip(*_neighbours(hashes, in_val, pool), strict=True)
    )
    order = np.lexsort((columns, -similarity, in_val[columns], rows))  # the best first of each image and split
    rows, columns, similarity = rows[order], columns[order], similarity[order]
    group = 2 * rows + in_val[columns]
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    rank = np.arange(len(group)) - np.repeat(starts, np.diff(starts, append=len(group)))
    is_best = rank < _NUM_PARTNERS
    pairs, places = np.unique(
        np.sort(np.stack([rows[is_best], columns[is_best]], axis=1), axis=1), axis=0, return_index=True
    )
    similarity = similarity[is_best][places]
    is_across = in_val[pairs[:, 0]] != in_val[pairs[:, 1]]
    most = max(_LEAST_PAIRS, round(_PAIRS_PER_IMAGE * len(hashes)))
    order = np.argsort(-similarity, kind="stable")
    chosen = [order[is_across[order]][: 2 * most], order[~is_across[order]][:most]]
    return pairs[np.sort(np.concatenate(chosen))].T


_Found = tuple[Indices, Indices, Array]  # images, partners, similarities


def _neighbours(hashes: Array, in_val: Mask, pool: ThreadPoolExecutor) -> list[_Found]:
    """The most similar partners of each image in each split, found cell by cell; some come twice."""
    num_cells = max(1, len(hashes) // _CELL)
    num_probes = min(_NUM_PROBES, num_cells)
    centres = hashes[:: max(1, len(hashes) // num_cells)][:num_cells]
    probes = np.empty((len(hashes), num_probes), np.int32)  # the nearest cells, the nearest first

    def probe(chunk: slice) -> None:
        near = hashes[chunk] @ centres.T
        for column in range(num_probes):
            best = near.argmax(axis=1)
            probes[chunk, column] = best
            near[np.arange(len(near)), best] = -2

    for _ in pool.map(probe, _chunks(len(hashes))):
        pass
    probes[~in_val, _NUM_TRAIN_PROBES:] = num_cells  # which is none
    by_home, home_starts = _grouped(probes[:, 0], num_cells)
    by_probe, probe_starts = _grouped(probes.ravel(), num_cells)

    def search(cell: int) -> _Found:
        members = by_home[home_starts[cell] : home_starts[cell + 1]][:_MAX_CELL]
        queries = by_probe[probe_starts[cell] : probe_starts[cell + 1]] // num_probes
        parts = [
            _most_similar(hashes, rows[chunk], own)
            for rows, own in (
                (queries, members[~in_val[members]]),
                (queries[in_val[queries]], members[in_val[members]]),
            )
            for chunk in _chunks(len(rows) if len(own) else 0)
        ]
        return _joined(parts)

    return [_joined([]), *pool.map(search, range(num_cells))]


def _grouped(cells: npt.NDArray[np.int32], num_cells: int) -> tuple[Indices, Indices]:
    """Places by cell, ascending, and where each cell starts; the last entry is their number."""
    return np.argsort(cells, kind="stable"), np.searchsorted(np.sort(cells), np.arange(num_cells + 1))


def _joined(parts: list[_Found]) -> _Found:
    none = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
    rows, columns, similarity = (np.concatenate(own) for own in zip(none, *parts, strict=True))
    return rows, columns, similarity


def _most_similar(hashes: Array, rows: Indices, columns: Indices) -> _Found:
    similar = hashes[rows] @ hashes[columns].T
    similar[rows[:, None] == columns] = -2
    found, least = [], _MIN_SIMILARITY if len(hashes) >= _FEW else -1
    for _ in range(_NUM_PARTNERS):
        best = similar.argmax(axis=1)
        value = similar[np.arange(len(rows)), best]
        kept = value >= least
        found.append((rows[kept], columns[best[kept]], value[kept]))
        similar[np.arange(len(rows)), best] = -2
    return _joined(found)


# --- Comparison of aligned pixels


class _Fit(NamedTuple):
    """Measures of how well the images of each pair fit."""

    correlation: Array  # -1 where they don't
    is_mirrored: Array  # 1 or 0
    scale: Array  # of one against the other, by the direction with the larger change


def _compare(one: Array, other: Array) -> _Fit:
    """Align [P, 48, 48] with [P, 48, 48], from coarse to fine, and correlate their details."""
    correlation, scale = np.full(len(one), -1, np.float32), np.ones(len(one), np.float32)
    is_mirrored, fit = _glance(one, other)
    left = np.flatnonzero(fit >= _MIN_GLANCE)
    one, other = np.where(is_mirrored[left, None, None], one[left, :, ::-1], one[left]), other[left]
    side, steps, least = _LEVELS[0]
    small, target = _shrunk(one, side), _shrunk(other, side)
    start = np.tile(np.array([1, 0, 1, 0], np.float32), (len(left), 1))
    # Either as the larger picture, which stays as it is: shrinking loses less.
    window, fit = _align(small, target, start, steps)
    back, back_fit = _align(target, small, start, steps)
    swap = back_fit > fit
    window, fit = np.where(swap[:, None], back, window), np.maximum(fit, back_fit)
    one, other = np.where(swap[:, None, None], other, one), np.where(swap[:, None, None], one, other)
    for side, steps, next_least in _LEVELS[1:]:
        fits = fit >= least
        one, other, window, left, least = one[fits], other[fits], window[fits], left[fits], next_least
        swap = window[:, 0] + window[:, 2] < 2
        one, other = np.where(swap[:, None, None], other, one), np.where(swap[:, None, None], one, other)
        window = np.where(swap[:, None], _inverse(window), window)
        window, fit = _align(_shrunk(one, side), _shrunk(other, side), window, steps)
    warped, seen = _warp(_details(one), window)
    seen[:, :_BORDER] = seen[:, -_BORDER:] = seen[:, :, :_BORDER] = seen[:, :, -_BORDER:] = 0
    agreement = np.einsum("nij,nij->n", _normal(warped, seen), _normal(_details(other), seen))
    correlation[left] = np.where(_overhang(window) <= _SLACK, agreement, -1)
    sides = window[:, [0, 2]]
    scale[left] = sides[np.arange(len(sides)), np.abs(sides - 1).argmax(axis=1)]
    return _Fit(correlation, is_mirrored.astype(np.float32), scale)


def _glance(one: Array, other: Array) -> tuple[Mask, Array]:
    """True for pairs that fit better mirrored; the best correlations at shifts of at most a 12th of the side."""
    inner = _shrunk(other, _GLANCE)[:, 1:-1, 1:-1].reshape(len(one), -1, 1)
    inner = inner - inner.mean(axis=1, keepdims=True)
    small, fits = _shrunk(one, _GLANCE), []
    for image in (small, small[:, :, ::-1]):
        windows = sliding_window_view(image, (_GLANCE - 2, _GLANCE - 2), axis=(1, 2)).reshape(len(one), 9, -1)
        spread = np.einsum("nwk,nwk->nw", windows, windows) - windows.sum(axis=2) ** 2 / windows.shape[2]
        fits.append(((windows @ inner)[:, :, 0] / np.sqrt(np.maximum(spread, 1e-3))).max(axis=1))
    straight, mirrored = np.stack(fits) / np.maximum(np.linalg.norm(inner[:, :, 0], axis=1), 1e-3)
    return mirrored > straight, np.maximum(straight, mirrored)


def _align(image: Array, target: Array, window: Array, steps: int) -> tuple[Array, Array]:
    """Windows that fit an image to its target, and their correlations.

    Inverse compositional Gauss-Newton steps (Baker and Matthews 2004, "Lucas-Kanade 20 years on") on scale and shift
    across and down, after both were brought to mean 0 and length 1.

    Args:
        image: [P, side, side].
        target: [P, side, side].
        window: [P, 4] to start from: scale and shift across, then down. Shifts are in units of the side.
        steps: how many.
    """
    side = target.shape[1]
    line = _line(side)
    whole = _normal(target, np.ones_like(target))
    down, across = np.gradient(whole, axis=(1, 2))
    slopes = side * np.stack([across * line, across, down * line[:, None], down], axis=1).reshape(-1, 4, side**2)
    flat = whole.reshape(-1, side**2, 1)
    slopes -= (slopes @ np.full((side * side, 1), 1 / side**2, np.float32)) + (slopes @ flat) * flat.transpose(0, 2, 1)
    normal = slopes @ slopes.transpose(0, 2, 1)
    trace = np.einsum("nii->n", normal)[:, None, None]
    inverse = np.linalg.inv(normal + (0.0025 * trace + 1e-6) * np.eye(4, dtype=np.float32))
    best, best_fit = window, np.full(len(window), -1, np.float32)
    for step in range(steps + 1):
        warped, seen = _warp(image, window)
        ours, theirs = _normal(warped, seen), _normal(target, seen)
        fit = np.einsum("nij,nij->n", ours, theirs)
        best, best_fit = np.where((fit > best_fit)[:, None], window, best), np.maximum(fit, best_fit)
        if step < steps:
            rest = (ours - fit[:, None, None] * theirs).reshape(-1, side**2, 1)
            move = np.clip((inverse @ (slopes @ rest))[:, :, 0], -0.06, 0.06)
            scale = np.clip(window[:, ::2] / (1 + move[:, ::2]), 1 / _MAX_SCALE, _MAX_SCALE)
            shift = np.clip(window[:, 1::2] - scale * move[:, 1::2], -_MAX_SHIFT, _MAX_SHIFT)
            window = np.stack([scale[:, 0], shift[:, 0], scale[:, 1], shift[:, 1]], axis=1)
    return best, best_fit


def _warp(images: Array, window: Array) -> tuple[Array, Array]:
    """The images seen through their windows, bilinear, and which pixels lie inside of them: both [P, side, side]."""
    side = images.shape[1]
    line, places = _line(side), np.arange(side, dtype=np.float32)
    weights, inside = [], []
    for scale, shift in (window[:, :2].T, window[:, 2:].T):
        at = (line * scale[:, None] + shift[:, None] + np.float32(0.5)) * side - np.float32(0.5)  # [P, side]
        weights.append(np.maximum(0, 1 - np.abs(at[:, :, None] - places)))
        inside.append((at > -0.01) & (at < side - 0.99))
    seen = inside[1][:, :, None] & inside[0][:, None, :]
    return weights[1] @ images @ weights[0].transpose(0, 2, 1), seen.astype(np.float32)


def _line(side: int) -> Array:
    """Centres of pixels, from -0.5 to 0.5 of the side."""
    return ((np.arange(side) + 0.5) / side - 0.5).astype(np.float32)


def _normal(images: Array, seen: Array) -> Array:
    """Scale images to mean 0 and length 1 over the pixels that are seen; 0 elsewhere."""
    mean = np.einsum("nij,nij->n", images, seen) / (np.einsum("nij->n", seen) + np.float32(1e-6))
    centred = (images - mean[:, None, None]) * seen
    length = np.sqrt(np.einsum("nij,nij->n", centred, centred)) + np.float32(1e-6)
    normal: Array = centred / length[:, None, None]
    return normal


def _inverse(window: Array) -> Array:
    scale, shift = 1 / window[:, ::2], -window[:, 1::2] / window[:, ::2]
    return np.stack([scale[:, 0], shift[:, 0], scale[:, 1], shift[:, 1]], axis=1)


def _overhang(window: Array) -> Array:
    """Return how far, in units of the side, neither image lies within the other; a crop lies within the whole."""

    def sticking_out(window: Array) -> Array:
        return np.maximum(np.abs(window[:, 1::2]) - (1 - window[:, ::2]) / 2, 0).max(axis=1)

    return np.minimum(sticking_out(window), sticking_out(_inverse(window)))


def _shrunk(images: Array, side: int) -> Array:
    """Means of blocks: [N, side, side]."""
    if images.shape[1] == side:
        return images
    mean = np.kron(np.eye(side), np.full(_SIDE // side, side / _SIDE)).astype(np.float32)
    shrunk: Array = mean @ images @ mean.T
    return shrunk


def _smoothing(deviation: float) -> Array:
    """[48, 48] Gaussian weights."""
    places = np.arange(_SIDE)
    weights = np.exp(-((places[:, None] - places) ** 2) / (2 * deviation**2))
    smoothing: Array = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return smoothing


_FINE_SMOOTHING, _WIDE_SMOOTHING = _smoothing(1.2), _smoothing(2.0)


def _details(images: Array) -> Array:
    """Without what is wider than some pixels: light, sky and the like agree between pictures of different things."""
    rest = images - _WIDE_SMOOTHING @ images @ _WIDE_SMOOTHING.T
    details: Array = _FINE_SMOOTHING @ rest @ _FINE_SMOOTHING.T
    return details
