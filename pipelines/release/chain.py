"""Whether bundle, report and verdict of a release belong together, and what they say of each other."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from components.common.artifacts import (
    ALL_FILES,
    MANIFEST,
    Artifact,
    BundleManifest,
    ReportManifest,
    VerdictManifest,
    load,
)
from components.common.errors import EngineryError
from components.common.integrity import SCHEMA_VERSION, claims_of
from components.common.verdict import Thresholds, run_checks
from pipelines.release.layout import BUNDLE, REPORT, VERDICT


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The three artifacts of a release, loaded with all digests checked."""

    bundle: Artifact[BundleManifest]
    report: Artifact[ReportManifest]
    verdict: Artifact[VerdictManifest]

    @property
    def digests(self) -> dict[str, str]:
        """Of each artifact, from the data set on."""
        return {
            "dataset": self.report.manifest.inputs.get("dataset", ""),
            "model": self.bundle.manifest.inputs.get("model", ""),
            BUNDLE: self.bundle.digest,
            REPORT: self.report.digest,
            VERDICT: self.verdict.digest,
        }


def load_chain(bundle: Path, report: Path, verdict: Path) -> Chain:
    """Read the three artifacts and check every file of each.

    Raises:
        EngineryError: one of them is not what its manifest says, or is too old to be sealed.
    """
    chain = Chain(
        bundle=load(bundle, BundleManifest, verify=ALL_FILES),
        report=load(report, ReportManifest, verify=ALL_FILES),
        verdict=load(verdict, VerdictManifest, verify=ALL_FILES),
    )
    for path in (bundle, report, verdict):
        version = claims_of((path / MANIFEST).read_bytes()).get("schema_version")
        if version != SCHEMA_VERSION:
            raise EngineryError(
                f"{path / MANIFEST} is of schema version {version}, which has no seal; released are versions from "
                f"{SCHEMA_VERSION} on. Run the pipeline again to write it anew"
            )
    return chain


def contradictions(chain: Chain) -> Iterator[str]:
    """Where the three don't fit each other, a line each. A verdict that is no pass is none of these."""
    bundle, report, verdict = chain.bundle, chain.report, chain.verdict
    accuracy, benchmark = report.manifest.accuracy, report.manifest.benchmark
    links = (
        ("report/manifest.json", "bundle", report.manifest.inputs.get("bundle"), bundle.digest),
        ("report/manifest.json", "bundle (accuracy)", accuracy.bundle_digest, bundle.digest),
        ("report/manifest.json", "bundle (speed)", benchmark.bundle_digest, bundle.digest),
        ("report/manifest.json", "dataset", report.manifest.inputs.get("dataset"), accuracy.dataset_digest),
        ("verdict/manifest.json", "report", verdict.manifest.inputs.get("report"), report.digest),
        ("verdict/manifest.json", "bundle", verdict.manifest.inputs.get("bundle"), bundle.digest),
    )
    for file, name, said, found in links:
        if said != found:
            yield f"{file} is about another {name}: it says {said}, here is {found}"
    if "model" not in bundle.manifest.inputs:
        yield "bundle/manifest.json does not say what it was exported from"
    measured = {row.file for row in accuracy.rows if row.runtime == "tensorrt"}
    for engine in bundle.manifest.engines:
        if engine.file not in measured:
            yield f"bundle/{engine.file} was not measured: report/manifest.json has no row of TensorRT on it"
    yield from _verdict_problems(chain)


def _verdict_problems(chain: Chain) -> Iterator[str]:
    """Whether the report leads to this verdict: the checks are run again, by the thresholds it names."""
    decision, accuracy = chain.verdict.manifest, chain.report.manifest.accuracy
    try:
        thresholds = Thresholds.recorded(decision.config)
    except ValidationError as error:
        yield f"verdict/manifest.json names thresholds that are none: {error.errors()[0]['msg']}"
        return
    if thresholds.precision != decision.precision:
        yield f"verdict/manifest.json is on {decision.precision} by thresholds for {thresholds.precision}"
    present = {row.precision for row in accuracy.rows}
    if missing := {"fp32", thresholds.precision} - present:
        yield f"report/manifest.json has no row of {', '.join(sorted(missing))}, so no verdict follows from it"
        return
    checks = run_checks(thresholds, accuracy, chain.report.manifest.benchmark)
    again = {check.name: check.verdict for check in checks}
    said = {check.name: check.verdict for check in decision.checks}
    if again != said:
        different = sorted(name for name in again.keys() | said.keys() if again.get(name) != said.get(name))
        own, due = (values.get(different[0], "no such check") for values in (said, again))
        yield f"verdict/manifest.json does not follow from the report: {different[0]} is {own}, and must be {due}"
    if decision.passed != all(value == "pass" for value in said.values()):
        yield f"verdict/manifest.json says passed {json.dumps(decision.passed)}, and its checks say otherwise"


def unlisted(chain: Chain) -> Iterator[str]:
    """Files in the artifacts' folders that their manifests don't name."""
    for part, artifact in ((BUNDLE, chain.bundle), (REPORT, chain.report), (VERDICT, chain.verdict)):
        for file in sorted(artifact.path.rglob("*")):
            name = file.relative_to(artifact.path).as_posix()
            if not file.is_dir() and name != MANIFEST and name not in artifact.manifest.files:
                yield f"{part}/{name} is not named in {part}/{MANIFEST}: it was added"
