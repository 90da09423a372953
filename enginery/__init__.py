"""enginery from Python: start a run, read what it wrote, and ask a model server. Modules below are internal.

import enginery

summary = enginery.run("resnet50", config="pipelines/configs/digits.yaml", data="digits")
print(summary.status, summary.rows[-1].verdict)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.common.contracts.manifests import Artifact, BundleManifest
    from components.promote.pyfunc import BundleModel, TextModel
    from components.validate.schema import Report
    from enginery.local.summary import RunSummary
    from enginery.serving.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "load_bundle", "load_model", "load_report", "load_summary", "run"]


def run(
    pipeline: str | Path,
    *,
    config: str | Path | None = None,
    settings: Sequence[str] = (),
    reuse: bool = True,
    in_containers: bool = False,
    **inputs: object,
) -> "RunSummary":
    """Run a pipeline on this machine, as `enginery run` does. Only in the main thread, which gets the signals.

    Args:
        pipeline: a pipeline file, or the name of one that is part of enginery, such as "resnet50".
        config: YAML file of inputs and settings.
        settings: "STEP.KEY=VALUE", as for --set.
        reuse: reuse finished steps of earlier runs whose inputs, settings, code and machine are the same.
        in_containers: run each step in its image.
        **inputs: the pipeline's inputs, such as data="DIR" or epochs=10; they win over `settings` and `config`.

    Returns:
        The run's summary. A run that failed, or whose model did not pass, returns one too: see `exit_code`.

    Raises:
        components.common.contracts.errors.UserError: an input or setting can't be used, or memory can't suffice.
        components.common.contracts.errors.EngineryError: MLflow can't be reached.
    """
    from enginery.local.parameters import load_pipeline, resolve_arguments
    from enginery.local.run import run_locally

    file = load_pipeline(Path(pipeline))
    arguments = resolve_arguments(
        file,
        config_file=Path(config) if config is not None else None,
        flags={name: str(value) for name, value in inputs.items()},
        assignments=settings,
    )
    return run_locally(file, arguments, reuse=reuse, in_containers=in_containers)


def load_summary(file: str | Path) -> "RunSummary":
    """Read the summary of a run: its summary.json, or what `--summary` wrote.

    Raises:
        components.common.contracts.errors.UserError: the file is not there, or is no summary.
    """
    from enginery.local.runs import read_json
    from enginery.local.summary import RunSummary

    return read_json(Path(file), RunSummary)


def load_bundle(folder: str | Path) -> "Artifact[BundleManifest]":
    """Open the bundle that export wrote: `.manifest` says what is in it, `.file(name)` is a path.

    Every file was compared with its digest.

    Raises:
        components.common.contracts.errors.UserError: there is no bundle.
        components.common.contracts.errors.EngineryError: it is damaged or was changed.
    """
    from components.common.contracts.manifests import ALL_FILES, BundleManifest, load

    return load(Path(folder), BundleManifest, verify=ALL_FILES)


def load_model(model: str | Path, *, runtime: str = "auto") -> "BundleModel | TextModel":
    """Load what a verdict says to ship, to ask it without a server: `predict` takes what MLflow's model does.

    Unlike `mlflow.pyfunc.load_model` it runs no code that the registry names, and compares a version with the audit
    log, before the trust policy is asked.

    Args:
        model: NAME@alias, NAME/3, or the folder of a release or of a bundle.
        runtime: "auto", or a name of `components.common.runtimes.RUNTIME_OPTIONS`.

    Raises:
        components.common.contracts.errors.UserError: it means nothing that can be loaded.
        components.common.contracts.errors.EngineryError: it was changed, did not pass its gate, is refused by the trust
            policy, or nothing here runs it.
    """
    from components.promote.pyfunc import open_model
    from enginery.serving.sources import find_source

    with find_source(str(model), None) as source:
        named = {"bundle_digest": source.digests["bundle"], "precision": source.precision, "runtime": runtime}
        return open_model(source.bundle.path, {**named, "measured_on": source.measured_on})


def load_report(folder: str | Path) -> "Report":
    """Read report.json of the report that validate wrote, after its digest was checked.

    Raises:
        components.common.contracts.errors.UserError: there is no report.
        components.common.contracts.errors.EngineryError: it is damaged or was changed.
    """
    from components.common.contracts.manifests import ReportManifest, load
    from components.validate.schema import Report
    from enginery.local.runs import read_json

    return read_json(load(Path(folder), ReportManifest, verify=("report.json",)).file("report.json"), Report, "report")


def __getattr__(name: str) -> Any:
    """Load the clients when they are asked for: they need the extra `serve`."""
    if name in ("AsyncClient", "Client"):
        from enginery.serving.client import client

        return getattr(client, name)
    raise AttributeError(f"module 'enginery' has no attribute {name!r}")
