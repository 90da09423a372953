"""Decide whether a new version becomes the champion: never where it is worse on the same images."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from components.common.contracts.errors import EngineryError, RuntimeUnavailable, shortened
from components.common.contracts.manifests import ALL_FILES, Artifact, BundleManifest, DatasetManifest, load
from components.common.contracts.records import Precision
from components.common.process.steplog import StepLog
from components.common.registry.audit_log import Entry, Proposal, Situation
from components.common.registry.model_registry import RegisteredVersion, Registry
from components.common.registry.promotions import CHAMPION, ChampionComparison
from components.common.registry.trust import check_chain
from components.common.registry.version_evaluation import (
    Measured,
    PresentChampion,
    VersionEvaluation,
    champion_to_beat,
    check_tags,
    compare_versions,
)
from components.promote.config import PromoteConfig

_CPU_BATCH_SIZE = 32


def remeasure(
    registry: Registry,
    version: RegisteredVersion,
    precision: Precision,
    data: Artifact[DatasetManifest],
    progress: Callable[[int, int], None],
) -> Measured:
    """Run a registered version's bundle, as it lies in the registry, over a validation split.

    Args:
        registry: that holds it.
        version: the version.
        precision: which one to run.
        data: the images.
        progress: called with images done and images in all.

    Raises:
        RuntimeUnavailable: nothing here runs it.
        EngineryError: its files are gone or changed, its classes are others than the dataset's, or no key of the
            machine's policy signed its verdict.
    """
    with registry.files(version, "bundle") as path, TemporaryDirectory(prefix="enginery-") as temporary:
        # A copy: what was checked can't be swapped any more. A plan is code.
        copy = load(path, BundleManifest).copy_to(Path(temporary) / "bundle")
        bundle = load(copy, BundleManifest, verify=ALL_FILES)
        digests = {"bundle": bundle.digest}
        check_tags(version, digests)
        statements = registry.statements(version)
        # Without a policy the caller has said so, of the bundle that it promotes.
        check_chain(version.label, digests, statements, environment="", model=version.name, say=lambda text: None)
        if bundle.manifest.classes != data.manifest.classes:
            raise EngineryError(
                f"its {len(bundle.manifest.classes)} classes are not the {len(data.manifest.classes)} of the dataset "
                f"{data.path}",
                code="other-classes",
            )
        own, other = bundle.manifest.text, data.manifest.text
        if own is not None and other is not None and own.languages != other.languages:
            message = f"it translates from {own.languages}, and the dataset {data.path} is from {other.languages}"
            raise EngineryError(message, code="other-languages")
        try:
            return _measure(bundle, precision, data, progress)
        except ModuleNotFoundError as error:
            message = f"{error.name} is not installed here, and measuring needs PyTorch, DALI, and OpenVINO or TensorRT"
            raise RuntimeUnavailable(message, code="no-runtime") from error


def _measure(
    bundle: Artifact[BundleManifest],
    precision: Precision,
    data: Artifact[DatasetManifest],
    progress: Callable[[int, int], None],
) -> Measured:
    if bundle.manifest.text is not None:
        return _measure_text(bundle, precision, data, progress)
    import torch  # here and below: the image of promote has none of these

    from components.common.data.evaluation import predict
    from components.common.data.loader import Loader
    from components.common.runtimes.selection import select_runtime

    try:
        runner = select_runtime(bundle, precision, "auto", same_arithmetic=True).runner
    except (EngineryError, RuntimeError) as error:  # OpenVINO raises the latter where it can't load a file
        reason = shortened(error, 400)
        raise RuntimeUnavailable(f"nothing here runs its {precision.upper()}: {reason}", code="no-runtime") from error
    assert runner is not None
    with closing(runner):
        on_gpu = torch.cuda.is_available()
        largest = bundle.manifest.image_shapes.max_batch
        loader = Loader(
            data,
            "val",
            bundle.manifest.image_transform,
            batch_size=largest if on_gpu else min(_CPU_BATCH_SIZE, largest),
            device_id=0 if on_gpu else None,
        )
        num_images = data.manifest.splits["val"].num_images
        found = predict({precision: runner}, loader, num_images, progress)[precision]
    return Measured(precision=precision, score_pct=found.score_pct, correct=found.right, runtime=runner.runtime)


def _measure_text(
    bundle: Artifact[BundleManifest],
    precision: Precision,
    data: Artifact[DatasetManifest],
    progress: Callable[[int, int], None],
) -> Measured:
    from components.common.tasks.translation.evaluation import read_pairs, translate_all
    from components.common.tasks.translation.predictions import TextPredictions
    from components.common.tasks.translation.runners import open_translator

    sentences, references = zip(*read_pairs(data, "val"), strict=True)
    with closing(open_translator(bundle, precision)) as translator:
        said = translate_all(translator, sentences, progress)
    found = TextPredictions.of_texts(said, references, bundle.manifest.text_spec.target_language)
    return Measured(precision=precision, score_pct=found.score_pct, correct=None, runtime=translator.runtime)


_MAX_LENGTH = 1500  # of a reason; what MLflow takes of a record must hold it


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The decision on a version that could become the champion, and its reason."""

    champion: bool
    why: str
    comparison: ChampionComparison | None = None


class Decision:
    """Made again for each situation, since other promotions may come first; what was measured is kept."""

    def __init__(
        self,
        config: PromoteConfig,
        registry: Registry,
        version: str,
        evaluation: VersionEvaluation,
        data: Artifact[DatasetManifest],
        log: StepLog,
    ) -> None:
        self.config, self.registry, self.version = config, registry, version
        self.evaluation, self.data, self.log = evaluation, data, log
        self.judgement = Judgement(champion=False, why="nothing was decided yet")
        self._measured: dict[str, Measured] = {}  # by the champion's version

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
            digests=self.evaluation.digests,
            comparison=self.judgement.comparison,
        )

    def _judge(self, situation: Situation) -> Judgement:
        if back := _rolled_back(self.evaluation.digests["bundle"], situation.entries):
            return Judgement(champion=False, why=f"{back}; {self._how_to_force()}")
        refused: list[str] = []  # by the machine's trust policy
        number, comparison = situation.champion, None
        try:
            with champion_to_beat(self.registry, self.config.registered_model, situation, refused.append) as champion:
                if champion is not None:
                    number = champion.version.number
                    comparison = self._compare(champion)
        except EngineryError as error:
            why = f"it can't be compared with the champion, version {number}: {error}"
            return Judgement(
                champion=False, why=f"{why}. Promote again on a machine that can, or {self._how_to_force()}"
            )
        ignored = "".join(f"; {reason}" for reason in refused)
        if comparison is None:
            trusted = " that the trust policy accepts" if refused else ""
            return Judgement(champion=True, why=f"passed its gate, and there was no champion{trusted}{ignored}")
        if comparison.not_worse:
            return Judgement(champion=True, why=f"not worse: {comparison.text}{ignored}", comparison=comparison)
        allowed = f", allowed {comparison.tolerance_points:g} points less" if comparison.tolerance_points else ""
        why = f"worse than the champion: {comparison.text}{allowed}{ignored}"
        return Judgement(champion=False, why=why, comparison=comparison)

    def _compare(self, champion: PresentChampion) -> ChampionComparison:
        number, present = champion.version.number, champion.evaluation
        if present.split_digest == self.evaluation.split_digest:
            measured = present.measured(f"the champion, version {number},")
            return compare_versions(self.evaluation, measured, number, self.config.tolerance_points)
        self.evaluation.measured("the version")  # before the champion is measured for nothing
        if number not in self._measured:
            self.log.note(f"the champion, version {number}, was measured on another validation split; now on this one")
            unit = self.evaluation.report.manifest.accuracy.unit
            self._measured[number] = remeasure(
                self.registry,
                champion.version,
                present.precision,
                self.data,
                partial(self.log.progress, "measuring the champion", unit=unit),
            )
        return compare_versions(self.evaluation, self._measured[number], number, self.config.tolerance_points)

    def _how_to_force(self) -> str:
        name = self.config.registered_model
        return (
            f"make it champion all the same: enginery promote {name} {self.version} --to {CHAMPION} --force --why TEXT"
        )


def _rolled_back(bundle_digest: str, entries: Sequence[Entry]) -> str:
    """Return why a bundle may not come back by itself: somebody rolled back from it. Empty where nobody did."""
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
