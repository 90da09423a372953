"""The steps of the chain in this process, by settings as a person gives them."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog


def step(
    name: str,
    output: Path,
    settings: Mapping[str, Any] = {},
    log: StepLog | None = None,
    **inputs: Path,
) -> str:
    """Run it. Returns its closing line."""
    config = resolve(import_module(f"components.{name}.__main__").STEP.config, name, settings)
    return import_module(f"components.{name}.run").run(config, log or StepLog(name), output=output, **inputs)
