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
from components.preprocess.data_card import (
    Card,
    Picture,
    Rejections,
    read_pictures,
    sample_positions,
    side_chart,
    thumbnail,
    write_data_card,
)
from components.preprocess.data_issues import SPLITS, ProblemFinder, SideHistogram

DIGESTS = {"train": "sha256:" + "1a" * 32, "val": "sha256:" + "2b" * 32}
Entry = dict[str, Any]


def listing(split: str, labels: Sequence[int], side: int = 300) -> list[Entry]:
    return [
        {"label": label, "height": side, "width": 400, "sha256": hashlib.sha256(f"{split}{index}".encode()).hexdigest()}
        for index, label in enumerate(labels)
    ]


def noise(height: int, width: int, image_format: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, image_format)
    return file.getvalue()


def card(
    classes: Sequence[str],
    train: Sequence[Entry],
    val: Sequence[Entry],
    path: Callable[[str, int], str] = lambda split, position: f"{split}/{position}.jpg",
    **changes: Any,
) -> Card:
    finder = ProblemFinder(classes)
    for split, entries in zip(SPLITS, (train, val), strict=True):
        finder.add(split, entries)
    counts = {split: np.bincount(finder.labels(split), minlength=len(classes)).tolist() for split in SPLITS}
    parts: dict[str, Any] = {
        "source": "/data/pets",
        "classes": classes,
        "splits": {
            split: Split(num_images=sum(own), shards=(), class_counts=tuple(own), digest=DIGESTS[split])
            for split, own in counts.items()
        },
        "statistics": DatasetStatistics(
            mean=(0.4815, 0.4578, 0.4082), std=(0.2686, 0.2613, 0.2758), min_side=120, median_side=300, max_side=900
        ),
        "sides": finder.side_histogram(),
        "rejections": Rejections.of([]),
        "problems": finder.problems(lambda split, positions: [path(split, position) for position in positions]),
        "pictures": (),
        "config": {"seed": 7, "val_fraction": 0.2},
    }
    return Card(**{**parts, **changes})


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
    path = write_data_card(what, folder)
    assert path == folder / "data_card.html"
    return Page(path.read_text(encoding="utf-8"))


def test_what_a_card_of_a_clean_set_says(tmp_path: Path) -> None:
    page = written(tmp_path, card(("cat", "dog"), listing("train", [0] * 1200 + [1] * 900), listing("val", [0, 0, 1])))
    for text in (
        "/data/pets",
        "2,100 training images",
        "3 validation images",
        "0 rejected files",
        "Problems None found.",
        "Near-duplicates, such as another size or crop of the same picture, are not looked for",
        "cat 1,200 2",
        "dog 900 1",
        "The shorter side is 120 to 900 px, half of the images have 300 px or less",
        "mean 0.4815 0.4578 0.4082",
        "standard deviation 0.2686 0.2613 0.2758",
        "Rejected files None",
        *DIGESTS.values(),
        "seed 7",
    ):
        assert text in page.text


def test_problems_come_with_sentence_and_evidence(tmp_path: Path) -> None:
    train, val = listing("train", [0] * 33 + [1] * 3), listing("val", [0, 1, 0])
    val[1] = {**train[2], "label": 1}
    train += [train[0]] * 8
    train.append({**train[5], "height": 20, "width": 30, "sha256": "00" * 32})
    what = card(("cat", "dog", "owl"), train, val)
    page = written(tmp_path, what)
    lines = what.problems.lines()
    assert len(lines) == 7
    for line in lines:
        assert f"{line[0].upper()}{line[1:]}." in page.text
    assert "val/1.jpg validation, dog" in page.text
    assert "train/36.jpg training, cat" in page.text
    assert "and 3 more" in page.text
    assert "train/44.jpg training, cat, 30 \N{MULTIPLICATION SIGN} 20 px" in page.text
    assert "None found" not in page.text
    assert "7 kinds of problems" in page.text


def test_rejected_files_by_kind_and_the_first_fifty(tmp_path: Path) -> None:
    reasons = ["damaged: image file is truncated (3 bytes)", "damaged: broken data stream", "empty file"]
    reasons += [
        "not an image, or of a format that is not read; convert it to JPEG or PNG",
        "9000x8000 has more than max_pixels = 5 pixels",
    ]
    entries = [{"path": f"bad/{index}.jpg", "reason": reasons[index % 5]} for index in range(100)]
    rejections = Rejections.of(iter(entries))
    assert rejections.num_files == 100
    assert rejections.by_kind == {
        "damaged": 40,
        "empty file": 20,
        "not an image, or of a format that is not read": 20,
        "more than max_pixels = 5 pixels": 20,
    }
    page = written(tmp_path, card(("cat", "dog"), listing("t", [0, 1]), listing("v", [0, 1]), rejections=rejections))
    assert "bad/49.jpg damaged" not in page.text
    assert "bad/49.jpg 9000x8000 has more" in page.text
    assert "bad/50.jpg" not in page.text
    assert "The first 50 of 100" in page.text


def test_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    evil = "</style><script>alert('x')</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}"
    train = listing("train", [0, 1, 0])
    what = card(
        (evil, "cat"),
        [*train, train[0]],
        [{**train[1], "label": 0}, *listing("val", [0])],
        path=lambda split, position: f"{evil}/{position}\udce9\n.jpg",
        source=f"/data/{evil}",
        rejections=Rejections.of([{"path": f"{evil}\udcff.jpg", "reason": f"damaged: {evil}"}]),
        pictures=(Picture(path=f"{evil}\udce9.jpg", label=0, data=noise(50, 60)),),
        config={"data": f"/data/{evil}\udce9"},
    )
    page = written(tmp_path, what)
    assert page.num("script") == 0
    assert page.num("img") == 1
    assert page.num("style") == 1
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count(evil) > 8
    assert "\\udce9" in page.text
    assert "\\udcff.jpg" in page.text
    assert "49" not in page.text


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    picture = Picture(path="a.jpg", label=0, data=noise(50, 60))
    page = written(tmp_path, card(("a", "b"), listing("t", [0, 1]), listing("v", [0, 1]), pictures=(picture,)))
    links = [value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")]
    assert len(links) == 1
    assert links[0] is not None
    assert links[0].startswith("data:image/jpeg;base64,")
    assert "default-src 'none'" in (tmp_path / "data_card.html").read_text()


def test_the_same_card_is_the_same_file(tmp_path: Path) -> None:
    what = card(("a", "b"), listing("t", [0, 1]), listing("v", [0, 1]))
    first = write_data_card(what, tmp_path).read_bytes()
    assert write_data_card(what, tmp_path).read_bytes() == first


@pytest.mark.parametrize(("num_classes", "is_folded"), [(30, False), (31, True)])
def test_many_classes_are_folded(tmp_path: Path, num_classes: int, is_folded: bool) -> None:
    labels = [label for label in range(num_classes) for _ in range(label + 5)]
    page = written(
        tmp_path, card([f"name{n}." for n in range(num_classes)], listing("t", labels), listing("v", labels))
    )
    assert ("The 10 largest and the 10 smallest of 31" in page.text) == is_folded
    assert ("All 31 classes" in page.text) == is_folded
    # In the middle, once; the largest, in the table and in the folded list.
    assert page.text.count("name15. 20 20") == 1
    assert page.text.count(f"name{num_classes - 1}. {num_classes + 4}") == 1 + is_folded


def test_a_large_card_stays_below_a_megabyte(tmp_path: Path) -> None:
    num_classes, long = 1000, "folder/" * 500
    labels = [label for label in range(num_classes) for _ in range(3)]
    train, val = listing("train", labels), listing("val", labels)
    train += [{**entry, "label": (entry["label"] + 1) % num_classes} for entry in train]
    val[:1000] = [{**entry, "height": 3} for entry in train[:1000]]
    positions = sample_positions(np.repeat(np.arange(num_classes), 6), num_classes)
    assert len(positions) == 60
    data = thumbnail(noise(112, 112))  # what compresses worst
    what = card(
        [f"n{label:08d} {'a long name, ' * 4}{label}" for label in range(num_classes)],
        train,
        val,
        path=lambda split, position: f"{long}{position}.jpg",
        rejections=Rejections.of({"path": f"{long}{n}", "reason": f"damaged: {long}"} for n in range(5000)),
        pictures=[Picture(path=long, label=position // 6, data=data) for position in positions],
    )
    page = written(tmp_path, what)
    assert page.num("img") == 60
    assert "n00000999" in page.text
    assert (tmp_path / "data_card.html").stat().st_size < 1_000_000


def test_samples_are_spread_over_classes_and_listing() -> None:
    labels = np.array([0] * 100 + [1] * 2 + [2] * 7)
    positions = sample_positions(labels, 4)
    assert positions[:6] == [0, 20, 40, 59, 79, 99]
    assert positions[6:8] == [100, 101]
    assert len(positions) == 14
    assert sample_positions(np.array([], np.int32), 4) == []


def test_of_many_classes_the_largest_and_the_smallest_are_shown() -> None:
    labels = np.repeat(np.arange(40), np.arange(40))  # class 0 is empty
    positions = sample_positions(labels, 40)
    assert sorted(set(labels[positions].tolist())) == [1, 2, 3, 4, 5, 35, 36, 37, 38, 39]
    assert len(positions) == 1 + 2 + 3 + 4 + 5 + 5 * 6


def _pack(folder: Path, images: Sequence[tuple[str, bytes]], num_shards: int) -> None:
    """Shards and listing as preprocess writes them."""
    entries = []
    for shard in range(num_shards):
        tar = folder / f"train-{shard:06d}.tar"
        with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(shard, len(images), num_shards):
                extension, data = images[number]
                for name, content in ((f"{number:09d}.{extension}", data), (f"{number:09d}.cls", b"000001")):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
                entries.append({"key": f"{number:09d}", "path": f"{number}.{extension}", "label": number % 2})
        with IndexCreator(str(tar), str(tar.with_suffix(".idx")), verbose=False) as index:
            index.create_index()
    (folder / "train.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_pictures_are_read_from_the_shards(tmp_path: Path) -> None:
    files = [("jpg", noise(200, 400)), ("png", noise(20, 30, "PNG")), ("jpg", noise(90, 40)), ("jpg", noise(80, 80))]
    _pack(tmp_path, files, num_shards=2)  # the listing holds 0, 2, 1, 3
    pictures = read_pictures(tmp_path, "train", [0, 1, 2])
    assert [(picture.path, picture.label) for picture in pictures] == [("0.jpg", 0), ("2.jpg", 0), ("1.png", 1)]
    sizes = [Image.open(io.BytesIO(picture.data)).size for picture in pictures]
    assert sizes == [(112, 56), (40, 90), (30, 20)]
    small = np.asarray(Image.open(io.BytesIO(pictures[2].data)))
    assert np.array_equal(small, np.asarray(Image.open(io.BytesIO(files[1][1]))))


def test_a_picture_that_cannot_be_decoded_is_left_out(tmp_path: Path) -> None:
    _pack(tmp_path, [("jpg", noise(50, 50)), ("jpg", b"no image")], num_shards=1)
    assert [picture.path for picture in read_pictures(tmp_path, "train", [0, 1])] == ["0.jpg"]


def test_the_chart_has_a_bar_for_each_count() -> None:
    svg = side_chart(SideHistogram(edges=(200, 256, 300, 362), counts=(10, 0, 1)))
    heights = [float(text) for text in re.findall(r'<rect [^>]*height="([\d.]+)"', svg)]
    assert heights == [170.0, 17.0]
    assert "200 to 255 px: 10 images" in svg
    assert "300 to 361 px: 1 image<" in svg
    assert side_chart(SideHistogram(edges=(200, 256), counts=(10,))) == ""
