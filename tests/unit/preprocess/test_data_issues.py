"""Issues that `IssueFinder` finds in listings, and its memory for large ones."""

import hashlib
import json
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.common.dataset.data_issues import Issue, IssueFinder, Issues, listed_paths

CLASSES = ("cat", "dog", "owl")
Entry = dict[str, Any]


def image(content: object, label: int = 0, height: int = 300, width: int = 400) -> Entry:
    digest = hashlib.sha256(str(content).encode()).hexdigest()
    return {"label": label, "height": height, "width": width, "sha256": digest}


def one_of_each(prefix: str) -> list[Entry]:
    """An image of each class, none like another."""
    return [image(f"{prefix}{label}", label) for label in range(len(CLASSES))]


TRAIN, VAL = one_of_each("t"), one_of_each("v")


def names(split: str, positions: Sequence[int]) -> list[str]:
    return [f"{split}/{position}.jpg" for position in positions]


def finder(train: Iterable[Entry], val: Iterable[Entry], classes: Sequence[str] = CLASSES) -> IssueFinder:
    found = IssueFinder(classes)
    found.add("train", train)
    found.add("val", val)
    return found


def find(train: Sequence[Entry], val: Sequence[Entry] = VAL, classes: Sequence[str] = CLASSES) -> dict[str, Issue]:
    return {issue.kind: issue for issue in finder(train, val, classes).issues(names).found}


def paths(issue: Issue) -> list[list[str]]:
    return [[image.path for image in group.images] for group in issue.groups]


def test_a_clean_set_has_no_issue() -> None:
    issues = finder(TRAIN, VAL).issues(names)
    assert (issues.found, issues.lines(), issues.leak_message()) == ((), [], "")


def test_copies_within_a_split() -> None:
    train = [*TRAIN, image("twice"), image("thrice"), image("twice"), image("thrice"), image("thrice")]
    found = find(train, [*VAL, image("v1", 1)])
    assert list(found) == ["train", "val"]
    assert paths(found["train"]) == [["train/4.jpg", "train/6.jpg", "train/7.jpg"], ["train/3.jpg", "train/5.jpg"]]
    assert paths(found["val"]) == [["val/1.jpg", "val/3.jpg"]]
    assert found["train"].line.startswith("3 of 8 training images are copies of others there, such as train/6.jpg of")
    assert found["val"].line.startswith("1 of 4 validation images is a copy of another there, such as val/3.jpg of val")


def test_a_leak() -> None:
    issues = finder([*TRAIN, image("both")], [image("both"), *VAL, image("t2", 2)]).issues(names)
    (leak,) = issues.found
    assert (leak.kind, paths(leak)) == ("leak", [["train/2.jpg", "val/4.jpg"], ["train/3.jpg", "val/0.jpg"]])
    assert leak.line.startswith("2 of 5 validation images are training images too, such as val/4.jpg, which is the")
    assert issues.leak_message().startswith(leak.line)
    assert "--set preprocess.on_leak=warn" in issues.leak_message()


@pytest.mark.parametrize(("other", "also"), [("train", "train"), ("val", "leak")])
def test_contradicting_labels(other: str, also: str) -> None:
    odd = image("t0", 1)
    found = find([*TRAIN, odd] if other == "train" else TRAIN, [*VAL, odd] if other == "val" else VAL)
    assert set(found) == {"conflict", also}  # the same pair is a leak or a copy too
    (group,) = found["conflict"].groups
    assert [(one.path, one.class_name) for one in group.images] == [("train/0.jpg", "cat"), (f"{other}/3.jpg", "dog")]
    assert found["conflict"].line.startswith("2 images have the same content")
    assert f"train/0.jpg ('cat') and {other}/3.jpg ('dog')" in found["conflict"].line


@pytest.mark.parametrize(
    ("train", "val", "kind", "shown"),
    [
        # Of a content in all places, one of each split and label is shown.
        ([0] * 30 + [2], [1], "conflict", {("train", "cat"), ("train", "owl"), ("val", "dog")}),
        ([0] * 30 + [2], [1], "train", {("train", "cat"), ("train", "owl")}),
        ([0] * 30, [0, 0], "leak", {("train", "cat"), ("val", "cat")}),
        (list(range(8)), [8], "leak", {("val", "8"), ("train", "cat")}),
    ],
)
def test_examples_of_splits_and_labels(
    train: list[int], val: list[int], kind: str, shown: set[tuple[str, str]]
) -> None:
    classes = (*CLASSES, *map(str, range(3, 9)))
    found = find([image("many", label) for label in train], [image("many", label) for label in val], classes)
    (group,) = found[kind].groups
    assert group.num_images == len(train) + (len(val) if kind != "train" else 0)
    assert len(group.images) == 6
    assert {(one.split, one.class_name) for one in group.images} >= shown


def test_digests_that_agree_in_part_are_different() -> None:
    first, second = ({**image(0), "sha256": "ab" * 8 + end * 24} for end in ("00", "11"))
    assert find([*TRAIN, first, second]) == {}
    found = find([*TRAIN, first, second, first, second])
    assert paths(found["train"]) == [["train/3.jpg", "train/5.jpg"], ["train/4.jpg", "train/6.jpg"]]


def test_at_most_twenty_examples_the_largest_first() -> None:
    train = [image(f"pair {number}") for number in range(50) for _ in range(2)] + [image("pair 49")]
    found = find([*train, *TRAIN])["train"]
    assert found.line.startswith("51 of 104 ")
    assert (len(found.groups), found.groups[0].num_images, paths(found)[1]) == (20, 3, ["train/0.jpg", "train/1.jpg"])


@pytest.mark.parametrize(("num_cats", "is_issue"), [(20, False), (21, True)])
def test_imbalance_above_ten(num_cats: int, is_issue: bool) -> None:
    dogs = [image(f"dog {number}", 1) for number in range(2)]
    found = find([*dogs, *map(image, range(num_cats))])
    assert ("imbalance" in found) == is_issue
    if is_issue:
        assert "'cat' has 10.5 times as many training images as 'dog' (21 and 2)" in found["imbalance"].line


def test_classes_without_images() -> None:
    found = find(TRAIN[:2], VAL[:1])
    assert "training split has no image of 1 of 3 classes, such as 'owl'" in found["no_train"].line
    assert "validation split has no image of 2 of 3 classes, such as 'dog'" in found["no_val"].line
    assert "void" not in found["no_val"].line
    for share in (1.0, 0.9):
        masked = find([{**entry, "shares": [[0, share]]} for entry in TRAIN[:2]])
        hint = "see that none of them is 255 in the masks, which is void"
        assert masked["no_train"].line.endswith(hint) == (share < 1)


def test_odd_sizes() -> None:
    usual = [image(number, number % 3, 300 + number, 400) for number in range(40)]
    sides = [(24, 20), (16, 16), (3000, 3000), (4000, 5000), (300, 1501)]
    odd = [image(f"odd {side}", 0, *side) for side in sides]
    found = find([*usual, *odd])["sizes"]
    assert [(one.path, one.height, one.width) for one in found.images] == [
        *[("train/41.jpg", 16, 16), ("train/40.jpg", 24, 20)],
        *[("train/43.jpg", 4000, 5000), ("train/42.jpg", 3000, 3000), ("train/44.jpg", 300, 1501)],
    ]
    assert "2 have a shorter side below" in found.line
    assert "train/43.jpg (5000 x 4000)" in found.line
    assert "1 has a longer side of more than 5 times the shorter" in found.line


@pytest.mark.parametrize(
    ("usual", "side", "is_odd"),
    [
        *[([100] * 30, 25, False), ([100] * 30, 24, True), ([100] * 30, 400, False), ([100] * 30, 401, True)],
        (np.geomspace(30, 3000, 60).round().astype(int).tolist(), 3000, False),  # a hundred times from end to end
    ],
)
def test_a_size_is_odd_beyond_the_fences_and_a_factor_of_four(usual: list[int], side: int, is_odd: bool) -> None:
    train = [image(number, number % 3, side, side) for number, side in enumerate([*usual, side])]
    assert ("sizes" in find(train, [image("v", 0, usual[0], usual[0])], ("a", "b", "c"))) == is_odd


def test_adding_in_parts_is_adding_at_once() -> None:
    train, val = [*TRAIN, image("t1", 1)], [*VAL, image("t0")]
    parts = IssueFinder(CLASSES)
    parts.add("train", train[:2])
    parts.add("val", val[:1])
    parts.add("train", train[2:])
    parts.add("val", val[1:])
    assert parts.issues(names) == finder(train, val).issues(names)
    assert (parts.labels("train").tolist(), parts.labels("val").tolist()) == ([0, 1, 2, 1], [0, 1, 2, 0])


def test_the_histogram_counts_every_image_in_its_bar() -> None:
    sides = np.random.default_rng(0).integers(1, 5000, 500).tolist()
    train, val = (
        [image(side, 0, side, 6000) for side in sides[:300]],
        [image(side, 0, 6000, side) for side in sides[300:]],
    )
    histogram = finder(train, val).side_histogram()
    assert len(histogram.edges) == len(histogram.counts) + 1 <= 40
    for count, low, high in zip(histogram.counts, histogram.edges, histogram.edges[1:], strict=False):
        assert count == sum(low <= side < high for side in sides)
    assert sum(histogram.counts) == 500
    assert finder(TRAIN, VAL).side_histogram().counts == (6,)


def test_paths_come_from_the_listing_and_are_printable(tmp_path: Path) -> None:
    listed = {"train": ["a.jpg", "b\udce9.jpg", "c\nd\x1b[31m.jpg"], "val": ["e.jpg", "große/猫.jpg"]}
    for split, own in listed.items():
        text = "".join(json.dumps({"path": path}, ensure_ascii=False) + "\n" for path in own)
        (tmp_path / f"{split}.jsonl").write_bytes(text.encode(errors="backslashreplace"))
    entries = [image("other"), image("same"), image("same")], [image("third"), image("same", 1)]
    issues: Issues = finder(*entries).issues(listed_paths(tmp_path))
    assert paths(issues.found[0]) == [["b\\udce9.jpg", "c\\nd\\x1b[31m.jpg", "große/猫.jpg"]]
    assert all(line.isprintable() for line in issues.lines())


def _many(split: str, num_images: int) -> Iterator[Entry]:
    """Every hundredth content is the same in both splits."""
    sides = np.random.default_rng(0).integers(200, 600, (num_images, 2)).tolist()
    for number, side in enumerate(sides):
        yield image(number if number % 100 == 0 else f"{split} {number}", number % 3, *side)


def test_many_images_in_little_memory() -> None:
    num_images = 22_000
    tracemalloc.start()
    large = finder(_many("train", 20_000), _many("val", 2_000))
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    issues = large.issues(names)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert issues.found[0].line.startswith("20 of 2,000 validation images")
    assert kept_bytes < 40 * num_images
    assert peak_bytes < 90 * num_images
