"""Write an uncompressed tar, taking its digest and noting where every member lies, so that it is not read again."""

import hashlib
import tarfile
from pathlib import Path
from types import TracebackType

_BUFFER_BYTES = 1 << 16
_BLOCK_BYTES = tarfile.BLOCKSIZE


class TarWriter:
    """The bytes are those of `tarfile` in USTAR format; the index is that of DALI's wds2idx."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=_BUFFER_BYTES)
        self._sha = hashlib.sha256()
        self._samples: list[str] = []  # lines of the index
        self.size_bytes = 0

    def __enter__(self) -> "TarWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            if error is None:  # two empty blocks end an archive, which is then filled up to whole records
                self._write(bytes(2 * _BLOCK_BYTES))
                self._write(bytes(-self.size_bytes % tarfile.RECORDSIZE))

    def add(self, key: str, members: dict[str, bytes]) -> None:
        """Append the members of a sample, by extension."""
        places = []
        for extension, data in members.items():
            name = f"{key}.{extension}"
            header = tarfile.TarInfo(name)  # owner, mode and time stay at fixed values: the same input, the same bytes
            header.size = len(data)
            self._write(header.tobuf(tarfile.USTAR_FORMAT))
            places.append(f"{extension} {self.size_bytes} {len(data)} {name}")
            self._write(data)
            self._write(bytes(-len(data) % _BLOCK_BYTES))
        self._samples.append(" ".join(places))

    def digest(self) -> str:
        """Of the archive; complete once it is closed."""
        return f"sha256:{self._sha.hexdigest()}"

    def index(self) -> bytes:
        """What DALI needs to know of the members."""
        return "".join(f"{line}\n" for line in (f"v1.2 {len(self._samples)}", *self._samples)).encode()

    def _write(self, data: bytes) -> None:
        self._sha.update(data)
        self._file.write(data)
        self.size_bytes += len(data)
