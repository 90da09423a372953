"""data_card.html: what it says, that it can't be broken by names, and how large it gets."""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from wds2idx import IndexCreator

from components.common.contracts.records import DatasetStatistics, Split
from components.common.data.image_files import encode_image, thumbnail
from components.common.dataset.data_card import (
    Card,
    Rejections,
    Thumbnail,
    read_thumbnails,
    sample_positions,
    side_chart,
    write_data_card,
)
from components.common.dataset.data_issues import SPLITS, IssueFinder, SideHistogram

from .builders import member, write_tar

DIGESTS = {"train": "sha256:" + "1a" * 32, "val": "sha256:" + "2b" * 32}
Entry = dict[str, Any]


def entries(split: str, labels: Sequence[int]) -> list[Entry]:
    return [
        {"label": label, "height": 300, "width": 400, "sha256": hashlib.sha256(f"{split}{index}".encode()).hexdigest()}
        for index, label in enumerate(labels)
    ]


def noise(height: int, width: int, image_format: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encode_image(Image.fromarray(pixels), image_format)


def card(
    classes: Sequence[str],
    train: Sequence[Entry],
    val: Sequence[Entry],
    path: Callable[[str, int], str] = lambda split, position: f"{split}/{position}.jpg",
    **changes: Any,
) -> Card:
    finder = IssueFinder(classes)
    finder.add("train", train)
    finder.add("val", val)
    counts = {split: np.bincount(finder.labels(split), minlength=len(classes)).tolist() for split in SPLITS}
    splits = {
        split: Split(num_images=sum(own), shards=(), class_counts=tuple(own), digest=DIGESTS[split])
        for split, own in counts.items()
    }
    parts: dict[str, Any] = {
        "source": "/data/pets",
        "statistics": DatasetStatistics(
            mean=(0.4815, 0.4578, 0.4082), std=(0.2686, 0.2613, 0.2758), min_side=120, median_side=300, max_side=900
        ),
        "rejections": Rejections.of([]),
        "thumbnails": (),
        "config": {"seed": 7, "val_fraction": 0.2},
    }
    issues = finder.issues(lambda split, positions: [path(split, position) for position in positions])
    return Card(classes=classes, splits=splits, sides=finder.side_histogram(), issues=issues, **{**parts, **changes})


class Page(HTMLParser):
    """The elements and the text of a page, as a browser would take it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def num(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def written(folder: Path, what: Card) -> Page:
    first = write_data_card(what, folder).read_bytes()
    assert write_data_card(what, folder).read_bytes() == first
    return Page((folder / "data_card.html").read_text(encoding="utf-8"))


def test_what_a_card_of_a_clean_set_says(tmp_path: Path) -> None:
    what = card(("cat", "dog"), entries("train", [0] * 1200 + [1] * 900), entries("val", [0, 0, 1]))
    page = written(tmp_path, what)
    for text in (
        *("/data/pets", "2,100 training images", "3 validation images", "0 rejected files", "Problems None found."),
        *("cat 1,200 2", "dog 900 1", "shorter side is 120 to 900 px, half of the images have 300 px or less"),
        *("mean 0.4815 0.4578 0.4082", "standard deviation 0.2686 0.2613 0.2758", "Rejected files None"),
        *DIGESTS.values(),
        "seed 7",
    ):
        assert text in page.text


def test_issues_come_with_sentence_and_evidence(tmp_path: Path) -> None:
    train, val = entries("train", [0] * 33 + [1] * 3), entries("val", [0, 1, 0])
    val[1] = {**train[2], "label": 1}
    train += [train[0]] * 8
    train.append({**train[5], "height": 20, "width": 30, "sha256": "00" * 32})
    what = card(("cat", "dog", "owl"), train, val)
    page = written(tmp_path, what)
    assert [issue.kind for issue in what.issues.found] == [
        *("leak", "conflict", "train", "imbalance", "no_train", "no_val", "sizes")
    ]
    for text in (
        *(f"{line[0].upper()}{line[1:]}." for line in what.issues.lines()),
        *("val/1.jpg validation, dog", "train/36.jpg training, cat", "and 3 more", "7 kinds of problems"),
        "train/44.jpg training, cat, 30 \N{MULTIPLICATION SIGN} 20 px",
    ):
        assert text in page.text
    assert "None found" not in page.text


def test_rejected_files_by_kind_and_the_first_fifty(tmp_path: Path) -> None:
    reasons = ["damaged: image file is truncated (3 bytes)", "damaged: broken data stream", "empty file"]
    reasons += ["not an image; convert it to JPEG or PNG", "9000x8000 has more than max_pixels = 5 pixels"]
    rejections = Rejections.of({"path": f"bad/{index}.jpg", "reason": reasons[index % 5]} for index in range(100))
    assert (rejections.num_files, rejections.by_kind) == (
        100,
        {"damaged": 40, "empty file": 20, "not an image": 20, "more than max_pixels = 5 pixels": 20},
    )
    page = written(tmp_path, card(("a", "b"), entries("t", [0, 1]), entries("v", [0, 1]), rejections=rejections))
    assert "bad/49.jpg 9000x8000 has more" in page.text
    assert "bad/50.jpg" not in page.text
    assert "The first 50 of 100" in page.text


def test_names_are_text_and_nothing_else_and_the_page_needs_no_network(tmp_path: Path) -> None:
    evil = "</style><script>alert('x')</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}"
    train = entries("train", [0, 1, 0])
    what = card(
        (evil, "cat"),
        [*train, train[0]],
        [{**train[1], "label": 0}, *entries("val", [0])],
        path=lambda split, position: f"{evil}/{position}\udce9\n.jpg",
        source=f"/data/{evil}",
        rejections=Rejections.of([{"path": f"{evil}\udcff.jpg", "reason": f"damaged: {evil}"}]),
        thumbnails=(Thumbnail(path=f"{evil}\udce9.jpg", label=0, data=noise(50, 60)),),
        config={"data": f"/data/{evil}\udce9"},
    )
    page = written(tmp_path, what)
    assert [page.num(tag) for tag in ("script", "img", "style")] == [0, 1, 1]
    attributes = [(name, value or "") for _, own in page.elements for name, value in own.items()]
    assert not any(name.startswith("on") for name, _ in attributes)
    (link,) = [value for name, value in attributes if name in ("src", "href")]
    assert link.startswith("data:image/jpeg;base64,")
    assert "default-src 'none'" in (tmp_path / "data_card.html").read_text()
    assert page.text.count(evil) > 8
    assert "\\udce9" in page.text
    assert "\\udcff.jpg" in page.text
    assert "49" not in page.text


@pytest.mark.parametrize(("num_classes", "is_folded"), [(30, False), (31, True)])
def test_many_classes_are_folded(tmp_path: Path, num_classes: int, is_folded: bool) -> None:
    labels = [label for label in range(num_classes) for _ in range(label + 5)]
    names = [f"name{number}." for number in range(num_classes)]
    page = written(tmp_path, card(names, entries("t", labels), entries("v", labels)))
    assert ("The 10 largest and the 10 smallest of 31" in page.text) == is_folded
    assert ("All 31 classes" in page.text) == is_folded
    # In the middle, once; the largest, in the table and in the folded list.
    assert page.text.count("name15. 20 20") == 1
    assert page.text.count(f"name{num_classes - 1}. {num_classes + 4}") == 1 + is_folded


def test_a_large_card_stays_below_a_megabyte(tmp_path: Path) -> None:
    num_classes, long = 1000, "folder/" * 500
    labels = [label for label in range(num_classes) for _ in range(3)]
    train, val = entries("train", labels), entries("val", labels)
    train += [{**entry, "label": (entry["label"] + 1) % num_classes} for entry in train]
    val[:1000] = [{**entry, "height": 3} for entry in train[:1000]]
    positions = sample_positions(np.repeat(np.arange(num_classes), 6), num_classes)
    image = Image.open(io.BytesIO(noise(112, 112)))  # what compresses worst
    data = thumbnail(image.convert("RGB"), max_side=112, exact_side=40)
    what = card(
        [f"n{label:08d} {'a long name, ' * 4}{label}" for label in range(num_classes)],
        train,
        val,
        path=lambda split, position: f"{long}{position}.jpg",
        rejections=Rejections.of({"path": f"{long}{n}", "reason": f"damaged: {long}"} for n in range(5000)),
        thumbnails=[Thumbnail(path=long, label=position // 6, data=data) for position in positions],
    )
    page = written(tmp_path, what)
    assert page.num("img") == len(positions) == 60
    assert "n00000999" in page.text
    assert (tmp_path / "data_card.html").stat().st_size < 1_000_000


def test_samples_are_spread_over_the_listing_and_over_the_largest_and_smallest_classes() -> None:
    positions = sample_positions(np.array([0] * 100 + [1] * 2 + [2] * 7), 4)
    assert positions[:8] == [0, 20, 40, 59, 79, 99, 100, 101]
    assert len(positions) == 14
    labels = np.repeat(np.arange(40), np.arange(40))  # class 0 is empty
    positions = sample_positions(labels, 40)
    assert sorted(set(labels[positions].tolist())) == [1, 2, 3, 4, 5, 35, 36, 37, 38, 39]
    assert len(positions) == 1 + 2 + 3 + 4 + 5 + 5 * 6


def test_thumbnails_are_read_from_the_shards(tmp_path: Path) -> None:
    files = [("jpg", noise(200, 400)), ("png", noise(20, 30, "PNG")), ("jpg", noise(90, 40)), ("jpg", b"no image")]
    listed = []
    for number in (0, 1):  # so the listing holds 0, 2, 1, 3
        own = list(enumerate(files))[number::2]
        members = [
            one
            for index, (suffix, data) in own
            for one in (member(f"{index:09d}.{suffix}", data), member(f"{index:09d}.cls", b"000001"))
        ]
        tar = write_tar(tmp_path / f"train-{number:06d}.tar", *members, form=tarfile.USTAR_FORMAT)
        with IndexCreator(str(tar), str(tar.with_suffix(".idx")), verbose=False) as index:
            index.create_index()
        listed += [{"key": f"{n:09d}", "path": f"{n}.{suffix}", "label": n % 2} for n, (suffix, _) in own]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in listed))
    found = read_thumbnails(tmp_path, "train", [0, 1, 2, 3])
    assert [(one.path, one.label) for one in found] == [("0.jpg", 0), ("2.jpg", 0), ("1.png", 1)]  # one is no image
    images = [Image.open(io.BytesIO(one.data)) for one in found]
    assert [image.size for image in images] == [(112, 56), (40, 90), (30, 20)]
    assert images[2].convert("RGB").tobytes() == Image.open(io.BytesIO(files[1][1])).convert("RGB").tobytes()


def test_the_chart_has_a_bar_for_each_count() -> None:
    svg = side_chart(SideHistogram(edges=(200, 256, 300, 362), counts=(10, 0, 1)))
    assert re.findall(r'<rect [^>]*height="([\d.]+)"', svg) == ["170.0", "17.0"]
    assert "200 to 255 px: 10 images" in svg
    assert "300 to 361 px: 1 image<" in svg
    assert side_chart(SideHistogram(edges=(200, 256), counts=(10,))) == ""
