"""Pairs of sentences: what is written, what is left out and named, and what hostile text does."""

import gzip
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.common.contracts.digests import digest_file
from components.common.contracts.manifests import DatasetManifest, load
from components.common.tasks.translation.batches import SentenceLoader
from components.common.tasks.translation.vocabulary import Vocabulary
from components.preprocess.sources import check_data_folder
from components.preprocess.sources.parallel_text import MAX_LINE_BYTES, Pair, find_texts
from enginery.datasets.phrases import phrase_pair, write_phrases
from tests.conftest import Dataset
from tests.processes import run_python
from tests.steps import step
from tests.unit.refusals import refuses


def phrases(number: int, seed: int = 0) -> list[tuple[str, str]]:
    rng, found = np.random.default_rng(seed), dict[str, str]()
    targets: set[str] = set()
    while len(found) < number:
        source, target = phrase_pair(rng)
        if source not in found and target not in targets:
            found[source] = target
            targets.add(target)
    return list(found.items())


PAIRS = phrases(120)


def tsv(pairs: list[tuple[str, str]]) -> bytes:
    return "".join(f"{source}\t{target}\n" for source, target in pairs).encode()


def packed(data: Path, output: Path, **settings: Any) -> Dataset:
    step("preprocess", output, {"data": str(data), "task": "translation", "max_bad_fraction": 1.0, **settings})
    return load(output, DatasetManifest, verify=("",))


def pack(folder: Path, content: bytes | list[tuple[str, str]], output: str = "out", **settings: Any) -> Dataset:
    """What becomes of a file text.tsv."""
    (folder / "text.tsv").write_bytes(content if isinstance(content, bytes) else tsv(content))
    return packed(folder / "text.tsv", folder / output, **settings)


def of_split(dataset: Dataset, split: str) -> list[tuple[str, str]]:
    lines = dataset.file(f"{split}.tsv").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [tuple(line.split("\t")) for line in lines]


def everything(dataset: Dataset) -> list[tuple[str, str]]:
    return sorted(of_split(dataset, "train") + of_split(dataset, "val"))


def pairs_of(file: Path, languages: tuple[str, str] = ("en", "de")) -> list[Pair]:
    return list(find_texts(str(file), languages, file.parent)[0][0].read())


def rejected(output: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (output / "rejected.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("text")
    write_phrases(folder / "data", num_pairs=2000)
    return packed(folder / "data", folder / "dataset", vocabulary_size=500)


def test_a_dataset_of_phrases(dataset: Dataset) -> None:
    manifest = dataset.manifest
    train, val = of_split(dataset, "train"), of_split(dataset, "val")
    assert (len(train), len(val)) == (1600, 400)
    assert (manifest.task, manifest.classes, manifest.statistics, manifest.num_rejected) == ("translation", (), None, 0)
    assert {split: info.num_images for split, info in manifest.splits.items()} == {"train": 1600, "val": 400}
    assert all(info.digest == digest_file(dataset.file(f"{split}.tsv")) for split, info in manifest.splits.items())
    spec = manifest.text_spec
    assert (spec.source_language, spec.target_language, spec.num_tokens, spec.max_tokens) == ("en", "de", 500, 256)
    assert Vocabulary.read(dataset.file(spec.vocabulary)).size == 500
    files = {"train.tsv", "val.tsv", "vocabulary.model", "rejected.jsonl", "data_card.html"}
    assert set(manifest.files) == files
    assert {path.name for path in dataset.path.iterdir()} == {*files, "manifest.json"}
    for side in (0, 1):  # nothing is on both sides
        assert not {pair[side] for pair in train} & {pair[side] for pair in val}
    known = {number for pair in train for number in re.findall(r"\d[\d.,]{3,}", " ".join(pair))}
    assert sum(bool(set(re.findall(r"\d[\d.,]{3,}", " ".join(pair))) - known) for pair in val) > 40
    batches = list(SentenceLoader(dataset, "train", training=True, batch_size=100))
    assert len(batches) == 16


def test_the_card(dataset: Dataset) -> None:
    page = dataset.file("data_card.html").read_text(encoding="utf-8")
    assert "<strong>1,600</strong> training pairs" in page
    assert "<strong>400</strong> validation pairs" in page
    for split in ("train", "val"):
        pairs = set(of_split(dataset, split))
        shown = re.findall(r'<tr><td dir="auto" lang="en">(.*?)</td><td dir="auto" lang="de">(.*?)</td></tr>', page)
        assert len({(one.replace("&#39;", "'"), other) for one, other in shown} & pairs) == 10
    assert "http" not in page.replace("http-equiv", "")


def test_the_split_depends_on_the_sentences_and_the_seed_alone(tmp_path: Path) -> None:
    whole = pack(tmp_path, PAIRS, "first")
    assert pack(tmp_path, PAIRS, "same").manifest.files == whole.manifest.files
    first, again = (set(of_split(own, "val")) for own in (whole, pack(tmp_path, PAIRS[::-1], "again")))
    assert len(first) == 24
    assert again == first != set(of_split(pack(tmp_path, PAIRS, "seed", seed=1), "val"))
    assert len(of_split(pack(tmp_path, PAIRS, "share", val_fraction=0.5), "val")) == 60


def test_sentences_that_hang_together_stay_on_one_side(tmp_path: Path) -> None:
    """Four sources have one target, and one of them has another target, too, and so on."""
    chain = [(f"s{number}", f"t{number + step}") for number in range(30) for step in (0, 1)]
    dataset = pack(tmp_path, chain + PAIRS)
    sides = [split for split in ("train", "val") if set(chain) & set(of_split(dataset, split))]
    assert len(sides) == 1
    assert everything(dataset) == sorted(chain + PAIRS)
    with refuses("too-few-pairs", "data"):
        pack(tmp_path, chain, "chain")


BAD: dict[str, tuple[bytes, str]] = {
    "an empty line": (b"", "empty"),
    "spaces": (b"  \t \xc2\xa0 ", "empty"),
    "no target": (b"source\t", "empty"),
    "nothing to be seen": ("\u200b\u00ad\t\u2060\u200f".encode(), "empty"),
    "one column": (b"only one sentence", "columns"),
    "three columns": (b"one\ttwo\tthree", "columns"),
    "Latin-1": ("grün\tgr\xfcn".encode("latin-1"), "encoding"),
    "a lone surrogate": (b"smile \xed\xa0\xbd\tl\xc3\xa4cheln", "encoding"),
    "an overlong form": (b"slash \xc0\xaf\tStrich", "encoding"),
    "what another program gave up": ("na\ufffdve\tnaiv".encode(), "encoding"),
    "NUL": (b"a\x00b\tc", "control-character"),
    "escape": (b"\x1b[31mred\trot", "control-character"),
    "next line": ("one\x85two\teins".encode(), "control-character"),
    "a lone carriage return": (b"one\rtwo\teins", "control-character"),
    "line separator": ("one\u2028two\teins".encode(), "control-character"),
    "turned direction": ("pay \u202e001\u202c euros\tzahle 100 Euro".encode(), "control-character"),
    "isolate": ("\u2066abc\u2069\tabc".encode(), "control-character"),
    "quotes of CSV": (b'he said ""yes""\t"er sagte ""ja"""', "quoted"),
    "a mark of order in the middle": ("a\ufeffb\tab".encode(), "control-character"),
    "10,000 words": (b"word " * 10_000 + b"\tWort", "too-long"),
    "very different lengths": (b"this is a rather long sentence of many words, " * 3 + b"\tja", "length-ratio"),
    "Cyrillic": ("hello\tжизнь".encode(), "unknown-script"),
    "Greek": ("καλημέρα\tguten Morgen".encode(), "unknown-script"),
    "again": (tsv(PAIRS[3:4])[:-1], "duplicate"),
    "again with spaces": (f" {PAIRS[4][0]} \t{PAIRS[4][1]}\r".encode(), "duplicate"),
    "again but for what is not seen": ("\t".join(PAIRS[6]).replace(" ", "  \u200b").encode(), "duplicate"),
    "again in another form": (unicodedata.normalize("NFD", "\t".join(PAIRS[5])).encode() + b" ", "duplicate"),
}


def test_each_bad_line_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    good = tsv(PAIRS).split(b"\n")[:-1]
    dataset = pack(tmp_path, b"\n".join([*good, *(line for line, _ in BAD.values())]))
    entries = rejected(tmp_path / "out")
    found = {entry["place"]: entry["problem"] for entry in entries}
    expected = {f"text.tsv:{len(good) + number}": problem for number, (_, problem) in enumerate(BAD.values(), 1)}
    assert found == expected
    assert len(entries) == dataset.manifest.num_rejected == len(BAD)
    assert all(len(entry["text"]) <= 80 for entry in entries)
    assert everything(dataset) == sorted(PAIRS)
    assert next(entry["text"] for entry in entries if entry["problem"] == "columns") == "only one sentence"


def test_the_step_says_how_many_for_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = pack(tmp_path, [*PAIRS, ("same", "same")], "same").file("data_card.html").read_text()
    assert "equals its source" in card
    assert "left out for" not in card
    bad = pack(tmp_path, [*PAIRS, PAIRS[0], ("same", "same"), ("word " * 300, "Wort " * 300)])
    assert "left out for" in bad.file("data_card.html").read_text()
    said = " ".join(capsys.readouterr().err.split())
    assert "2 pairs left out (too many words: 1; the same pair again: 1)" in said
    assert "1 pairs (0.8 %) have a target that equals its source" in said
    assert "tokens, not 8,000" in said


def test_files_that_are_not_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else validation pairs in another format would be missed in silence, and others held out in their place."""
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.tsv", "val.csv", "eval.tsv", "train.fr", "dataset.json", ".hidden"):
        (data / name).write_bytes(tsv(PAIRS))
    packed(data, tmp_path / "out")
    assert "not read, being test data or of another format or language: eval.tsv, train.fr, val.csv" in " ".join(
        capsys.readouterr().err.split()
    )


def test_limits_are_settings(tmp_path: Path) -> None:
    texts = [("one two three four", "eins"), ("x" * 100, "y" * 60)]
    assert not pack(tmp_path, PAIRS + texts, "all").manifest.num_rejected
    longest = max(len(side.split()) for pair in PAIRS for side in pair)
    packed(tmp_path / "text.tsv", tmp_path / "words", max_words=3, max_length_ratio=1.5)
    problems = {entry["text"]: entry["problem"] for entry in rejected(tmp_path / "words")}
    assert longest > 3
    assert problems["\t".join(texts[0])] == "too-long"
    assert problems["\t".join(texts[1])[:80]] == "length-ratio"
    dataset = packed(tmp_path / "text.tsv", tmp_path / "tokens", max_tokens=16)
    assert {entry["problem"] for entry in rejected(tmp_path / "tokens")} == {"too-many-tokens"}
    vocabulary = Vocabulary.read(dataset.file("vocabulary.model"))
    assert max(map(len, vocabulary.encode([side for pair in everything(dataset) for side in pair]))) <= 16
    assert dataset.manifest.text_spec.max_tokens == 16


@pytest.mark.parametrize(
    ("settings", "setting"),
    [({"on_bad": "fail"}, "preprocess.on_bad"), ({"max_bad_fraction": 0.01}, "preprocess.max_bad_fraction")],
)
def test_too_much_that_is_bad_stops_the_step(tmp_path: Path, settings: dict[str, Any], setting: str) -> None:
    with refuses("unusable-pairs", setting) as caught:
        pack(tmp_path, tsv(PAIRS) + b"one\ntwo\nthree\n", **settings)
    said = "3 of 123 pairs can't be used (not two columns: 3), such as text.tsv:121: not two columns"
    assert said in str(caught.value)
    assert len(rejected(tmp_path / "out")) == 3
    # A pair that comes again is not bad.
    assert pack(tmp_path, [*PAIRS, *PAIRS], **settings).manifest.num_rejected == len(PAIRS)


@pytest.mark.parametrize(("train", "val"), [("train.tsv", "val.tsv"), ("corpus.tsv", "dev.tsv")])
def test_leaks_leave_the_validation_split(tmp_path: Path, train: str, val: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    leaks = [PAIRS[0], (PAIRS[1][0], "anders"), ("different", PAIRS[2][1])]
    (data / train).write_bytes(tsv(PAIRS[:100]))
    (data / val).write_bytes(tsv([*PAIRS[100:], *leaks, PAIRS[100]]))
    (data / "test.tsv").write_bytes(tsv(phrases(10, seed=9)))
    (data / "README.md").write_text("no text")
    dataset = packed(data, tmp_path / "out")
    assert of_split(dataset, "train") == PAIRS[:100]
    assert of_split(dataset, "val") == PAIRS[100:]
    problems = [(entry["place"], entry["problem"]) for entry in rejected(tmp_path / "out")]
    assert sorted(problems) == [(f"{val}:{line}", "leak") for line in (21, 22, 23)] + [(f"{val}:24", "duplicate")]


def test_a_validation_split_of_leaks_alone(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir(parents=True)
        (tmp_path / "data" / split / "text.tsv").write_bytes(tsv(PAIRS))
    with refuses("no-usable-pair", "data"):
        packed(tmp_path / "data", tmp_path / "out")


@pytest.mark.parametrize("zipped", [False, True])
def test_pairs_of_files_as_moses_has_them(tmp_path: Path, zipped: bool) -> None:
    data, end = tmp_path / "data", ".gz" if zipped else ""
    (data / "corpus").mkdir(parents=True)

    def write(path: str, pairs: list[tuple[str, str]]) -> None:
        for side, language in enumerate(("fr", "pt-BR")):
            content = "".join(f"{pair[side]}\n" for pair in pairs).encode()
            (data / f"{path}.{language}{end}").write_bytes(gzip.compress(content) if zipped else content)

    write("train", PAIRS[:90])
    write("corpus/dev.valid", PAIRS[90:])
    settings = {"source_language": "fr", "target_language": "pt-BR"}
    dataset = packed(data, tmp_path / "out", **settings)
    assert (of_split(dataset, "train"), of_split(dataset, "val")) == (PAIRS[:90], PAIRS[90:])
    assert dataset.manifest.text_spec.target_language == "pt-BR"
    write("train", [*PAIRS[:90], ("one", "")])
    packed(data, tmp_path / "empty", **settings)
    assert [entry["place"] for entry in rejected(tmp_path / "empty")] == [f"train.fr{end}:91"]
    path = data / f"train.fr{end}"
    path.write_bytes(path.read_bytes() + (gzip.compress(b"one more\n") if zipped else b"one more\n"))
    with refuses("other-number-of-lines", "data"):
        packed(data, tmp_path / "more", **settings)
    path.unlink()
    for name, other in (("lonely.fr", "train.pt-BR"), ("dev.pt-BR", "lonely.fr")):
        (data / f"{name}{end}").write_bytes(b"")
        (data / f"{other}{end}").unlink()
        with refuses("no-counterpart", "preprocess.target_language"):
            packed(data, tmp_path / name, **settings)


def tmx(units: str, before: str = "") -> bytes:
    head = f'<?xml version="1.0" encoding="UTF-8"?>{before}<tmx version="1.4"><header srclang="en"/><body>'
    return f"{head}{units}</body></tmx>".encode()


def unit(source: str, target: str, languages: tuple[str, str] = ("en-GB", "de")) -> str:
    sides = zip(languages, (source, target), strict=True)
    return "<tu>" + "".join(f'<tuv xml:lang="{one}"><seg>{text}</seg></tuv>' for one, text in sides) + "</tu>\n"


def test_tmx(tmp_path: Path) -> None:
    document_type = '<!DOCTYPE tmx SYSTEM "file:///etc/passwd">'  # is named in many files, and not read
    units = [unit(*pair) for pair in PAIRS]
    units += [
        unit("A <bpt i='1'>&lt;b&gt;</bpt><hi>bold</hi><ept i='1'>&lt;/b&gt;</ept> word", "ein\n  fettes Wort"),
        unit("sir: 5 o'clock", "monsieur\u00a0:\u3000cinq\n heures"),
        unit("tea &amp; milk", "Tee &#38; Milch", ("EN", "DE-at")),
        unit("one", "un", ("en", "fr")),
        unit("Danke", "thanks", ("de", "en")),
        unit("a &nbsp; b", "c"),
        unit("word " * 300_000, "Wort"),
    ]
    path = tmp_path / "text.tmx.gz"
    path.write_bytes(gzip.compress(tmx("".join(units), document_type)))
    dataset = packed(path, tmp_path / "out")
    expected = [
        ("A bold word", "ein fettes Wort"),
        ("sir: 5 o'clock", "monsieur\u00a0:\u3000cinq heures"),
        ("tea & milk", "Tee & Milch"),
        ("thanks", "Danke"),
    ]
    assert everything(dataset) == sorted(PAIRS + expected)
    problems = {entry["place"]: entry["problem"] for entry in rejected(tmp_path / "out")}
    line = len(PAIRS) + 6  # two of them have a line end within
    assert problems == {
        f"text.tmx.gz:{line}": "missing-language",
        f"text.tmx.gz:{line + 2}": "encoding",
        f"text.tmx.gz:{line + 3}": "too-long",
    }
    wide = tmx("".join(units[:120])).decode().replace("UTF-8", "UTF-16").encode("utf-16")
    (tmp_path / "wide.tmx").write_bytes(wide)
    assert len(pairs_of(tmp_path / "wide.tmx")) == 120


def test_a_language_and_its_variant_are_two_languages_of_tmx(tmp_path: Path) -> None:
    path = tmp_path / "text.tmx"
    path.write_bytes(tmx("".join(unit(*pair, ("zh-CN", "zh_TW")) for pair in PAIRS)))
    pairs = pairs_of(path, ("zh", "zh-TW"))
    assert [(pair.source, pair.target, pair.problem) for pair in pairs] == [(*pair, "") for pair in PAIRS]


def test_names_of_test_and_validation_sets(tmp_path: Path) -> None:
    """Of WMT, IWSLT and FLORES."""
    tests = ("newstest2014", "X.tst2010", "devtest/x", "holdout", "heldout", "eval")
    for name in (*tests, "newsdev2013", "X.dev2010", "development", "train", "contest"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        for language in ("en", "de"):
            (tmp_path / f"{name}.{language}").write_text("x\n")
    found = {file.name: file.split for file in find_texts(str(tmp_path), ("en", "de"), tmp_path)[0]}
    assert found == {
        "newsdev2013.en": "val",
        "X.dev2010.en": "val",
        "development.en": "val",
        "train.en": "train",
        "contest.en": "",
    }


@pytest.mark.parametrize(
    ("name", "header", "is_swapped"),
    [
        ("text.tsv", "de\ten\n", True),
        ("text.tsv", "de-AT\ten_GB\n", True),
        ("train.de-en.tsv.gz", "", True),
        ("DE_EN.tsv", "", True),
        ("x_de-en.tsv", "", True),
        ("en-de.tsv", "en\tde\n", False),
        ("en-de.tsv", "Source\tTarget\n", False),
        ("de-en.tsv", "EN\tDE\n", False),
        ("text.tsv", "en_US\tde-DE\n", False),
    ],
)
def test_a_header_is_no_pair_and_columns_the_other_way_round_are_refused(
    tmp_path: Path, name: str, header: str, is_swapped: bool
) -> None:
    (tmp_path / name).write_bytes(header.encode() + tsv(PAIRS))
    if is_swapped:
        with refuses("swapped-languages", "preprocess.source_language"):
            pairs_of(tmp_path / name)
    pairs = pairs_of(tmp_path / name, ("de", "en") if is_swapped else ("en", "de"))
    first = 2 if header else 1
    assert [(pair.line, pair.source) for pair in pairs[:2]] == [(first, PAIRS[0][0]), (first + 1, PAIRS[1][0])]
    assert len(pairs) == len(PAIRS)


LAUGHS = "<!DOCTYPE tmx [" + "".join(
    f'<!ENTITY l{number} "{f"&l{number - 1};" * 10 if number else "ha"}">' for number in range(10)
)


@pytest.mark.parametrize(
    "content",
    [
        tmx(unit("&l9;", "x"), LAUGHS + "]>"),
        tmx(unit("&file;", "x"), '<!DOCTYPE tmx [<!ENTITY file SYSTEM "file:///etc/passwd">]>'),
        tmx(unit("x", "y"), '<!DOCTYPE tmx [<!ENTITY % all SYSTEM "http://127.0.0.1:1/x.dtd"> %all;]>'),
        tmx(f"<tu {'a' * (20 << 20)}='1'></tu>"),
        tmx(unit("<hi>" * 100 + "x" + "</hi>" * 100, "y")),
        tmx(unit("a\x01b", "c")),
        tmx(unit("a", "c"))[:-10],
        b"<tmx><body>",
        b"no XML",
        b"",
        b'<?xml version="1.0" encoding="EBCDIC-of-no-kind"?><tmx/>',
    ],
    ids=["laughs", "file", "parameter", "long tag", "nested", "control", "cut", "open", "text", "empty", "encoding"],
)
def test_xml_that_is_hostile_or_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text.tmx").write_bytes(content)
    with refuses("damaged-archive"):
        packed(tmp_path / "text.tmx", tmp_path / "out")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_other_encodings_of_a_whole_file(tmp_path: Path, encoding: str) -> None:
    text = "".join(f"{source}\t{target}\n" for source, target in PAIRS)
    with refuses("not-utf8", "data", says="text.tsv") as caught:
        pack(tmp_path, text.encode(encoding))
    convert = re.search(r"iconv -f (\S+) ", str(caught.value))
    assert PAIRS[0][0] in text.encode(encoding).decode(convert[1])


def test_line_ends_of_all_systems_and_a_mark_at_the_start(tmp_path: Path) -> None:
    ends = ("\n", "\r\n")
    text = "".join(f"{source}\t{target}{ends[number % 2]}" for number, (source, target) in enumerate(PAIRS))
    dataset = pack(tmp_path, b"\xef\xbb\xbf" + text.encode().removesuffix(b"\r\n"))
    assert everything(dataset) == sorted(PAIRS)
    assert not dataset.manifest.num_rejected
    with refuses("no-usable-pair", "data"):
        pack(tmp_path, text.replace("\r\n", "\n").replace("\n", "\r").encode(), "mac")


@pytest.mark.parametrize("zipped", [False, True])
def test_a_line_of_a_gigabyte_takes_little_memory(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / ("text.tsv.gz" if zipped else "text.tsv")
    if zipped:
        parts = (tsv(PAIRS), *[b"x" * (1 << 24)] * 64, b"\nend\tEnde\n")
        path.write_bytes(b"".join(map(gzip.compress, parts)))
    else:
        with path.open("wb") as file:
            file.write(tsv(PAIRS))
            file.seek(1 << 30, 1)  # NULs that take no room on the disk
            file.write(b"\nend\tEnde\n")
    code = f"""
import resource
from pathlib import Path
from tests.unit.preprocess.test_translation import packed
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
packed(Path({str(path)!r}), Path({str(tmp_path / "out")!r}))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = run_python("-c", code)
    assert int(done.stdout) < 100_000  # KB
    (entry,) = rejected(tmp_path / "out")
    assert (entry["place"], entry["problem"]) == (f"{path.name}:121", "too-long")
    assert ("end", "Ende") in everything(load(tmp_path / "out", DatasetManifest))


def test_a_line_of_as_many_bytes_as_are_read(tmp_path: Path) -> None:
    """The limit falls on the end of a line, before it, and on the first byte of the next."""
    for size in (MAX_LINE_BYTES - 1, MAX_LINE_BYTES, MAX_LINE_BYTES + 1, MAX_LINE_BYTES + (1 << 16)):
        (tmp_path / "text.tsv").write_bytes(b"a\tb\n" + b"x" * (size - 1) + b"\nc\td\n")
        pairs = pairs_of(tmp_path / "text.tsv")
        assert [(pair.line, pair.problem) for pair in pairs[::2]] == [(1, ""), (3, "")]
        assert pairs[1].problem == ("too-long" if size > MAX_LINE_BYTES else "columns")


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(tsv(PAIRS))
    for content in (whole[:-20], whole[:40] + b"\xff" * 9 + whole[49:]):
        (tmp_path / "text.tsv.gz").write_bytes(content)
        with refuses("damaged-archive"):
            pairs_of(tmp_path / "text.tsv.gz")


def test_scripts(tmp_path: Path) -> None:
    """A script that a language uses, if seldom, is its own; a Greek letter among Latin ones, digits and emoji, too."""
    pairs = [
        *PAIRS,
        *[(f"{source}!", f"число {number} {'ая'[number % 2]}") for number, (source, _) in enumerate(PAIRS[:60])],
        ("the number π is 3.14", "die Zahl π ist 3,14"),
        ("100 %", "100\u00a0%"),
        ("🙂", "🙃"),
    ]
    dataset = pack(tmp_path, [*pairs, ("文字", "Zeichen")], max_length_ratio=100)
    assert [entry["problem"] for entry in rejected(tmp_path / "out")] == ["unknown-script"]
    assert everything(dataset) == sorted(pairs)
    few = [("hello", "Hallo"), ("жизнь", "Leben"), ("文字", "Zeichen")]
    assert everything(pack(tmp_path, few, "few")) == sorted(few)  # too few to tell


@pytest.mark.parametrize(
    ("settings", "code", "setting"),
    [
        ({"part": "1/2"}, "no-parts-of-text", "preprocess.part"),
        ({"target_language": "EN"}, "same-languages", "preprocess.target_language"),
        ({"vocabulary_size": 100}, "no-vocabulary", "preprocess.vocabulary_size"),
    ],
)
def test_settings_that_can_not_be(tmp_path: Path, settings: dict[str, Any], code: str, setting: str) -> None:
    with refuses(code, None if code == "no-parts-of-text" else setting):
        pack(tmp_path, PAIRS, **settings)
    if code == "no-vocabulary":  # the same output again, with what is left there
        assert pack(tmp_path, PAIRS).manifest.splits["val"].num_images == 24


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("nothing", "no-data"),
        ("text.csv", "unknown-data-kind"),
        ("empty", "no-parallel-text"),
        ("same.tsv", "no-translation"),
        ("thai.tsv", "other-script"),
    ],
)
def test_data_that_is_no_parallel_text(tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / "text.csv").write_text("a,b\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/notes.txt").write_text("a")
    (tmp_path / "same.tsv").write_bytes(tsv([(f"{source} ", source) for source, _ in PAIRS]))
    (tmp_path / "thai.tsv").write_bytes(tsv([(source, f"สวัสดี{number}") for number, (source, _) in enumerate(PAIRS)]))
    with refuses(code, "preprocess.target_language" if code == "other-script" else "data"):
        packed(tmp_path / name, tmp_path / "out")
    if code == "other-script":
        packed(tmp_path / name, tmp_path / "out", target_language="th-TH")
    if code in ("no-data", "unknown-data-kind"):
        with refuses(code, "data"):
            check_data_folder(str(tmp_path / name), "translation")


@pytest.mark.parametrize("name", ["link.tsv", "link.TMX", "link.en", "link.de.gz", "folder"])
def test_text_behind_a_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/secret.tsv").write_bytes(tsv(phrases(5, seed=5)))
    (data / "text.tsv").write_bytes(tsv(PAIRS))
    (data / "notes.txt").symlink_to(tmp_path / "secret/secret.tsv")
    assert everything(packed(data, tmp_path / "out")) == sorted(PAIRS)
    (data / name).symlink_to(tmp_path / ("secret" if name == "folder" else "secret/secret.tsv"))
    with refuses("link-out", "data"):
        packed(data, tmp_path / "again")


@pytest.mark.parametrize("name", ["TEXT.TSV", "Text.Tmx", "TEXT.TMX.GZ"])
def test_the_case_of_an_ending_does_not_matter(tmp_path: Path, name: str) -> None:
    content = tsv(PAIRS) if "TSV" in name else tmx("".join(unit(*pair) for pair in PAIRS))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    for data in (tmp_path / "data", tmp_path / "data" / name):
        assert everything(packed(data, tmp_path / f"out-{data.name}")) == sorted(PAIRS)
