"""The history of a champion: from the digest of its data to every change of an alias."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from components.common.contracts.digests import digest_bytes
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import (
    MANIFEST,
    BundleManifest,
    ReportManifest,
    VerdictManifest,
    load_manifest,
)
from components.common.contracts.records import Record
from components.common.registry.audit_log import AuditLog, champions, entry_json, expected_aliases
from components.common.registry.model_registry import PARTS, RegisteredVersion, Registry
from components.common.registry.promotions import CHAMPION
from components.common.registry.trust import approval_file, check_approval, find_policy
from components.common.registry.version_evaluation import check_log
from enginery.registry.promote import check_files


class Link(Record):
    """One thing that the next one was made from."""

    name: str
    digest: str
    note: str = ""


class Audit(Record):
    """Output of `enginery audit --json`."""

    schema_version: int = 1
    model: str
    tracking_uri: str
    aliases: dict[str, str] = Field(description="Version by alias.")
    version: str = Field(description="That the chain is of: the champion, or what was asked for; empty for none.")
    chain: tuple[Link, ...] = Field(description="From the dataset to the version and its approvals.")
    entries: tuple[dict[str, Any], ...] = Field(description="The audit log, oldest first.")
    files_checked: bool = Field(description="Whether every file of the champion was read; else its manifests alone.")
    problems: tuple[str, ...] = Field(description="What does not fit together; empty where all does.")


def trace(registry: Registry, name: str, *, files: bool = False) -> Audit:
    """The chain of the champion, the log, and what does not fit together.

    Args:
        registry: of the model.
        name: the model.
        files: whether to read every file of the champion, too, which a server sends over the network.

    Raises:
        UserError: there is no such model.
        EngineryError: the log is damaged.
    """
    registry.versions(name)  # there is such a model
    aliases = registry.aliases(name)
    entries = AuditLog(registry.client, name).read()
    expected = expected_aliases(entries, registry.run_ids(name))
    problems = _unexplained(aliases, expected, name)
    champion = aliases.get(CHAMPION, "")
    chain: tuple[Link, ...] = ()
    if champion:
        version = registry.version(name, champion)
        try:
            if "bundle_digest" not in version.tags:
                raise EngineryError(
                    "it was not registered by enginery, so nothing is known of its data", code="no-tags"
                )
            chain = _chain(registry, version, problems)
            digests: dict[str, str] = {link.name: link.digest for link in chain if link.name in PARTS}
            check_log(version, entries, digests)
            chain += tuple(_approvals(registry.statements(version), version, digests))
            if files:
                check_files(registry, version)
        except EngineryError as error:
            what = "was changed" if chain else "has no chain"
            problems.append(f"the champion, {version.label}, {what}: {error}")
    elif CHAMPION not in expected and (past := champions(entries)):
        problems.append(
            f"the champion by the log, version {past[-1]}, is not there any more. Go back: enginery rollback {name}"
        )
    return Audit(
        model=name,
        tracking_uri=registry.uri,
        aliases=dict(sorted(aliases.items())),
        version=champion,
        chain=chain,
        entries=tuple(json.loads(json.dumps(entry_json(entry))) for entry in entries),
        files_checked=files and bool(chain),
        problems=tuple(problems),
    )


def _approvals(
    statements: Mapping[str, bytes], version: RegisteredVersion, digests: Mapping[str, str]
) -> Iterator[Link]:
    """The approvals that lie with a version, where whoever writes to the registry may put what the policy refuses."""
    for file, statement in statements.items():
        environment = file.removeprefix("approval-").removesuffix(".dsse.json")
        if file == approval_file(environment) and re.fullmatch(r"[\w-]+", environment):  # as `enginery approve` asks
            try:
                check_approval(
                    version.label, statement, environment, digests, model=version.name, version=version.number
                )
                note = f"for {environment}" + ("" if find_policy() else "; without a trust policy nobody checks it")
            except EngineryError as error:
                note = str(error)
            yield Link(name="approval", digest=digest_bytes(statement), note=note)


def _unexplained(aliases: Mapping[str, str], expected: Mapping[str, str], model: str) -> list[str]:
    """Aliases that are not as the log says."""
    return [
        f"@{alias} is {_shown(aliases.get(alias))}, by the log it is {_shown(expected.get(alias))}: it was changed "
        f"without enginery, or a change of {model} runs or was killed. The next one sets what the log has named"
        for alias in sorted({*aliases, *expected})
        if aliases.get(alias) != expected.get(alias)
    ]


def _shown(number: str | None) -> str:
    return f"version {number}" if number else "not set"


def _chain(registry: Registry, version: RegisteredVersion, problems: list[str]) -> tuple[Link, ...]:
    """Follow the manifests that lie in the registry from data to version."""
    with registry.files(version, "bundle", MANIFEST) as file:
        bundle = load_manifest(file, BundleManifest)
    with registry.files(version, "report", MANIFEST) as file:
        report = load_manifest(file, ReportManifest)
    with registry.files(version, "verdict", MANIFEST) as file:
        verdict = load_manifest(file, VerdictManifest)
    expected = (
        ("bundle", bundle.digest, report.manifest.inputs["bundle"], "the report"),
        ("report", report.digest, verdict.manifest.inputs["report"], "the verdict"),
        *((part.manifest.kind, part.digest, version.tags.get(f"{part.manifest.kind}_digest", "nothing"), "its tag")
          for part in (bundle, report, verdict)),
    )  # fmt: skip
    for part, digest, named, by in expected:
        if digest != named:
            problems.append(f"the {part} of {version.label} is {digest}, and {by} says {named}")
    accuracy, inputs = report.manifest.accuracy, bundle.manifest.inputs
    calibrated = inputs.get("dataset", "")
    data = [Link(name="dataset", digest=accuracy.dataset_digest, note="validated on")]
    if calibrated and calibrated != accuracy.dataset_digest:
        data.insert(0, Link(name="dataset", digest=calibrated, note="calibrated on"))
    split = Link(name="validation split", digest=accuracy.split_digest)
    checkpoint = Link(name="checkpoint", digest=inputs.get("model", ""), note=bundle.manifest.architecture)
    engine = next(iter(bundle.manifest.engines), None)
    plans = f"plans for {engine.gpu_name}, TensorRT {engine.tensorrt_version}" if engine else "no plans"
    rows = [row for row in accuracy.rows if row.score_pct is not None]
    scores = f"{accuracy.score_name} " + ", ".join(f"{row.precision.upper()} {row.score_pct:.2f} %" for row in rows)
    judged = f"{verdict.manifest.precision.upper()} {verdict.manifest.word}"
    return (
        *data,
        split,
        checkpoint,
        Link(name="bundle", digest=bundle.digest, note=plans),
        Link(name="report", digest=report.digest, note=scores),
        Link(name="verdict", digest=verdict.digest, note=judged),
        Link(name="version", digest=version.number, note=f"registered by run {version.run_id}"),
    )
