"""Whether a new version becomes the champion: never where it is worse than the present one on the same images."""

from collections.abc import Sequence
from dataclasses import dataclass

from components.common.artifacts import Artifact, DatasetManifest
from components.common.audit_log import Entry
from components.common.changing import Proposal, Situation
from components.common.errors import EngineryError
from components.common.promotions import CHAMPION, ChampionComparison
from components.common.registry import PARTS, Registry
from components.common.standing import Standing, check_log, compare_measured, compare_standings, standing_of
from components.common.steplog import StepLog
from components.promote.config import PromoteConfig
from components.promote.remeasuring import Remeasured, remeasure

_MAX_LENGTH = 1500  # of a reason; what MLflow takes of a record must hold it


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Whether a version may become the champion, and why."""

    champion: bool
    why: str
    comparison: ChampionComparison | None = None


class Decision:
    """Made anew for each situation, since other promotions may come first; what was measured is kept."""

    def __init__(
        self,
        config: PromoteConfig,
        registry: Registry,
        version: str,
        standing: Standing,
        data: Artifact[DatasetManifest],
        log: StepLog,
    ) -> None:
        self.config, self.registry, self.version = config, registry, version
        self.standing, self.data, self.log = standing, data, log
        self.judgement = Judgement(champion=False, why="nothing was decided yet")
        self._measured: dict[str, Remeasured] = {}  # by the champion's version

    def propose(self, situation: Situation) -> Proposal:
        """Aliases for the new version, as it compares with the champion of this situation."""
        self.judgement = self._judge(situation)
        aliases = {self.config.alias: self.version}
        if self.judgement.champion:
            aliases[CHAMPION] = self.version
        asked = f"{self.config.why}: " if self.config.why else ""
        return Proposal(
            kind="promote",
            aliases=aliases,
            why=(asked + self.judgement.why)[:_MAX_LENGTH],
            digests=self.standing.digests,
            comparison=self.judgement.comparison,
        )

    def _judge(self, situation: Situation) -> Judgement:
        champion = situation.champion
        if back := _rolled_back(self.standing.digests["bundle"], situation.entries):
            return Judgement(champion=False, why=f"{back}; {self._by_hand()}")
        if champion is None:
            return Judgement(champion=True, why="passed its gate, and there was no champion")
        try:
            comparison = self._compare(champion, situation.entries)
        except EngineryError as error:
            why = f"it can't be compared with the champion, version {champion}: {error}"
            return Judgement(champion=False, why=f"{why}. {self._how_to_go_on()}")
        if comparison.not_worse:
            return Judgement(champion=True, why=f"not worse: {comparison.text}", comparison=comparison)
        allowed = f", allowed {comparison.tolerance_points:g} points less" if comparison.tolerance_points else ""
        why = f"worse than the champion: {comparison.text}{allowed}"
        return Judgement(champion=False, why=why, comparison=comparison)

    def _compare(self, champion: str, entries: Sequence[Entry]) -> ChampionComparison:
        version = self.registry.version(self.config.registered_model, champion)
        tolerance = self.config.tolerance_points
        with standing_of(self.registry, version) as present:
            check_log(version, entries, {part: present.digests[part] for part in PARTS})
            if present.split_digest == self.standing.split_digest:
                return compare_standings(self.standing, present, champion, tolerance)
            if self.standing.top1_pct is None:
                raise EngineryError(f"this report does not measure {self.standing.precision.upper()}")
            if champion not in self._measured:
                self.log.note(f"the champion, version {champion}, was measured on other images; now on these")
                self._measured[champion] = remeasure(
                    self.registry,
                    version,
                    present.precision,
                    self.data,
                    lambda done, total: self.log.progress("measuring the champion", done, total, unit="images"),
                )
            again = self._measured[champion]
            return compare_measured(
                self.standing,
                top1_pct=self.standing.top1_pct,
                champion_version=champion,
                champion_precision=again.precision,
                champion_top1_pct=again.top1_pct,
                champion_right=again.right,
                tolerance_points=tolerance,
                measured_again=again.runtime,
            )

    def _by_hand(self) -> str:
        name = self.config.registered_model
        return (
            f"make it champion all the same: enginery promote {name} {self.version} --to {CHAMPION} --force --why TEXT"
        )

    def _how_to_go_on(self) -> str:
        return f"Promote again on a machine that can, or {self._by_hand()}"


def _rolled_back(bundle_digest: str, entries: Sequence[Entry]) -> str:
    """Why a bundle may not come back by itself: somebody rolled back from it. Empty where nobody did."""
    bundles = {
        change.after: entry.change.digests.get("bundle")
        for entry in entries
        for change in entry.change.changes.values()
        if entry.change.kind in ("promote", "manual")
    }
    for entry in entries[::-1]:
        left = entry.change.changes.get(CHAMPION)
        if entry.change.kind == "manual" and left is not None and bundles.get(left.after) == bundle_digest:
            return ""  # and somebody wanted it again
        if entry.change.kind == "rollback" and left is not None and bundles.get(left.before or "") == bundle_digest:
            return (
                f"this very bundle was champion as version {left.before}, and was rolled back on "
                f"{entry.change.when[:10]} ({entry.change.why})"
            )
    return ""
