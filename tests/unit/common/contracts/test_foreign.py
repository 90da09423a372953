"""Foreign files that unpack to far more than they are."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from components.common.contracts.foreign import read_arrays


def write(file: Path, shape: tuple[int, ...], num_bytes: int) -> None:
    """An array of zeros whose header says that it has a shape."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|i1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels.npy", head.getvalue() + bytes(num_bytes))


def test_arrays_within_their_bound(tmp_path: Path) -> None:
    file = tmp_path / "predictions.npz"
    most = {"labels": 1 << 20}
    write(file, (1000,), 1000)
    found = read_arrays(file, most)
    assert found["labels"].shape == (1000,)
    assert read_arrays(file, {**most, "int8": 1}) is None
    for shape, num_bytes in (((1 << 21,), 1 << 21), ((1 << 60,), 1000), ((1000,), 10)):
        write(file, shape, num_bytes)
        with pytest.raises(ValueError, match=r"labels|MemoryError|EOF|array"):
            read_arrays(file, most)
    encrypted = bytearray(file.read_bytes())
    encrypted[6] = encrypted[encrypted.rindex(b"PK\x01\x02") + 8] = 1
    misplaced = bytearray(file.read_bytes())
    misplaced[-6:-2] = bytes([255] * 4)  # where the directory begins
    for data, said in ((b"PK", "BadZipFile"), (encrypted, "RuntimeError"), (misplaced, None)):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=said):
            read_arrays(file, most)


def test_an_array_under_a_name_that_numpy_takes_too(tmp_path: Path) -> None:
    """np.load finds "labels" without a suffix, and unpacks all of what is no array."""
    file = tmp_path / "predictions.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels", bytes(1 << 20))
    assert read_arrays(file, {"labels": 1000}) is None
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels.npy", bytes(1000))
    with pytest.raises(ValueError, match="magic string"):
        read_arrays(file, {"labels": 1000})
