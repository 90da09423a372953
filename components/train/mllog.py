"""Lines as MLPerf's training benchmark has them, for tools that read those: `:::MLLOG {json}`, one event each.

The keys are MLCommons' own (mlperf_logging, mllog/constants.py).
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

NAME = "mllog.txt"
_PREFIX = ":::MLLOG "
EventType = Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]


class MlLog:
    """Appends events to a file, from rank 0; a run that goes on adds to what is there."""

    def __init__(self, folder: Path | None) -> None:
        """The file is in `folder`; without one nothing is written."""
        self._path = None if folder is None else folder / NAME

    def event(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Something that is so, or that happened."""
        self._write("POINT_IN_TIME", key, value, metadata)

    def start(self, key: str, **metadata: Any) -> None:
        """Something begins."""
        self._write("INTERVAL_START", key, None, metadata)

    def end(self, key: str, **metadata: Any) -> None:
        """What began is over."""
        self._write("INTERVAL_END", key, None, metadata)

    def begin(self, trained: Mapping[str, Any]) -> None:
        """What is trained, by MLCommons' keys, and that it begins."""
        for key, value in trained.items():
            self.event(key, value)
        self.start("run_start")

    def _write(self, event_type: EventType, key: str, value: Any, metadata: dict[str, Any]) -> None:
        if self._path is None:
            return
        entry = {
            "namespace": "",
            "time_ms": int(time.time() * 1e3),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{_PREFIX}{json.dumps(entry)}\n")
