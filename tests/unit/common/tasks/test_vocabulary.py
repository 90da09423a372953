"""The vocabulary of a translation: lossless on any text, the same each time, and honest about its size."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from components.common.tasks.translation.vocabulary import BOS, EOS, PAD, UNKNOWN, Vocabulary, train_vocabulary
from enginery.datasets.phrases import phrase_pair
from tests.unit.refusals import refuses

STRANGE = ["", " ", " a  b ", "e\u0301", "日本語 🤖", "a\x00b\tc\n", "<s> </s> <pad> <unk>", "\u202eabc\u202c", "ﬁ ²"]
STRANGE += ["x" * 50_000]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    rng = np.random.default_rng(0)
    return [sentence for _ in range(3000) for sentence in phrase_pair(rng)]


@pytest.fixture(scope="module")
def file(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.model"
    assert train_vocabulary(lines, 500, path) == 500
    return path


def test_any_text_comes_back_as_it_was(file: Path, lines: list[str]) -> None:
    vocabulary = Vocabulary.read(file)
    for sentences in (lines, STRANGE):
        tokens = vocabulary.encode(sentences)
        assert all(ids[-1] == EOS and not {PAD, BOS, EOS, UNKNOWN} & set(ids[:-1]) for ids in tokens)
        assert max(map(max, tokens)) < vocabulary.size
        assert vocabulary.decode(tokens) == [unicodedata.normalize("NFC", sentence) for sentence in sentences]
        assert [vocabulary.encode([sentence])[0] for sentence in sentences[:200]] == tokens[:200]  # alone as among many
    assert np.mean([len(ids) for ids in vocabulary.encode(lines)]) < 0.5 * np.mean([len(line) for line in lines])
    assert len({tuple(ids) for ids in vocabulary.encode(["1987", "19", "87"])}) == 3
    assert [len(ids) for ids in vocabulary.encode(["1987", "7"])] == [6, 3]  # a digit is a token


def test_a_frequent_word_that_a_space_always_follows_is_a_token(file: Path, lines: list[str]) -> None:
    assert not any(line.endswith(" and") or " and," in line for line in lines)
    assert list(map(len, Vocabulary.read(file).encode(["and", "and and"]))) == [2, 3]


def test_decoding_stops_at_the_end_of_a_sentence(file: Path) -> None:
    vocabulary = Vocabulary.read(file)
    (ids,) = vocabulary.encode(["halb vier"])
    assert vocabulary.decode([[*ids, *ids, PAD, PAD], [BOS, *ids], [EOS], []]) == ["halb vier", "halb vier", "", ""]


def test_the_same_text_gives_the_same_file(file: Path, lines: list[str], tmp_path: Path) -> None:
    train_vocabulary(iter(lines), 500, tmp_path / "again.model")
    assert (tmp_path / "again.model").read_bytes() == file.read_bytes()


def test_of_little_text_the_vocabulary_is_smaller(tmp_path: Path) -> None:
    size = train_vocabulary(["guten Tag", "good day"], 8000, tmp_path / "small.model")
    assert 260 < size < 300
    assert Vocabulary.read(tmp_path / "small.model").size == size


@pytest.mark.parametrize(("lines", "size"), [(["guten Tag"], 262), ([], 8000)])
def test_a_text_without_such_a_vocabulary(lines: list[str], size: int, tmp_path: Path) -> None:
    with refuses("no-vocabulary", "preprocess.vocabulary_size"):
        train_vocabulary(lines, size, tmp_path / "none.model")
    assert not (tmp_path / "none.model").exists()


def test_half_of_a_surrogate_pair_is_no_text(file: Path) -> None:
    with refuses("lone-surrogate"):
        Vocabulary.read(file).encode(["fine", "not \ud83e"])


def test_files_that_are_no_vocabulary(file: Path, tmp_path: Path) -> None:
    content, path = file.read_bytes(), tmp_path / "vocabulary.model"
    for damaged in (b"", b"\x00" * 100, content[: len(content) // 2], b"{}"):
        path.write_bytes(damaged)
        with refuses("damaged-vocabulary"):
            Vocabulary.read(path)
    prefix = str(tmp_path / "other")
    texts = iter(["guten Tag", "good day"] * 9)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_prefix=prefix, vocab_size=50, hard_vocab_limit=False, minloglevel=2
    )
    with refuses("other-vocabulary"):
        Vocabulary.read(Path(f"{prefix}.model"))
