"""The record of a challenger beside the champion: what differed, how certain that is, and whether it is enough."""

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import AwareDatetime, Field, FiniteFloat

from components.common.contracts.errors import EngineryError, GateFailed, UserError
from components.common.contracts.manifests import ALL_FILES, Artifact, Manifest, load, seal, write_atomically
from components.common.contracts.records import Record
from components.common.contracts.statistics import SIGNIFICANCE, drop_lower, drop_upper, holm, mcnemar
from components.common.registry.promotions import PairedImages
from components.common.registry.trust import SHADOW, check_shadow, read_statements, sign_shadow
from components.serve.shadow import ShadowedModel
from enginery.new_folders import new_folder

ANSWERS = "answers.jsonl"
_MAX_PAIRS = 50  # of classes, in the record
_NORMAL_95 = 1.96


class ShadowAnswer(Record):
    """One image, by what both models said of it. The image itself is not kept."""

    id: str = Field(description="That the client gave its request, behind a slash the image's place; empty without.")
    image_digest: str
    champion: str = Field(description="Class that was answered.")
    challenger: str = Field(description="Class; empty where it gave no answer.")
    label: str | None = Field(None, description="The right class, where it was given.")
    champion_ms: FiniteFloat = Field(description="In the server, from the decoded image to the label, queues included.")
    challenger_ms: FiniteFloat = Field(
        description="Of the challenger, alone, one image at a time, at the lowest priority."
    )
    beside_ms: FiniteFloat | None = Field(
        None, description="Of the champion's own files under the challenger's conditions."
    )


class PredictedClass(Record):
    """Counts of a class that was predicted by one model alone."""

    name: str
    num_champion: int = Field(description="Images of which the champion said this class.")
    num_challenger: int
    num_left: int = Field(description="Images of which the champion alone said this class.")
    num_entered: int = Field(description="Images of which the challenger alone said this class.")
    p_corrected: float = Field(description="McNemar's test on the two numbers before, corrected by Holm's method.")

    @property
    def is_significant(self) -> bool:
        """True if the challenger predicts the class more or less often, and not by chance."""
        return self.p_corrected < SIGNIFICANCE


class ClassPair(Record):
    """Counts of one class that became another."""

    champion: str
    challenger: str
    num_images: int


class Speed(Record):
    """Both models on the same images in turns: median milliseconds, and the ratio of the challenger to the champion."""

    num_images: int
    champion_ms: float
    challenger_ms: float
    ratio: float = Field(description="Median over the images; above 1 the challenger is slower.")
    low: float = Field(description="Lower end of the ratio's 95 % interval, by the ranks of the median.")
    high: float


class ShadowComparison(Record):
    """All that follows from the answers."""

    num_compared: int
    num_differing: int = Field(description="Images whose classes differ, or without an answer of the challenger.")
    num_unanswered: int = Field(description="Of these, images without an answer of the challenger.")
    low_pct: float = Field(description="Lower end of the one-sided 95 % interval of the share that differs.")
    high_pct: float = Field(description="Upper end: what a limit is held against.")
    classes: tuple[PredictedClass, ...] = Field(description="That only one model said of some image, the surest first.")
    pairs: tuple[ClassPair, ...] = Field(description="The most frequent changes.")
    champion_p50_ms: float = Field(description="See ShadowAnswer; not to be compared with challenger_p50_ms.")
    champion_p99_ms: float
    challenger_p50_ms: float
    challenger_p99_ms: float
    speed: Speed | None = Field(None, description="None where the champion's files can't be read here.")
    num_labelled: int = 0
    labelled: PairedImages | None = Field(None, description="Who is right, where labels were given.")

    @property
    def differing_pct(self) -> float:
        """Share of the images whose classes differ."""
        return 100 * self.num_differing / self.num_compared


class ShadowManifest(Manifest):
    """A challenger beside the champion on live requests."""

    kind: Literal["shadow"] = "shadow"
    champion: ShadowedModel
    challenger: ShadowedModel
    asked: str = Field("", description="Address of the server that answered for the challenger; empty: it ran here.")
    started: AwareDatetime
    ended: AwareDatetime
    num_seen: int = Field(description="Images that the champion answered meanwhile, up to the last sample.")
    num_dropped: int = Field(description="Drawn, and given up in the server: the queue was full, or they were large.")
    num_unpaired: int = Field(description="Of which the image or the champion's answer did not arrive.")
    comparison: ShadowComparison


def compare(answers: Sequence[ShadowAnswer]) -> ShadowComparison:
    """Compare the answers of both models.

    Labels of live requests are unknown at first. So McNemar's test is made of each class: does the challenger say it
    more often than the champion, of the images on which they differ? That is the test of Stuart and Maxwell for one
    class. With labels it is made of who is right.

    Args:
        answers: at least one.
    """
    differing = [answer for answer in answers if answer.champion != answer.challenger]
    count, num_differing = len(answers), len(differing)
    left, entered = Counter(a.champion for a in differing), Counter(a.challenger for a in differing if a.challenger)
    tested = sorted(left | entered)
    corrected = holm([mcnemar(left[name], entered[name])[0] for name in tested])
    of_champion, of_challenger = Counter(a.champion for a in answers), Counter(a.challenger for a in answers)
    classes = [
        PredictedClass(
            name=name,
            num_champion=of_champion[name],
            num_challenger=of_challenger[name],
            num_left=left[name],
            num_entered=entered[name],
            p_corrected=p_value,
        )
        for name, p_value in zip(tested, corrected, strict=True)
    ]
    pairs = Counter((answer.champion, answer.challenger) for answer in differing).most_common(_MAX_PAIRS)
    times = np.percentile([[a.champion_ms, a.challenger_ms] for a in answers], [50, 99], axis=0).tolist()
    labelled = [answer for answer in answers if answer.label is not None]
    right = np.array([[answer.champion == answer.label, answer.challenger == answer.label] for answer in labelled])
    return ShadowComparison(
        num_compared=count,
        num_differing=num_differing,
        num_unanswered=sum(not answer.challenger for answer in answers),
        low_pct=max(0.0, drop_lower(count, num_differing, 0)),
        high_pct=drop_upper(count, num_differing, 0),
        classes=tuple(sorted(classes, key=lambda entry: (entry.p_corrected, -entry.num_left - entry.num_entered))),
        pairs=tuple(ClassPair(champion=a, challenger=b, num_images=number) for (a, b), number in pairs),
        champion_p50_ms=times[0][0],
        champion_p99_ms=times[1][0],
        challenger_p50_ms=times[0][1],
        challenger_p99_ms=times[1][1],
        speed=_speed(answers),
        num_labelled=len(labelled),
        labelled=PairedImages.of(*right.T) if labelled else None,
    )


def _speed(answers: Sequence[ShadowAnswer]) -> Speed | None:
    timed = [(answer.beside_ms, answer.challenger_ms) for answer in answers if answer.beside_ms]
    if not timed:
        return None
    ratios = sorted(challenger / champion for champion, challenger in timed)
    reach = math.ceil(_NORMAL_95 * math.sqrt(len(ratios)) / 2)  # ranks from the median to the interval's ends
    middle = np.median(timed, axis=0).tolist()
    return Speed(
        num_images=len(ratios),
        champion_ms=middle[0],
        challenger_ms=middle[1],
        ratio=float(np.median(ratios)),
        low=ratios[max(0, len(ratios) // 2 - reach)],
        high=ratios[min(len(ratios) - 1, len(ratios) // 2 + reach)],
    )


def write_record(
    output: Path, answers: Sequence[ShadowAnswer], key: Any, config: Record, fields: Mapping[str, Any]
) -> Artifact[ShadowManifest]:
    """Write the record into the new folder `output`, for this account alone; signed where there is a key.

    `fields`: of ShadowManifest; others are left aside.

    Raises:
        UserError: `output` exists.
    """
    own = ShadowManifest.model_fields.keys() - Manifest.model_fields.keys() - {"comparison"}
    digests = {role: fields[role].repository_digest for role in ("champion", "challenger")}
    with new_folder(output, "a shadow record") as folder:
        folder.chmod(0o700)
        lines = "".join(answer.model_dump_json() + "\n" for answer in answers)
        write_atomically(folder / ANSWERS, lines.encode())
        (folder / ANSWERS).chmod(0o600)
        rest = {"comparison": compare(answers), **{name: fields[name] for name in own}}
        record = seal(folder, ShadowManifest, inputs=digests, config=config, **rest)
        if key is not None:
            (folder / SHADOW).write_bytes(sign_shadow({**digests, "shadow": record.digest}, key))
    return Artifact(path=output, manifest=record.manifest, digest=record.digest)


def read_record(folder: Path) -> tuple[Artifact[ShadowManifest], list[ShadowAnswer]]:
    """A record, checked by every digest, and its answers.

    Raises:
        UserError: there is none.
        EngineryError: it was changed, or its numbers are not those of its answers.
    """
    record = load(folder, ShadowManifest, verify=ALL_FILES)
    try:
        lines = (folder / ANSWERS).read_bytes().splitlines()  # of text it would split at other characters, too
        answers = [ShadowAnswer.model_validate_json(line) for line in lines]
        found = compare(answers)
    except (OSError, ValueError, IndexError, ZeroDivisionError):  # of which pydantic's errors are
        found = None
    if found is None or _counts(found) != _counts(record.manifest.comparison):
        raise EngineryError(
            f"the numbers of {folder} are not those of its answers: it was edited. Write it again with "
            "`enginery shadow`",
            code="shadow-inconsistent",
        )
    # Intervals from the counts, whatever the manifest says.
    manifest = record.manifest.model_copy(update={"comparison": found})
    return Artifact(path=folder, manifest=manifest, digest=record.digest), answers


def _counts(found: ShadowComparison) -> tuple[object, ...]:
    return found.num_compared, found.num_differing, found.num_unanswered, found.num_labelled, found.pairs


def with_labels(answers: Sequence[ShadowAnswer], labels: Mapping[str, str]) -> list[ShadowAnswer]:
    """The answers with their right classes, which are named by a request's id or an image's digest.

    Raises:
        UserError: none of them is named, or by no class that was predicted; or an id is of several images.
    """
    images: dict[str, str] = {}
    for answer in answers:
        if images.setdefault(answer.id, answer.image_digest) != answer.image_digest and answer.id in labels:
            raise UserError(
                f"clients sent several images as {answer.id!r}, so its label may be of any of them: name them by "
                f"their digests, as in {ANSWERS}",
                code="label-ambiguous",
                setting="--labels",
            )
    found = [
        answer.model_copy(update={"label": labels.get(answer.id) or labels.get(answer.image_digest) or answer.label})
        for answer in answers
    ]
    predicted = {name for answer in found for name in (answer.champion, answer.challenger)}
    if not any(answer.label in predicted for answer in found):
        raise UserError(
            f"none of {len(labels):,} labels gives one of {len(found):,} images that were compared a class that the "
            f"models know: name each image by its request's id or by its digest, and classes as in {ANSWERS}",
            code="no-label-fits",
            setting="--labels",
        )
    return found


def read_labels(file: Path) -> dict[str, str]:
    """Labels of a CSV file without a header: an id or digest, and the class.

    Raises:
        UserError: it can't be read or is empty, or a line is something else or contradicts another.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            rows = [row for row in csv.reader(opened) if row]
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"can't read --labels {file}: {reason}; name a CSV file in UTF-8 with lines `ID,CLASS`"
        raise UserError(message, code="labels-unreadable", setting="--labels") from None
    if wrong := [row for row in rows or [[]] if len(row) != 2 or not all(row)]:
        raise UserError(
            f"--labels {file}: {','.join(wrong[0])!r} is no line `ID,CLASS`, where ID is a request's id or the digest "
            "of an image (sha256:...)",
            code="labels-invalid",
            setting="--labels",
        )
    labels: dict[str, str] = {}
    for name, label in rows:
        if labels.setdefault(name, label) != label:
            raise UserError(
                f"--labels {file} has two classes for {name!r}, {labels[name]!r} and {label!r}; remove the wrong one",
                code="label-ambiguous",
                setting="--labels",
            )
    return labels


@dataclass(frozen=True, kw_only=True)
class ShadowLimits:
    """Limits on a record, without which its challenger is not deployed."""

    num_requests: int
    days: int
    disagreement_pct: float


def require_shadow(
    folder: Path, champion: str, challenger: str, limits: ShadowLimits, where: str
) -> Artifact[ShadowManifest]:
    """See that a record is about two repositories, recent and good enough.

    Args:
        folder: of the record.
        champion: digest of the repository that is served now; empty where none is.
        challenger: digest of the one that is to be.
        limits: see ShadowLimits.
        where: the environment, for people.

    Raises:
        UserError: there is no record, or nothing to compare with.
        EngineryError: it was edited, is about others, or is not signed as the machine's trust policy wants it.
        GateFailed: it is too old, of too few images, or they differ too much.
    """
    again = "run `enginery shadow` with the repository that is to be deployed, beside the one that is served"
    if not champion:
        message = f"{where} serves no model yet, so there is no champion to compare with; leave out --require-shadow"
        raise UserError(message, code="no-champion", setting="--require-shadow")
    record, _ = read_record(folder)
    manifest, found = record.manifest, record.manifest.comparison
    wanted = {"champion": champion, "challenger": challenger}
    for role, digest in wanted.items():
        if (own := getattr(manifest, role).repository_digest) != digest:
            message = f"the shadow record {folder} has the {role} {own}, and for {where} it is {digest}: {again}"
            raise EngineryError(message, code=f"shadow-other-{role}", setting="--require-shadow")
    check_shadow(f"the shadow record {folder}", {**wanted, "shadow": record.digest}, read_statements(folder))
    worse = found.labelled
    age = datetime.now(UTC) - manifest.ended
    refusals = {
        "shadow-too-old": (
            not timedelta(0) <= age <= timedelta(days=limits.days),
            f"ended {manifest.ended:%Y-%m-%d %H:%M} UTC, and may be {limits.days} days old (--shadow-days)",
        ),
        "shadow-too-few": (
            found.num_compared < limits.num_requests,
            f"compared {found.num_compared:,} images, and {limits.num_requests:,} are needed (--shadow-requests)",
        ),
        "shadow-worse": (
            worse is not None and worse.num_regressed > worse.num_improved and worse.mcnemar_p < SIGNIFICANCE,
            f"shows by {found.num_labelled:,} labels that the challenger is worse",
        ),
        "shadow-differs": (
            found.high_pct > limits.disagreement_pct,
            f"has other labels on {found.differing_pct:.2f} % of the images, up to {found.high_pct:.2f} % by its "
            f"interval, and {limits.disagreement_pct:g} % may differ (--shadow-disagreement). More images make the "
            "interval shorter; labels (--labels) say who is right",
        ),
    }
    for code, (is_refused, reason) in refusals.items():
        if is_refused:
            message = f"the shadow record {folder} {reason}. Nothing was deployed; {again}"
            raise GateFailed(message, code=code, setting="--require-shadow")
    return record
