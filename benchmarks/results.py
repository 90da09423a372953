"""Write a measurement in the one form that documents may quote."""

import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from components.common.contracts.environment import environment
from components.common.contracts.manifests import write_atomically

RESULTS = Path(__file__).parent / "results"
# What makes a CPU a lesser one to oneDNN, MKL and ATen: part of the command.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")


@dataclass(frozen=True)
class Results:
    """Results of one machine."""

    machine: str
    directory: Path

    def file(self, name: str) -> Path:
        return self.directory / self.machine / f"{name}.json"

    def earlier(self, name: str) -> dict[str, Any]:
        """A result as an earlier call left it; without one it has no runs."""
        return json.loads(self.file(name).read_text()) if self.file(name).exists() else {"runs": []}

    def write(
        self,
        name: str,
        *,
        measures: dict[str, float],
        runs: list[Any],
        notes: str,
        versions: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Write directory/<machine>/<name>.json. `measures` holds medians, `runs` the single values.

        `versions` adds what package metadata does not know, such as a TensorRT that was not installed by pip.
        """
        here = environment()
        limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
        gpu = here.gpus[0] if here.gpus else None
        result = {
            "schema_version": 1,
            "name": name,
            "date": datetime.now(UTC).date().isoformat(),
            "commit": current_commit(),
            "command": shlex.join([*limits, Path(sys.executable).name, *sys.orig_argv[1:]]),
            "machine": {
                "gpu": gpu.name if gpu else None,
                "num_gpus": len(here.gpus),
                "driver": gpu.driver if gpu else None,
                "cpu": here.cpu,
                "num_cores": here.num_cores,
            },
            "versions": {"python": here.python, **here.versions, **versions},
            "measures": {key: round(value, 4) for key, value in measures.items()},
            "runs": runs,
            "notes": notes,
        }
        self.file(name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file(name), (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
        print(f"{self.file(name)} written")


def result_options(main: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options --machine and --results, which become its argument `results`."""

    @click.option("--machine", required=True, help="Plain name of the machine.")
    @click.option("--results", default=RESULTS, type=click.Path(path_type=Path), help="Where results go.")
    @functools.wraps(main)
    def with_results(machine: str, results: Path, **options: Any) -> None:
        main(results=Results(machine, results), **options)

    return with_results


def current_commit() -> str:
    """Commit of the code: the ENGINERY_COMMIT that the caller gives, for copies without history, else what git says."""
    if given := os.environ.get("ENGINERY_COMMIT"):
        return given
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+changes" if changed.stdout.strip() else "")
