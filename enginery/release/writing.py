"""Writes a release folder: all of it or none."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from components.common.contracts.environment import own_version, utc_now
from components.common.contracts.errors import EngineryError, GateFailed
from components.common.registry.audit_log import Entry
from components.common.registry.model_registry import RegisteredVersion
from components.common.registry.trust import check_chain, check_signer, sign_folder
from components.common.registry.version_evaluation import check_log
from components.promote.packaging import write_model
from enginery.new_folders import check_new, new_folder
from enginery.release.bom import bill_of_materials
from enginery.release.verify import (
    BOM,
    BUNDLE,
    CARD,
    PARTS,
    RECORD,
    REPORT,
    REPORT_CARD,
    SUMS,
    VERDICT,
    Chain,
    ReleaseRecord,
    Verification,
    contradictions,
    fingerprint,
    load_chain,
    verify,
    write_sums,
)


def write_release(
    parts: Mapping[str, Path],
    output: Path,
    *,
    name: str,
    version: RegisteredVersion | None = None,
    registry: str = "",
    entries: Sequence[Entry] = (),
    statements: Mapping[str, bytes] = MappingProxyType({}),
    key: Path | None = None,
) -> Verification:
    """Copy bundle, report and verdict, write what belongs to them, verify all of it, and only then give it its name.

    Args:
        parts: folders of the three, by name.
        output: a new folder.
        version: what the registry says; None for artifacts that were named by their paths.
        registry: where the version is; empty for none.
        entries: the audit log of the model.
        name: of the model.
        statements: signed, that lie with the version.
        key: file that `sign_folder` signs by; None for no signature.

    Raises:
        GateFailed: the verdict is not a pass.
        EngineryError: the three are not what they were or don't belong together, or nobody whom the machine's policy
            trusts vouches for them.
        UserError: `output` exists.
    """
    check_new(output, "a release")
    chain = load_chain(*(parts[part] for part in PARTS))
    if version is not None:
        check_log(version, entries, chain.parts)
    what = version.label if version is not None else f"the bundle {parts[BUNDLE]}"
    names = (version.name, version.number) if version is not None else ("", "")
    check_chain(what, chain.parts, statements, model=names[0], version=names[1])
    for problem in contradictions(chain):
        raise EngineryError(f"this can't be released: {problem}", code="contradiction")
    signer = check_signer(key) if key is not None else None
    record = _record(chain, name, version, registry, signer)
    with new_folder(output, "a release") as temporary:
        for artifact, part in ((chain.bundle, BUNDLE), (chain.report, REPORT), (chain.verdict, VERDICT)):
            artifact.copy_to(temporary / part)
        for file, statement in statements.items():
            (temporary / file).write_bytes(statement)
        _write_rest(temporary, record, chain, key)
        checked = verify(temporary, signer.public_key() if signer is not None else None)
        if checked.problems:
            raise EngineryError(f"this can't be released: {'; '.join(checked.problems)}", code="contradiction")
    return checked


def _record(chain: Chain, name: str, version: RegisteredVersion | None, registry: str, signer: Any) -> ReleaseRecord:
    decision = chain.verdict.manifest
    if not decision.passed:
        raise GateFailed(f"the verdict on {name} is not a pass, so it is not released", code="gate-failed")
    return ReleaseRecord(
        name=name,
        version=version.number if version is not None else "",
        aliases=version.aliases if version is not None else (),
        registry=registry,
        created=utc_now(),
        enginery=own_version(),
        architecture=chain.bundle.manifest.architecture,
        precision=decision.served_precision,
        passed=decision.passed,
        digests=chain.digests,
        key_fingerprint=fingerprint(signer.public_key()) if signer is not None else "",
    )


def _write_rest(folder: Path, record: ReleaseRecord, chain: Chain, key: Path | None) -> None:
    card, shown = folder / REPORT / REPORT_CARD, folder / REPORT / "report.json"
    if not card.is_file() or not shown.is_file():
        raise EngineryError(
            f"the report {chain.report.path} has no {REPORT_CARD} or no report.json: an older enginery wrote it. "
            "Validate again",
            code="report-incomplete",
        )
    shutil.copyfile(card, folder / CARD)
    measured_on = chain.report.manifest.accuracy.measured_on(record.precision)
    write_model(chain.bundle, record.precision, folder, measured_on)
    (folder / RECORD).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    provenance = json.loads(shown.read_bytes())["provenance"]
    (folder / BOM).write_bytes(bill_of_materials(record, chain.bundle, chain.report, provenance))
    (folder / SUMS).write_bytes(write_sums(folder))
    if key is not None:
        sign_folder(folder, key)
