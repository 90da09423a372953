"""deploy --require-shadow: what a record must show, and records that are forged, replayed or of something else."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, chi2

from components.common.contracts.digests import digest_file
from components.common.contracts.statistics import holm
from components.common.registry.keys import signing_key
from components.common.registry.trust import SHADOW, sign_shadow
from components.serve.shadow import ShadowedModel
from enginery.release.deploy import environments
from enginery.serving.shadow import ShadowConfig
from enginery.serving.shadow_record import ANSWERS, ShadowAnswer, ShadowLimits, compare, require_shadow, write_record
from tests.unit.registered import Machine, deploy, enginery, exported, git, pins, refuses, replace_file, reseal

CHAMPION, CHALLENGER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
LIMITS = ShadowLimits(num_requests=1000, days=7, disagreement_pct=5.0)


def answers(num: int, num_differing: int, num_lost: int = -1) -> list[ShadowAnswer]:
    """The first ones differ; with labels by which the champion is right on `num_lost` of them."""
    return [
        ShadowAnswer(
            id=f"r{index}",
            image_digest=f"sha256:{index}",
            champion="a",
            challenger="b" if index < num_differing else "a",
            label=None if num_lost < 0 else "a" if index < num_lost or index >= num_differing else "b",
            champion_ms=2.0,
            challenger_ms=3.0 + index % 3,
            beside_ms=2.0,
        )
        for index in range(num)
    ]


def record(folder: Path, found: list[ShadowAnswer], key: Any = None, hours: float = 1.0, **digests: str) -> str:
    """A record that ended so many hours ago. Returns its digest."""
    digests = {"champion": CHAMPION, "challenger": CHALLENGER, **digests}
    ended = datetime.now(UTC) - timedelta(hours=hours)
    model = {"name": "m", "version": "1", "precision": "int8", "bundle_digest": "sha256:c"}
    fields: dict[str, Any] = {role: ShadowedModel(**model, repository_digest=own) for role, own in digests.items()}
    fields |= {"asked": "", "started": ended - timedelta(hours=1), "ended": ended}
    fields |= dict.fromkeys(("num_seen", "num_dropped", "num_unpaired"), 0)
    return write_record(folder, found, key, ShadowConfig(), fields).digest


def required(folder: Path) -> None:
    require_shadow(folder, CHAMPION, CHALLENGER, LIMITS, "prod")


def test_the_statistics_are_those_of_others() -> None:
    rng = np.random.default_rng(0)
    drawn = zip(rng.choice(list("abcd"), 400), rng.choice(list("abcd"), 400), rng.random(400) < 0.2, strict=True)
    base = answers(1, 0)[0]
    found = [
        base.model_copy(update={"champion": str(x), "challenger": str("d" if y in "cd" else y) if differs else str(x)})
        for x, y, differs in drawn
    ]
    result = compare(found)
    pairs = [(a.champion, a.challenger) for a in found if a.champion != a.challenger]
    assert result.num_differing == len(pairs)
    names = sorted({name for pair in pairs for name in pair})
    counts = [(sum(x == name for x, _ in pairs), sum(y == name for _, y in pairs)) for name in names]
    plain = [
        binomtest(left, left + entered).pvalue
        if left + entered < 25
        else chi2.sf((abs(left - entered) - 1) ** 2 / (left + entered), 1)
        for left, entered in counts
    ]
    expected = dict(zip(names, holm(plain), strict=True))
    assert {entry.name: entry.p_corrected for entry in result.classes} == pytest.approx(expected)
    assert {entry.name for entry in result.classes if entry.is_significant} >= {"d"}
    for count, differing in ((400, 0), (1000, 3), (1000, 60), (5, 5)):
        result = compare(answers(count, differing))
        exact = binomtest(differing, count).proportion_ci(0.9, "exact")
        # Between the score interval and the exact one; the rule of three is the least.
        assert result.low_pct == pytest.approx(100 * exact.low, abs=0.1 if count > 5 else 60)
        assert result.high_pct == pytest.approx(100 * exact.high, abs=0.1)
        assert result.low_pct <= result.differing_pct <= result.high_pct
    speed = compare(answers(300, 0)).speed
    assert (speed.low, speed.ratio, speed.high) == (2.0, 2.0, 2.0)  # of 1.5, 2 and 2.5, a third each


def edit(change: Callable[[list[dict[str, Any]]], None], folder: Path) -> None:
    """The answers, with digest and seal that fit."""
    lines = [json.loads(line) for line in (folder / ANSWERS).read_text().splitlines()]
    change(lines)
    replace_file(folder, ANSWERS, "".join(json.dumps(line) + "\n" for line in lines).encode())


def made(num_differing: int, num: int = 1000, num_lost: int = -1, **options: Any) -> Callable[[Path], object]:
    return lambda folder: record(folder, answers(num, num_differing, num_lost), **options)


def changed(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """A record on which too much differs, changed afterwards."""
    return lambda folder: (record(folder, answers(1000, 45)), change(folder))


def replace_text(file: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text((folder / file).read_text().replace(old, new))


ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing is wrong": (made(9), ""),
    "labels say that it is better": (made(30, num_lost=2), ""),
    "no record": (lambda folder: None, "no-manifest"),
    "another champion": (made(9, champion=CHALLENGER), "shadow-other-champion"),
    "another challenger": (made(9, challenger="sha256:" + "d" * 64), "shadow-other-challenger"),
    "too old": (made(9, hours=7 * 24 + 1), "shadow-too-old"),
    "from the future": (made(9, hours=-1), "shadow-too-old"),
    "of no time zone": (
        changed(lambda folder: reseal(folder, lambda manifest: manifest.update(ended="2026-11-30T12:00:00"))),
        "invalid-manifest",
    ),
    "too few": (made(9, 999), "shadow-too-few"),
    "too different": (made(45), "shadow-differs"),  # 4.5 %, up to 5.7 %
    "worse by labels": (made(30, num_lost=28), "shadow-worse"),
    "other manifest": (
        changed(replace_text("manifest.json", '"num_differing":45', '"num_differing":9')),
        "broken-seal",
    ),
    "edited answers": (changed(replace_text(ANSWERS, '"b"', '"a"')), "damaged-artifact"),
    "edited answers, sealed again": (
        changed(lambda folder: edit(lambda lines: [line.update(challenger="a") for line in lines], folder)),
        "shadow-inconsistent",
    ),
    "edited interval, sealed again": (
        changed(lambda folder: reseal(folder, lambda manifest: manifest["comparison"].update(high_pct=1.0))),
        "shadow-differs",
    ),
    "no answers": (changed(lambda folder: replace_file(folder, ANSWERS, b"[" * 100_000)), "shadow-inconsistent"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_records_without_a_policy(name: str, tmp_path: Path) -> None:
    attack, code = ATTACKS[name]
    attack(tmp_path / "shadow")
    with refuses(code) if code else nullcontext():
        required(tmp_path / "shadow")


def test_records_with_a_policy(machine: Machine, tmp_path: Path) -> None:
    """A record that is forged whole has a seal and numbers that fit: the signature stops it."""
    machine.policy(ci={"signs": ["shadow"]})
    keys = {name: signing_key(machine.key(name)) for name in ("ci", "board", "stranger")}
    good = answers(1000, 9)
    record(tmp_path / "signed", good, keys["ci"])
    required(tmp_path / "signed")
    record(tmp_path / "unsigned", good)
    with refuses("no-shadow"):
        required(tmp_path / "unsigned")
    for name, code in (("stranger", "key-unknown"), ("board", "key-without-right")):
        record(tmp_path / name, good, keys[name])
        with refuses(code):
            required(tmp_path / name)
    # The signature of a record lies with another one: of later, or of other answers.
    shutil.copy(tmp_path / "signed" / SHADOW, tmp_path / "unsigned")
    with refuses("statement-other-digest"):
        required(tmp_path / "unsigned")
    forged = shutil.copytree(tmp_path / "signed", tmp_path / "forged")
    reseal(forged, lambda manifest: manifest.update(ended=datetime.now(UTC).isoformat()))
    with refuses("statement-other-digest"):
        required(forged)
    # A statement on the record alone, or of another kind.
    old = record(tmp_path / "old", good)
    (tmp_path / "old" / SHADOW).write_bytes(sign_shadow({"shadow": old}, keys["ci"]))
    with refuses("statement-other-digest"):
        required(tmp_path / "old")
    machine.policy(ci={"signs": ["shadow"]}, expires="2001-01-01")
    with refuses("key-expired"):
        required(tmp_path / "signed")


def test_a_key_signs_no_record_again_that_the_policy_refuses(machine: Machine, tmp_path: Path) -> None:
    machine.policy(ci={"signs": ["shadow"]})
    (tmp_path / "labels.csv").write_text("r0,a")
    record(tmp_path / "forged", answers(1000, 9))
    record(tmp_path / "signed", answers(1000, 9), signing_key(machine.key("ci")))
    labelled = ("--labels", tmp_path / "labels.csv", "--key", machine.key("ci"), "--output", tmp_path / "judged")
    with refuses("no-shadow"):
        enginery("shadow", tmp_path / "forged", *labelled)
    enginery("shadow", tmp_path / "signed", *labelled)
    required(tmp_path / "judged")


@pytest.mark.parametrize(
    ("changes", "rows"),
    [({}, "r1,a\nr0,b\nr1,b\n"), ({"id": "r1"}, "r1,a\n")],
    ids=["two classes for an image", "two images of an id"],
)
def test_labels_that_may_be_of_another_image(changes: dict[str, str], rows: str, tmp_path: Path) -> None:
    first, *others = answers(10, 2)
    record(tmp_path / "shadow", [first.model_copy(update=changes), *others])
    (tmp_path / "labels.csv").write_text(rows)
    with refuses("label-ambiguous", "--labels"):
        enginery("shadow", tmp_path / "shadow", "--labels", tmp_path / "labels.csv", "--output", tmp_path / "judged")
    assert not (tmp_path / "judged").exists()


def test_deploy_asks_for_it(checkout: Path, three: str, tmp_path: Path) -> None:
    digests = [digest_file(exported(f"m/{version}") / "manifest.json") for version in "123"]
    with refuses("no-champion", "--require-shadow"):
        deploy("staging", "m/1", "--require-shadow")
    deploy("staging", "m/1")
    with refuses("no-manifest"):
        deploy("staging", "m/2", "--require-shadow")
    with refuses("conflicting-options", "--require-shadow"):  # what stands behind it is its folder
        enginery("deploy", "--env", "staging", "--require-shadow", "m/2")
    with refuses("conflicting-options", "--require-shadow"):
        enginery("deploy", "--env", "staging", "--rollback", "--require-shadow")
    record(Path("shadow"), answers(200, 1), champion=digests[0], challenger=digests[1])
    with refuses("shadow-too-few"):
        deploy("staging", "m/2", "--require-shadow")
    with refuses("shadow-other-challenger"):
        deploy("staging", "m/3", "--require-shadow", "--shadow-requests", "200")
    assert pins("staging").version == "1"
    assert "Shadow" not in git("log", "-1", "--format=%B")
    deploy("staging", "m/2", "--require-shadow", "--shadow-requests", "200")
    assert pins("staging").version == "2"
    assert f"Shadow {digest_file(Path('shadow/manifest.json'))}, 200 images" in git("log", "-1", "--format=%B")
    assert "nothing to commit" in deploy("staging", "m/2", "--require-shadow").output
    target = environments(Path("helm/environments"))["staging"]
    target.write(replace(target.read(), serving=False))  # then the same repository is a first one again
    git("commit", "-qam", "off")
    with refuses("no-champion"):
        deploy("staging", "m/2", "--require-shadow")
    deploy("staging", "m/2")
    with refuses("shadow-other-champion"):  # it was the champion then
        deploy("staging", "m/1", "--require-shadow", "--shadow-requests", "200")
    with refuses("no-champion"):
        enginery("deploy", "--env", "prod", "--from", "staging", "--require-shadow=shadow")
    deploy("prod", "m/1")
    enginery("deploy", "--env", "prod", "--from", "staging", "--require-shadow=shadow", "--shadow-requests", "200")
    assert pins("prod").version == "2"
