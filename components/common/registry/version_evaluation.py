"""The evaluation of a registered version, read from its sealed report and verdict, and the comparison of two."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from components.common.contracts.errors import EngineryError
from components.common.contracts.foreign import read_arrays
from components.common.contracts.manifests import ALL_FILES, Artifact, ReportManifest, VerdictManifest, load
from components.common.contracts.records import AccuracyRow, Precision
from components.common.registry.audit_log import Entry, Situation, champions
from components.common.registry.model_registry import PARTS, RegisteredVersion, Registry
from components.common.registry.promotions import ChampionComparison, PairedImages
from components.common.registry.trust import check_chain, find_policy, to_stderr
from components.common.tasks import TASKS

PREDICTIONS = "predictions.npz"
_MAX_ARRAY_BYTES = 1 << 28  # of predictions: 5 classes each for 13 million images
_DIGITS = 9  # percentages carry rounding noise; a difference of exactly the tolerance is within it


@dataclass(frozen=True, kw_only=True)
class VersionEvaluation:
    """Report and verdict of one bundle, and what they say together."""

    report: Artifact[ReportManifest]
    verdict: Artifact[VerdictManifest]

    @property
    def passed(self) -> bool:
        """True if the gate let it through."""
        return self.verdict.manifest.passed

    @property
    def precision(self) -> Precision:
        """The precision that the verdict recommends."""
        return self.verdict.manifest.served_precision

    @property
    def row(self) -> AccuracyRow | None:
        """The report's row of that precision; None if it has none."""
        rows = self.report.manifest.accuracy.rows
        return next((row for row in rows if row.precision == self.precision), None)

    @property
    def score_pct(self) -> float | None:
        """Score of that precision on the validation split."""
        return self.row.score_pct if self.row is not None else None

    @property
    def split_digest(self) -> str:
        """Digest of the validation split that it was measured on."""
        return self.report.manifest.accuracy.split_digest

    @property
    def digests(self) -> dict[str, str]:
        """Manifest digests of the dataset, its validation split, bundle, report and verdict."""
        accuracy = self.report.manifest.accuracy
        return {
            "dataset": accuracy.dataset_digest,
            "validation split": accuracy.split_digest,
            "bundle": accuracy.bundle_digest,
            "report": self.report.digest,
            "verdict": self.verdict.digest,
        }

    @property
    def tags(self) -> dict[str, str]:
        """The same for the registry, whose versions are searched and read by tags."""
        digests = {f"{name.replace(' ', '_')}_digest": value for name, value in self.digests.items()}
        score = {"score_pct": f"{self.score_pct:.4f}"} if self.score_pct is not None else {}
        return {**digests, **score, "precision": self.precision, "verdict": self.verdict.manifest.word}

    def measured(self, label: str) -> "Measured":
        """Return the measured accuracy of that precision.

        Raises:
            EngineryError: it was not measured. `label` is what the message calls the version.
        """
        if self.score_pct is None:
            message = f"the report of {label} does not measure {self.precision.upper()}; validate it again"
            raise EngineryError(message, code="precision-not-measured")
        return Measured(precision=self.precision, score_pct=self.score_pct, correct=self._correct())

    def _correct(self) -> np.ndarray | None:
        file = self.report.path / PREDICTIONS
        if not file.is_file() or self.row is None or not TASKS[self.report.manifest.accuracy.task].classifies:
            return None  # no image is right or wrong
        num_images = self.row.num_images  # each with a label of up to 8 bytes and up to 5 classes
        most = {
            name: min(_MAX_ARRAY_BYTES, 8 * num_images * many) for name, many in ((self.precision, 5), ("labels", 1))
        }
        try:
            arrays = read_arrays(file, most)
            if arrays is None:
                return None
            top, labels = arrays[self.precision], arrays["labels"]
            shapes = (top.shape[:1], top.ndim, labels.shape)
            if shapes != ((num_images,), 2, (num_images,)) or {top.dtype.kind, labels.dtype.kind} - {*"iu"}:
                raise ValueError(f"it does not hold a row of classes and a label for each of {num_images:,} images")
            correct: np.ndarray = top[:, 0] == labels
        except (ValueError, IndexError) as error:
            raise EngineryError(
                f"{file} holds no predictions: {error}. Validate the bundle again", code="predictions-damaged"
            ) from None
        return correct


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The accuracy of one precision on a validation split."""

    precision: Precision
    score_pct: float
    correct: np.ndarray | None  # [N] bool, in the split's order; None where the predictions are not at hand
    runtime: str = ""  # that measured it again; empty where its own report is on these images


def compare_versions(
    evaluation: VersionEvaluation, champion: Measured, champion_version: str, tolerance_points: float
) -> ChampionComparison:
    """A version beside what the champion shows on the same images.

    Raises:
        EngineryError: the version was not measured in the precision that its verdict recommends.
    """
    own = evaluation.measured("the version")
    delta = own.score_pct - champion.score_pct
    paired = None
    if own.correct is not None and champion.correct is not None and len(own.correct) == len(champion.correct):
        paired = PairedImages.of(champion.correct, own.correct)
    return ChampionComparison(
        champion_version=champion_version,
        champion_precision=champion.precision,
        champion_score_pct=champion.score_pct,
        precision=own.precision,
        score_pct=own.score_pct,
        score_name=evaluation.report.manifest.accuracy.score_name,
        delta_points=delta,
        tolerance_points=tolerance_points,
        not_worse=round(delta + tolerance_points, _DIGITS) >= 0,
        split_digest=evaluation.split_digest,
        num_images=evaluation.row.num_images if evaluation.row is not None else 0,
        measured_again=champion.runtime,
        paired=paired,
    )


@contextmanager
def evaluation_of(registry: Registry, version: RegisteredVersion) -> Iterator[VersionEvaluation]:
    """The evaluation of a registered version, by the files that lie in the registry, as long as the context lasts.

    Raises:
        EngineryError: they are gone, were changed, or are not those that the version was registered with.
    """
    with registry.files(version, "report") as report_path, registry.files(version, "verdict") as verdict_path:
        evaluation = load_evaluation(report_path, verdict_path)
        check_tags(version, {"report": evaluation.report.digest, "verdict": evaluation.verdict.digest})
        yield evaluation


@dataclass(frozen=True, kw_only=True)
class PresentChampion:
    """The version that a new champion must not be worse than, and its evaluation."""

    version: RegisteredVersion
    evaluation: VersionEvaluation


@contextmanager
def champion_to_beat(
    registry: Registry, model: str, situation: Situation, say: Callable[[str], None] = to_stderr
) -> Iterator[PresentChampion | None]:
    """The champion; with a trust policy the last champion that it trusts; None where there is none.

    Who can write the registry can make up a champion of any accuracy. With a policy such a one counts for nothing: it
    neither keeps a version from being champion, nor lets one through that is worse than the champion before.

    Args:
        registry: of the model.
        model: its name.
        situation: of its aliases and log.
        say: called with a text for each champion that the policy refuses.

    Raises:
        EngineryError: without a policy, the champion's files are not what was promoted.
    """
    if situation.champion is None:
        yield None
        return
    policy = find_policy()
    earlier = champions(situation.entries)[::-1] if policy is not None else []
    with ExitStack() as stack:
        for number in dict.fromkeys((situation.champion, *earlier)):
            try:
                version = registry.version(model, number)
                evaluation = stack.enter_context(evaluation_of(registry, version))
                digests: dict[str, str] = {part: evaluation.digests[part] for part in PARTS}
                check_log(version, situation.entries, digests)
                if policy is not None:
                    check_chain(version.label, digests, registry.statements(version), environment="")
            except EngineryError as error:
                if policy is None:
                    raise
                if error.code != "no-version":  # it was deleted since
                    say(f"version {number} does not count as champion ({error.code}): {error}")
            else:
                yield PresentChampion(version=version, evaluation=evaluation)
                return
        yield None


def load_evaluation(report: Path, verdict: Path) -> VersionEvaluation:
    """Read report and verdict, every file by its digest.

    Raises:
        EngineryError: they are damaged, or the verdict is on another report.
    """
    measured = load(report, ReportManifest, verify=ALL_FILES)
    decided = load(verdict, VerdictManifest, verify=ALL_FILES)
    if decided.manifest.inputs["report"] != measured.digest:
        raise EngineryError(
            f"the verdict {verdict} is on another report than {report}; run the gate on this one", code="other-report"
        )
    return VersionEvaluation(report=measured, verdict=decided)


def check_log(version: RegisteredVersion, entries: Sequence[Entry], digests: Mapping[str, str]) -> None:
    """Compare what lies in the registry with the version's tags, and with the log's entry of its promotion.

    Tags can be edited and deleted, and versions registered by who has MLflow's API alone: both must say the same.

    Args:
        version: which one.
        entries: the log.
        digests: of bundle, report and verdict as they lie there, by name.

    Raises:
        EngineryError: they differ, or `promote` never wrote an entry for the version.
    """
    check_tags(version, digests)
    promotions = [entry for entry in entries if entry.change.kind == "promote"]
    own = [entry for entry in promotions if version.number in (new.after for new in entry.change.changes.values())]
    if not own:
        raise EngineryError(
            f"{version.label} is not in the audit log: enginery did not promote it, so nothing says what it is. "
            "Promote its bundle with a run of the pipeline, or delete the version",
            code="not-in-log",
        )
    for name, digest in digests.items():
        logged = own[-1].change.digests.get(name)  # the last: a model that was made again counts from 1 again
        if logged != digest:
            raise EngineryError(
                f"the {name} that lies in the registry is not the one that was promoted as {version.label}: {digest}, "
                f"entry {own[-1].number} of the audit log says {logged}. Put the original back, or delete the version",
                code="not-as-promoted",
            )


def check_tags(version: RegisteredVersion, digests: Mapping[str, str]) -> None:
    """Compare what lies in the registry with what the version was registered with.

    Raises:
        EngineryError: they differ.
    """
    for name, digest in digests.items():
        registered = version.tags.get(f"{name}_digest")
        if registered != digest:
            raise EngineryError(
                f"the {name} that lies in the registry is not the one that {version.label} was registered with: "
                f"{digest}, its tag {name}_digest says {registered or 'nothing'}. Put the original back, or delete "
                "the version",
                code="not-as-registered",
            )
