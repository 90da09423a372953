"""Manual changes of aliases: to a version that somebody names, and back to the champion before."""

from dataclasses import dataclass, field

from components.common.contracts.errors import EngineryError, GateFailed, UserError
from components.common.contracts.manifests import ALL_FILES, BundleManifest, load
from components.common.registry.audit_log import Entry, Proposal, Situation, champions, change_aliases
from components.common.registry.model_registry import PARTS, RegisteredVersion, Registry
from components.common.registry.promotions import CHAMPION, ChampionComparison
from components.common.registry.trust import check_chain
from components.common.registry.version_evaluation import (
    champion_to_beat,
    check_log,
    check_tags,
    compare_versions,
    evaluation_of,
)

_MAX_LENGTH = 1000  # of a refusal in the audit log


@dataclass(frozen=True, kw_only=True)
class _Review:
    """The objection against a version; empty if there is none."""

    objection: str = ""
    code: str = ""
    comparison: ChampionComparison | None = None
    digests: dict[str, str] = field(default_factory=dict)


def promote_manually(registry: Registry, name: str, number: str, alias: str, why: str, *, force: bool) -> Entry:
    """Point an alias to a version. As champion only one that passed its gate and is not worse than the present one.

    Args:
        registry: of the model.
        name: the model.
        number: the version.
        alias: that is to point to it.
        why: for the audit log.
        force: change it although it is worse or can't be compared; the log then has the objection.

    Raises:
        GateFailed: something is against it, and it was not forced.
        EngineryError: what lies in the registry is not what was measured. No force helps against that.
    """
    version = registry.version(name, number)
    number = version.number
    found = check_files(registry, version)

    def propose(situation: Situation) -> Proposal:
        check_log(version, situation.entries, found)
        if situation.aliases.get(alias) == number:
            raise UserError(
                f"{name}@{alias} is version {number} already; there is nothing to change", code="nothing-to-change"
            )
        review = _review(registry, version, situation if alias == CHAMPION else None)
        if review.objection and not force:
            raise GateFailed(
                f"{version.label} does not become {alias}: {review.objection}. "
                "--force overrules this, and the audit log says so",
                code=review.code,
            )
        return Proposal(
            kind="manual",
            aliases={alias: number},
            why=why,
            forced=bool(review.objection),
            overruled=review.objection[:_MAX_LENGTH],
            digests=review.digests,
            comparison=review.comparison,
        )

    return change_aliases(registry, name, propose)


def check_files(registry: Registry, version: RegisteredVersion) -> dict[str, str]:
    """Compare every file that lies in the registry with what was measured and registered.

    Returns:
        The digests of bundle, report and verdict, by name.

    Raises:
        GateFailed: its verdict is no pass.
        EngineryError: one is gone or was changed, enginery never registered the version, or no key of the machine's
            policy signed its verdict.
    """
    if not any(version.tags.get(f"{part}_digest") for part in PARTS):
        raise EngineryError(
            f"{version.label} has no tag of enginery's: it did not come from a run of the pipeline, or its tags were "
            "deleted, so nothing says what it is. Delete the version, and promote its bundle again",
            code="no-tags",
        )
    with registry.files(version, "bundle") as path:
        check_tags(version, {"bundle": load(path, BundleManifest, verify=ALL_FILES).digest})
    with evaluation_of(registry, version) as evaluation:
        if not evaluation.passed:
            failed = [check.explanation for check in evaluation.verdict.manifest.checks if check.verdict != "pass"]
            raise GateFailed(
                f"{version.label} did not pass its gate: {'; '.join(failed) or 'see its report'}", code="gate-failed"
            )
        digests: dict[str, str] = {part: evaluation.digests[part] for part in PARTS}
        measured = digests["bundle"]
    if measured != version.tags["bundle_digest"]:
        raise EngineryError(
            f"the report that lies with {version.label} is on another bundle ({measured})", code="other-bundle"
        )
    check_chain(version.label, digests, registry.statements(version), environment="", model=version.name)
    return digests


def _review(registry: Registry, version: RegisteredVersion, situation: Situation | None) -> _Review:
    """Compare a version with the champion of a situation; None if it is not to become champion."""
    with evaluation_of(registry, version) as evaluation:
        digests = evaluation.digests
        if situation is None:
            return _Review(digests=digests)
        number = situation.champion
        try:
            with champion_to_beat(registry, version.name, situation) as champion:
                if champion is None:
                    return _Review(digests=digests)
                number, present = champion.version.number, champion.evaluation
                if present.split_digest != evaluation.split_digest:
                    objection = (
                        f"it was measured on another validation split than the champion, version {number}, so the two "
                        "can't be compared here; a run of the pipeline on the data of one of them measures both"
                    )
                    return _Review(objection=objection, code="other-images", digests=digests)
                measured = present.measured(f"the champion, version {number},")
                comparison = compare_versions(evaluation, measured, number, 0.0)
        except EngineryError as error:
            objection = f"it can't be compared with the champion, version {number}: {error}"
            return _Review(objection=objection, code="not-comparable", digests=digests)
        objection = "" if comparison.not_worse else f"it is worse: {comparison.text}"
        return _Review(objection=objection, code="worse", comparison=comparison, digests=digests)


def roll_back(registry: Registry, name: str, why: str) -> Entry:
    """Make the champion before the present one champion again; a second time goes one further back.

    Raises:
        UserError: there is no such model, or no champion before.
        EngineryError: what lies in the registry of that version is not what was measured.
    """
    registry.versions(name)  # there is such a model

    def propose(situation: Situation) -> Proposal:
        version = _champion_before(registry, name, situation)
        tags = version.tags
        check_log(version, situation.entries, check_files(registry, version))
        left = f"from version {situation.champion}" if situation.champion else "since there was no champion any more"
        return Proposal(
            kind="rollback",
            aliases={CHAMPION: version.number},
            why=why or f"rolled back {left}",
            digests={part: tags[f"{part}_digest"] for part in ("dataset", *PARTS) if f"{part}_digest" in tags},
        )

    return change_aliases(registry, name, propose)


def _champion_before(registry: Registry, name: str, situation: Situation) -> RegisteredVersion:
    there = {version.number: version for version in registry.versions(name)}
    past = champions(situation.entries)
    if situation.champion is None:  # its version was deleted, or its alias
        past = [number for number in past if number in there]
        if not past:
            raise UserError(
                f"{name} has no champion, and none of its versions was one; make one: "
                f"enginery promote {name} VERSION --to {CHAMPION} --why TEXT",
                code="no-champion",
            )
        return there[past[-1]]
    earlier = past[:-1]
    if not earlier:
        raise UserError(
            f"{name} has no champion before version {situation.champion}: the audit log knows of none "
            f"(`enginery audit {name}`). Name a version: enginery promote {name} VERSION --to {CHAMPION} --why TEXT",
            code="no-champion-before",
        )
    if earlier[-1] not in there:
        left = [number for number in earlier if number in there]
        still = f"; earlier champions that are there: {', '.join(dict.fromkeys(left))}" if left else ""
        raise UserError(
            f"version {earlier[-1]}, the champion of {name} before version {situation.champion}, was deleted{still}. "
            f"Name a version: enginery promote {name} VERSION --to {CHAMPION} --why TEXT (--force if it is worse)",
            code="version-deleted",
        )
    return there[earlier[-1]]
