"""Calibration results kept between runs, addressed by everything that they depend on."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from components.common.artifacts import write_atomically
from components.common.digests import digest_bytes, digest_json
from components.export.calibration import NUM_BINS, Histogram

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
        warn: told about a damaged file, or a folder that can't be written.
    """
    if folder is None:
        return collect(), False
    file = folder / f"{digest_json(address).removeprefix('sha256:')}.npz"
    if file.exists():
        try:
            return _read(file, address), True
        except Exception as error:  # readers of archives raise anything on damaged bytes
            warn(f"the calibration cache {file} is damaged ({error}): calibrating anew")
    histograms = collect()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, _written(histograms, address))
    except OSError as error:
        warn(f"can't keep the calibration in {folder}: {error.strerror or error}")
    return histograms, False


def _written(histograms: Histograms, address: Mapping[str, Any]) -> bytes:
    ordered = list(histograms.values())
    arrays = {
        "counts": np.stack([histogram.counts for histogram in ordered]),  # [T, 2048] int64
        "exponents": np.array([histogram.exponent for histogram in ordered], np.int64),
        "max_abs": np.array([histogram.max_abs for histogram in ordered], np.float64),
    }
    head = {"address": dict(address), "names": list(histograms), "content": _content_digest(arrays)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _read(file: Path, address: Mapping[str, Any]) -> Histograms:
    with np.load(file, allow_pickle=False) as stored:
        head = json.loads(stored["head"].tobytes())
        arrays = {name: stored[name] for name in ("counts", "exponents", "max_abs")}
    if head["address"] != json.loads(json.dumps(dict(address))):
        raise ValueError("it belongs to another calibration")
    if head["content"] != _content_digest(arrays) or arrays["counts"].shape != (len(head["names"]), NUM_BINS):
        raise ValueError("its content does not match its digest")
    rows = zip(head["names"], arrays["counts"], arrays["exponents"], arrays["max_abs"], strict=True)
    return {
        name: Histogram(name, counts=counts.copy(), exponent=int(exponent), max_abs=float(max_abs))
        for name, counts, exponent, max_abs in rows
    }


def _content_digest(arrays: Mapping[str, np.ndarray]) -> str:
    return digest_bytes(b"".join(np.ascontiguousarray(arrays[name]).tobytes() for name in sorted(arrays)))
