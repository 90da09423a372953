"""Which bundle a run made, or took over from an earlier one."""

from pathlib import Path

from components.common.artifacts import MANIFEST
from components.common.digests import digest_file
from components.common.errors import UserError
from pipelines.history import find_summary, past_runs
from pipelines.summary import RunSummary


def bundle_of_run(name: str, runs: Path) -> Path:
    """The bundle of the run that `name` means, see `history.find_summary`.

    Raises:
        UserError: no such run, or it has no bundle.
    """
    summary = find_summary(name, runs)
    if (found := _bundle(summary)) is None:
        raise UserError(
            f"the run {summary.run_id} ({summary.status}) has no bundle: it ended before export was done, or the "
            "bundle was removed. Name another run with --run, see `enginery runs`, or a bundle with --bundle DIR"
        )
    return found


def latest_bundle(runs: Path) -> Path:
    """The bundle of the newest finished run that has one.

    Raises:
        UserError: there is none.
    """
    everything = past_runs(runs)
    for run in everything:
        if run.summary is not None and (found := _bundle(run.summary)) is not None:
            return found
    start = "start one: enginery run pipelines/resnet50.py --data DIR, or name a bundle with --bundle DIR"
    if not everything:
        raise UserError(f"there are no runs in {runs}; {start}")
    raise UserError(f"none of the {len(everything)} runs in {runs} has come to its end with a bundle; {start}")


def _bundle(summary: RunSummary) -> Path | None:
    """The bundle that a run measured; before it measured any, the newest that it made."""
    here = Path(summary.run_directory)
    folders = [here]
    for step in summary.steps:
        if step.name == "export" and step.status == "reused":
            origin = step.outcome.removeprefix("reused from ")  # a run's id, or where the artifact lies
            folders.append(here.parent / origin)
    manifests = [file for folder in folders for file in folder.glob(f"artifacts/*/*/bundle/{MANIFEST}")]
    manifests += [folder / MANIFEST for folder in folders[1:] if (folder / MANIFEST).is_file()]
    if summary.bundle_digest:
        manifests = [file for file in manifests if digest_file(file) == summary.bundle_digest]
    return max(manifests, key=lambda file: file.stat().st_mtime).parent if manifests else None
