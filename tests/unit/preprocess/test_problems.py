"""What `ProblemFinder` finds in listings made by hand, and what it needs for large ones."""

import hashlib
import json
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.preprocess.data_issues import ProblemFinder, Problems, listed_paths, printable

CLASSES = ("cat", "dog", "owl")
Entry = dict[str, Any]


def image(content: object, label: int = 0, height: int = 300, width: int = 400) -> Entry:
    digest = hashlib.sha256(str(content).encode()).hexdigest()
    return {"key": "000000000", "path": "", "label": label, "height": height, "width": width, "sha256": digest}


def names(split: str, positions: Sequence[int]) -> list[str]:
    return [f"{split}/{position}.jpg" for position in positions]


def find(train: Sequence[Entry], val: Sequence[Entry] = (), classes: Sequence[str] = CLASSES) -> Problems:
    finder = ProblemFinder(classes)
    finder.add("train", train)
    finder.add("val", val)
    return finder.problems(names)


def one_of_each(prefix: str) -> list[Entry]:
    """An image of each class, none like another."""
    return [image(f"{prefix}{label}", label) for label in range(len(CLASSES))]


def paths(found: Any) -> list[list[str]]:
    return [[entry.path for entry in example.images] for example in found.examples]


def test_a_clean_set_has_no_problem() -> None:
    problems = find(one_of_each("t"), one_of_each("v"))
    assert problems.lines() == []
    assert problems.leak_message() == ""
    assert problems.num_images == {"train": 3, "val": 3}


def test_copies_within_a_split() -> None:
    train = [*one_of_each("t"), image("twice"), image("thrice"), image("twice"), image("thrice"), image("thrice")]
    problems = find(train, [*one_of_each("v"), image("v1", 1)])
    found = problems.duplicates["train"]
    assert (found.num_contents, found.num_train_images, found.num_val_images) == (2, 5, 0)
    assert paths(found) == [["train/4.jpg", "train/6.jpg", "train/7.jpg"], ["train/3.jpg", "train/5.jpg"]]
    assert paths(problems.duplicates["val"]) == [["val/1.jpg", "val/3.jpg"]]
    training, validation = problems.lines()
    assert training.startswith("3 of 8 training images are copies of others there, such as train/6.jpg of train/4.jpg")
    assert validation.startswith("1 of 4 validation images is a copy of another there, such as val/3.jpg of val/1.jpg")
    assert problems.leak_message() == ""


def test_a_leak() -> None:
    problems = find([*one_of_each("t"), image("both")], [image("both"), *one_of_each("v"), image("t2", 2)])
    found = problems.leaks
    assert (found.num_contents, found.num_train_images, found.num_val_images) == (2, 2, 2)
    assert paths(found) == [["train/2.jpg", "val/4.jpg"], ["train/3.jpg", "val/0.jpg"]]
    assert [line[:44] for line in problems.lines()] == ["2 of 5 validation images are training images"]
    message = problems.leak_message()
    assert "val/4.jpg, which is the same file as train/2.jpg" in message
    assert "--set preprocess.on_leak=warn (python -m components.preprocess: --on-leak warn)" in message
    assert problems.duplicates["train"].num_contents == problems.conflicts.num_contents == 0


@pytest.mark.parametrize("other", ["train", "val"])
def test_contradicting_labels(other: str) -> None:
    odd = image("t0", 1)
    problems = find(
        [*one_of_each("t"), *([odd] if other == "train" else [])], [*one_of_each("v"), odd][: 3 + (other == "val")]
    )
    found = problems.conflicts
    assert found.num_contents == 1
    assert found.num_train_images + found.num_val_images == 2
    assert [(entry.path, entry.class_name) for entry in found.examples[0].images] == [
        ("train/0.jpg", "cat"),
        (f"{other}/3.jpg", "dog"),
    ]
    line = next(line for line in problems.lines() if "another class" in line)
    assert f"train/0.jpg ('cat') and {other}/3.jpg ('dog')" in line
    # The same pair is a leak or a duplicate too.
    assert problems.leaks.num_contents == (other == "val")
    assert problems.duplicates["train"].num_contents == (other == "train")


def test_a_content_in_all_places_shows_each_split_and_label() -> None:
    train = [*one_of_each("t"), *(image("many", 0) for _ in range(30)), image("many", 2)]
    problems = find(train, [*one_of_each("v"), image("many", 1)])
    (example,) = problems.conflicts.examples
    assert example.num_images == 32
    assert len(example.images) == 6
    assert {(entry.split, entry.class_name) for entry in example.images} == {
        ("train", "cat"),
        ("train", "owl"),
        ("val", "dog"),
    }
    (copies,) = problems.duplicates["train"].examples
    assert copies.num_images == 31
    assert {entry.split for entry in copies.images} == {"train"}


def test_a_leak_of_a_content_with_many_labels_shows_both_splits() -> None:
    classes = [f"class {label}" for label in range(9)]
    problems = find([image("many", label) for label in range(8)], [image("many", 8)], classes)
    assert "val/0.jpg, which is the same file as train/0.jpg" in problems.leak_message()
    assert len(problems.leaks.examples[0].images) == 6


def test_digests_that_agree_in_part_are_different() -> None:
    first = {**image("a"), "sha256": "ab" * 8 + "00" * 24}
    second = {**image("b"), "sha256": "ab" * 8 + "11" * 24}
    assert find([*one_of_each("t"), first, second], one_of_each("v")).lines() == []
    found = find([*one_of_each("t"), first, second, first, second], one_of_each("v")).duplicates["train"]
    assert paths(found) == [["train/3.jpg", "train/5.jpg"], ["train/4.jpg", "train/6.jpg"]]


def test_a_leak_of_many_copies_shows_both_splits() -> None:
    train = [*one_of_each("t"), *(image("many") for _ in range(30))]
    problems = find(train, [*one_of_each("v"), image("many"), image("many")])
    (example,) = problems.leaks.examples
    assert example.num_images == 32
    assert [entry.split for entry in example.images] == ["train"] * 5 + ["val"]
    found = problems.duplicates["val"]
    assert (found.num_contents, found.num_train_images, found.num_val_images) == (1, 0, 2)
    assert paths(found) == [["val/3.jpg", "val/4.jpg"]]


def test_at_most_twenty_examples_the_largest_first() -> None:
    train = [image(f"pair {number}") for number in range(50) for _ in range(2)] + [image("pair 49")]
    found = find([*train, *one_of_each("t")], one_of_each("v")).duplicates["train"]
    assert (found.num_contents, found.num_train_images, len(found.examples)) == (50, 101, 20)
    assert found.examples[0].num_images == 3
    assert paths(found)[1] == ["train/0.jpg", "train/1.jpg"]


@pytest.mark.parametrize(("num_cats", "is_problem"), [(20, False), (21, True)])
def test_imbalance_above_ten(num_cats: int, is_problem: bool) -> None:
    dogs = [image(f"dog {number}", 1) for number in range(2)]
    problems = find([*dogs, *(image(number) for number in range(num_cats))], one_of_each("v"), ("cat", "dog", "owl"))
    found = problems.imbalance
    assert found is not None
    assert (found.largest, found.num_largest, found.smallest, found.num_smallest) == ("cat", num_cats, "dog", 2)
    assert found.is_problem == is_problem
    assert [line for line in problems.lines() if "uneven" in line and "10.5 times" in line and "'dog'" in line] == (
        [problems.imbalance_line()] if is_problem else []
    )


def test_empty_classes_of_each_split() -> None:
    problems = find(one_of_each("t")[:2], one_of_each("v")[:1])
    assert problems.empty_classes["train"].names == ("owl",)
    assert problems.empty_classes["val"].names == ("dog", "owl")
    training, validation = problems.lines()
    assert "training split has no image of 1 of 3 classes, such as 'owl'" in training
    assert "validation split has no image of 2 of 3 classes, such as 'dog'" in validation


def test_many_empty_classes_are_counted_and_few_named() -> None:
    found = find(one_of_each("t"), one_of_each("v"), [f"class {number}" for number in range(1000)]).empty_classes
    assert (found["train"].num_classes, len(found["train"].names)) == (997, 20)


def test_odd_sizes() -> None:
    usual = [image(number, number % 3, 300 + number, 400) for number in range(40)]
    odd = [
        image("thumb", 0, 24, 20),
        image("icon", 0, 16, 16),
        image("photo", 0, 3000, 3000),
        image("scan", 0, 4000, 5000),
        image("strip", 0, 300, 1501),
    ]
    sizes = find([*usual, *odd], one_of_each("v")).odd_sizes
    assert sizes is not None
    shown = {
        kind: [(found.path, found.width, found.height) for found in getattr(sizes, kind).examples]
        for kind in ("small", "large", "elongated")
    }
    assert shown == {
        "small": [("train/41.jpg", 16, 16), ("train/40.jpg", 20, 24)],
        "large": [("train/43.jpg", 5000, 4000), ("train/42.jpg", 3000, 3000)],
        "elongated": [("train/44.jpg", 1501, 300)],
    }
    line = find([*usual, *odd], one_of_each("v")).size_line()
    assert "2 have a shorter side below" in line
    assert "train/43.jpg (5000 x 4000)" in line
    assert "1 has a longer side of more than 5 times the shorter" in line


@pytest.mark.parametrize(("side", "is_odd"), [(25, False), (24, True), (400, False), (401, True)])
def test_in_a_set_of_one_size_a_factor_of_four_is_usual(side: int, is_odd: bool) -> None:
    problems = find([*(image(number, number % 3, 100, 100) for number in range(30)), image("odd", 0, side, side)])
    assert bool(problems.size_line()) == is_odd


def test_in_a_set_of_all_sizes_none_is_odd() -> None:
    sides = np.geomspace(30, 3000, 60).round().astype(int).tolist()  # a hundred times from end to end
    assert find([image(side, number % 3, side, side) for number, side in enumerate(sides)]).size_line() == ""


def test_nothing_added() -> None:
    finder = ProblemFinder(CLASSES)
    problems = finder.problems(names)
    assert problems.imbalance is None
    assert problems.odd_sizes is None
    assert problems.empty_classes["train"].num_classes == 3
    assert finder.side_histogram().counts == ()


def test_adding_in_parts_is_adding_at_once() -> None:
    train, val = [*one_of_each("t"), image("t1", 1)], [*one_of_each("v"), image("t0")]
    finder = ProblemFinder(CLASSES)
    for split, entries in (("train", train[:2]), ("val", val[:1]), ("train", train[2:]), ("val", val[1:])):
        finder.add(split, entries)  # type: ignore[arg-type]
    assert finder.problems(names) == find(train, val)
    assert finder.labels("train").tolist() == [0, 1, 2, 1]
    assert finder.labels("val").tolist() == [0, 1, 2, 0]


def test_the_histogram_counts_every_image_in_its_bar() -> None:
    sides = np.random.default_rng(0).integers(1, 5000, 500).tolist()
    finder = ProblemFinder(CLASSES)
    finder.add("train", [image(side, 0, side, 6000) for side in sides[:300]])
    finder.add("val", [image(side, 0, 6000, side) for side in sides[300:]])
    histogram = finder.side_histogram()
    assert len(histogram.edges) == len(histogram.counts) + 1 <= 40
    for index, count in enumerate(histogram.counts):
        assert count == sum(histogram.edges[index] <= side < histogram.edges[index + 1] for side in sides)
    assert sum(histogram.counts) == 500


def test_the_histogram_of_one_size_is_one_bar() -> None:
    finder = ProblemFinder(CLASSES)
    finder.add("train", one_of_each("t"))
    histogram = finder.side_histogram()
    assert histogram.counts == (3,)
    assert histogram.edges[0] <= 300 < histogram.edges[1]


def test_paths_come_from_the_listing(tmp_path: Path) -> None:
    listed = {"train": ["a.jpg", "b\udce9.jpg", "c\nd.jpg"], "val": ["e.jpg", "f.jpg"]}
    for split, own in listed.items():
        text = "".join(json.dumps({"path": path}, ensure_ascii=False) + "\n" for path in own)
        (tmp_path / f"{split}.jsonl").write_bytes(text.encode(errors="backslashreplace"))
    lookup = listed_paths(tmp_path)
    assert lookup("train", [0, 2]) == ["a.jpg", "c\nd.jpg"]
    finder = ProblemFinder(CLASSES)
    finder.add("train", [image("other"), image("same"), image("same")])
    finder.add("val", [image("third"), image("same", 1)])
    problems = finder.problems(lookup)
    assert paths(problems.leaks) == [["b\\udce9.jpg", "c\\nd.jpg", "f.jpg"]]
    assert Problems.model_validate_json(problems.model_dump_json()) == problems
    assert all(line.isprintable() for line in problems.lines())


def test_what_is_printable_stays() -> None:
    assert printable("große/猫.jpg") == "große/猫.jpg"
    assert printable("a\udce9\x1b[31m") == "a\\udce9\\x1b[31m"


def _many(split: str, num_images: int) -> Iterator[Entry]:
    """Every hundredth content is the same in both splits."""
    generator = np.random.default_rng(0)
    heights, widths = generator.integers(200, 600, (2, num_images)).tolist()
    for number in range(num_images):
        content = number if number % 100 == 0 else f"{split} {number}"
        yield image(content, number % 3, heights[number], widths[number])


def test_many_images_in_little_memory() -> None:
    num_train, num_val = 20_000, 2_000
    finder = ProblemFinder(CLASSES)
    tracemalloc.start()
    finder.add("train", _many("train", num_train))
    finder.add("val", _many("val", num_val))
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    problems = finder.problems(names)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert problems.leaks.num_val_images == num_val / 100
    assert kept_bytes < 40 * (num_train + num_val)
    assert peak_bytes < 90 * (num_train + num_val)
