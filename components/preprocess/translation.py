"""Pairs of sentences: checked, split such that no sentence lies on both sides, and written with their vocabulary.

The text is read once and passes through files; in memory are some bytes a pair.
"""

import json
import os
import random
import shutil
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from components.common.contracts.digests import digest_bytes, digest_file
from components.common.contracts.errors import UserError, shown
from components.common.contracts.manifests import PARTIAL_OUTPUT, Artifact, DatasetManifest, seal, write_atomically
from components.common.contracts.records import Split
from components.common.contracts.settings import fingerprinted
from components.common.contracts.transforms import TextSpec
from components.common.data.pages import templates
from components.common.dataset.assembling import check_share, tell
from components.common.dataset.data_card import DATA_CARD
from components.common.dataset.shards import REJECTED, json_lines
from components.common.process.partial_output import LOCK, open_partial
from components.common.process.steplog import StepLog
from components.common.tasks.translation.sentences import BLEU_TOKENIZERS, CONTROL, base_language, visible
from components.common.tasks.translation.vocabulary import VOCABULARY, Vocabulary, train_vocabulary
from components.preprocess.config import PreprocessConfig
from components.preprocess.sources.parallel_text import Pair, find_texts

PROBLEMS = {
    "columns": "not two columns",
    "empty": "an empty sentence",
    "encoding": "not UTF-8, or damaged characters",
    "control-character": "control characters",
    "quoted": "quotes doubled as in CSV, where TSV has them single (pandas: quoting=csv.QUOTE_NONE)",
    "too-long": "too many words",
    "length-ratio": "sentences of very different length",
    "missing-language": "one of the languages is missing",
    "unknown-script": "a script that the language's other sentences do not use",
    "too-many-tokens": "too many tokens",
    "duplicate": "the same pair again",
    "leak": "a sentence of the training split",
}
"""Reasons why pairs are left out, by code, for people."""

_NOT_BAD = ("duplicate", "leak")  # nothing is wrong with the pair itself
_SHOWN = 80  # characters of a pair that rejected.jsonl has
_MIN_JUDGED = 100  # characters of the longer sentence where the ratio of lengths is judged
_MIN_SENTENCES = 20  # of a language before one of its scripts counts as unknown
_RARE_SHARE = 0.01  # of a language's sentences, which a script has that the language does not use
_MAX_VOCABULARY_SENTENCES = 2_000_000  # that the vocabulary is made of
_NUM_SAMPLES = 10  # pairs of each split in the data card
_MOST_NAMES = 5  # of files that are not read
_CHUNK = 10_000
_SPLITS = ("train", "val", "")
# First words of letters' names that are no script's.
_NO_SCRIPT = frozenset(
    ["MODIFIER", "MICRO", "MASCULINE", "FEMININE", "MATHEMATICAL", "SCRIPT", "FULLWIDTH", "HALFWIDTH"]
)
_WITHOUT_SPACES = ("CJK", "THAI", "LAO", "MYANMAR", "KHMER")  # between words
_EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "IDEOGRAPHIC")  # which one sentence mixes

Numbers = npt.NDArray[np.uint64]


def run(config: PreprocessConfig, log: StepLog, *, output: Path) -> str:
    """Check, split and write pairs, and make their vocabulary. See the package's docstring.

    Raises:
        UserError: the text can't be read, too much of it can't be used, or a split is empty.
    """
    if config.part:
        raise UserError("text is not packed in parts; leave preprocess.part empty", code="no-parts-of-text")
    if config.source_language.lower() == config.target_language.lower():
        message = f"source and target language are both {config.source_language}; name two"
        raise UserError(message, code="same-languages", setting="preprocess.target_language")
    names = (*(f"{split}.tsv" for split in _SPLITS[:2]), VOCABULARY, REJECTED, DATA_CARD)
    with open_partial(output, known=names) as folder:
        for path in (*(entry for entry in folder.iterdir() if entry.name != LOCK), *map(output.joinpath, names)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)  # of a run that was killed or refused
        artifact, warnings = _write(config, log, folder, output)
        shutil.rmtree(output / PARTIAL_OUTPUT)
    num_tokens = f"{artifact.manifest.text_spec.num_tokens:,} tokens"
    return tell(artifact, ("pairs", "pairs"), num_tokens, warnings, log)


def _write(
    config: PreprocessConfig, log: StepLog, folder: Path, output: Path
) -> tuple[Artifact[DatasetManifest], list[str]]:
    with (output / REJECTED).open("wb") as listing:
        rejections = _Rejections(listing)
        corpus = _read(config, log, folder, rejections)
        chosen = _choose(corpus, config)
        num_pairs = _divide(corpus, chosen, folder, rejections)
        total = sum(num_pairs.values()) + rejections.kinds.total()
        rejections.check(config, total, output)
        log.progress("making the vocabulary", 0, 1)
        size = train_vocabulary(
            _sentences(folder / "train.tsv", num_pairs["train"]), config.vocabulary_size, output / VOCABULARY
        )
        vocabulary = Vocabulary.read(output / VOCABULARY)
        written = {split: _encode(split, config, vocabulary, folder, output, rejections) for split in _SPLITS[:2]}
        rejections.check(config, total, output)
    for split, part in written.items():
        _check_any(part.num_pairs, split, output)
    warnings = rejections.lines()
    if size < config.vocabulary_size:
        log.note(f"the text has a vocabulary of {size:,} tokens, not {config.vocabulary_size:,}")
    if equal := sum(part.num_equal for part in written.values()):
        share = 100 * equal / sum(part.num_pairs for part in written.values())
        warnings.append(f"{equal:,} pairs ({share:.1f} %) have a target that equals its source")
    spec = TextSpec(
        source_language=config.source_language,
        target_language=config.target_language,
        vocabulary=VOCABULARY,
        num_tokens=size,
        max_tokens=config.max_tokens,
    )
    _write_card(config, spec, written, rejections.kinds, warnings, output)
    splits = {
        split: Split(
            num_images=part.num_pairs,
            shards=(f"{split}.tsv",),
            class_counts=(),
            digest=digest_file(output / f"{split}.tsv"),
        )
        for split, part in written.items()
    }
    artifact = seal(
        output,
        DatasetManifest,
        task=config.task,
        text=spec,
        inputs={},
        config=config,
        classes=(),
        splits=splits,
        num_rejected=rejections.kinds.total(),
    )
    return artifact, warnings


class _Rejections:
    """Pairs that are left out, in rejected.jsonl, and how many for which problem."""

    def __init__(self, listing: BinaryIO) -> None:
        self._listing = listing
        self.kinds: Counter[str] = Counter()
        self.first = ""  # place and problem of the first that is bad

    def add(self, place: str, problem: str, source: str, target: str) -> None:
        """List a pair."""
        text = f"{source}\t{target}" if target else source
        self._listing.write(json_lines([{"place": place, "problem": problem, "text": text[:_SHOWN]}]))
        self.kinds[problem] += 1
        if not self.first and problem not in _NOT_BAD:
            self.first = f"{place}: {PROBLEMS[problem]}"

    def check(self, config: PreprocessConfig, total: int, output: Path) -> None:
        """See that the step may leave them out, of `total` pairs.

        Raises:
            UserError: it may not.
        """
        self._listing.flush()
        num_bad = sum(number for problem, number in self.kinds.items() if problem not in _NOT_BAD)
        said = f"{num_bad:,} of {total:,} pairs can't be used ({self.counts()}), such as {self.first}"
        check_share(config, num_bad, total, said, output / REJECTED, "unusable-pairs")

    def counts(self) -> str:
        """Return the number of pairs by problem, the most frequent first."""
        return "; ".join(f"{PROBLEMS[problem]}: {number:,}" for problem, number in self.kinds.most_common())

    def lines(self) -> list[str]:
        """A sentence on them; none where there are none."""
        number = self.kinds.total()
        pairs = "1 pair" if number == 1 else f"{number:,} pairs"
        return [f"{pairs} left out ({self.counts()}); {REJECTED} lists all"] if number else []


@dataclass(kw_only=True)
class _Corpus:
    """Pairs that have no problem of their own, in the order of the files."""

    path: Path
    """Place, source and target a line, between tabs."""
    hashes: tuple["array[int]", "array[int]"] = field(default_factory=lambda: (array("Q"), array("Q")))  # of each side
    scripts: tuple["array[int]", "array[int]"] = field(default_factory=lambda: (array("H"), array("H")))  # of each side
    splits: "array[int]" = field(default_factory=lambda: array("B"))  # places in _SPLITS
    script_names: dict[str, int] = field(default_factory=lambda: {"": 0})  # "" of sentences without letters


def _read(config: PreprocessConfig, log: StepLog, folder: Path, rejections: _Rejections) -> _Corpus:
    corpus = _Corpus(path=folder / "pairs")
    files, unread = find_texts(config.data, (config.source_language, config.target_language), folder)
    if unread:
        more = f" and {len(unread) - _MOST_NAMES:,} more" if len(unread) > _MOST_NAMES else ""
        names = ", ".join(map(shown, unread[:_MOST_NAMES]))
        log.note(f"not read, being test data or of another format or language: {names}{more}")
    with corpus.path.open("w", encoding="utf-8", newline="\n") as kept:
        for number, file in enumerate(files):
            log.progress("reading", number, len(files), unit="files")
            name = file.name.encode(errors="backslashreplace").decode().replace("\t", " ").replace("\n", " ")
            for pair in file.read():
                source, target, problem = _checked(pair, config)
                place = f"{name}:{pair.line}"
                if problem:
                    rejections.add(place, problem, source, target)
                    continue
                kept.write(f"{place}\t{source}\t{target}\n")
                corpus.splits.append(_SPLITS.index(file.split))
                for hashes, scripts, text in zip(corpus.hashes, corpus.scripts, (source, target), strict=True):
                    hashes.append(int(digest_bytes(visible(text).encode()).removeprefix("sha256:")[:16], 16))
                    scripts.append(corpus.script_names.setdefault(_script(text), len(corpus.script_names)))
    if not corpus.splits:
        reasons = f" ({rejections.counts()}; such as {rejections.first})" if rejections.kinds else ""
        raise UserError(
            f"{config.data} has no pair of sentences that can be used{reasons}. Give lines of source, tab, target in "
            f"UTF-8, or files whose languages are {config.source_language} and {config.target_language}",
            code="no-usable-pair",
            setting="data",
        )
    _check_languages(corpus, config)
    return corpus


def _check_languages(corpus: _Corpus, config: PreprocessConfig) -> None:
    sources, targets = corpus.hashes
    if sources == targets:
        message = f"every target of {config.data} is the same sentence as its source; give translations as targets"
        raise UserError(message, code="no-translation", setting="data")
    script = list(corpus.script_names)[int(np.bincount(np.frombuffer(corpus.scripts[1], np.uint16)).argmax())]
    if script in _WITHOUT_SPACES and base_language(config.target_language) not in BLEU_TOKENIZERS:
        raise UserError(
            f"the target language is {config.target_language}, and most targets of {config.data} are of the script "
            f"{script}, between whose words are no spaces, so BLEU needs the right code: {', '.join(BLEU_TOKENIZERS)}",
            code="other-script",
            setting="preprocess.target_language",
        )


def _checked(pair: Pair, config: PreprocessConfig) -> tuple[str, str, str]:
    """Both sides in NFC and trimmed, and what is wrong with the pair, or ""."""
    sides = pair.source, pair.target
    problem = pair.problem
    if not problem and any(CONTROL.search(side) for side in sides):
        problem = "control-character"
    if problem:
        return *sides, problem
    source, target = (unicodedata.normalize("NFC", side).strip() for side in sides)
    longer, shorter = max(len(source), len(target)), min(len(source), len(target))
    if not (visible(source) and visible(target)):
        problem = "empty"
    elif "\ufffd" in source or "\ufffd" in target:
        problem = "encoding"
    elif max(len(source.split()), len(target.split())) > config.max_words:
        problem = "too-long"
    elif longer >= _MIN_JUDGED and longer > config.max_length_ratio * shorter:
        problem = "length-ratio"
    return source, target, problem


def _script(text: str) -> str:
    """The script of most letters, by the first word of their Unicode names; "" of a text without letters."""
    if text.isascii():
        return "LATIN" if any(map(str.isalpha, text)) else ""
    scripts = Counter(map(_script_of, text))
    del scripts[""]
    return max(scripts, key=scripts.__getitem__) if scripts else ""


@lru_cache(maxsize=1 << 16)
def _script_of(character: str) -> str:
    name = unicodedata.name(character, "").split(" ")[0] if character.isalpha() else ""
    return "" if name in _NO_SCRIPT else "CJK" if name in _EAST_ASIAN else name


def _choose(corpus: _Corpus, config: PreprocessConfig) -> list[str]:
    """Decide what becomes of each pair: "train", "val" or a problem."""
    sources, targets = (np.frombuffer(hashes, np.uint64) for hashes in corpus.hashes)
    splits = np.frombuffer(corpus.splits, np.uint8)
    val = splits == _SPLITS.index("val")
    is_split = bool(val.any() and not val.all())
    outcome = np.full(len(splits), "train", dtype="<U16")
    if is_split:
        outcome[val] = "val"
    for scripts in corpus.scripts:
        outcome[_has_unknown_script(np.frombuffer(scripts, np.uint16))] = "unknown-script"
    usable = np.flatnonzero(outcome != "unknown-script")
    # The same pair in both splits is a leak, and no duplicate.
    keys = np.stack([sources[usable], targets[usable], (outcome[usable] == "val").astype(np.uint64)])
    _, first = np.unique(keys, axis=1, return_index=True)
    again = np.ones(len(usable), bool)
    again[first] = False
    outcome[usable[again]] = "duplicate"
    usable = usable[~again]
    if is_split:
        of_train, of_val = (usable[outcome[usable] == split] for split in ("train", "val"))
        leaks = np.isin(sources[of_val], sources[of_train]) | np.isin(targets[of_val], targets[of_train])
        outcome[of_val[leaks]] = "leak"
    else:
        outcome[usable[_held_out(sources[usable], targets[usable], config)]] = "val"
    listed: list[str] = outcome.tolist()
    return listed


def _has_unknown_script(scripts: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
    """[N] scripts of a language's sentences -> [N] True where few others have the same."""
    counts = np.bincount(scripts)
    counts[0] = 0
    total = counts.sum()
    unknown = counts <= max(1, _RARE_SHARE * total) if total >= _MIN_SENTENCES else np.zeros(len(counts), bool)
    unknown[0] = False
    found: npt.NDArray[np.bool_] = unknown[scripts]
    return found


def _held_out(sources: Numbers, targets: Numbers, config: PreprocessConfig) -> npt.NDArray[np.int64]:
    """Numbers of the pairs of the validation split: groups of all that share a sentence, directly or by others.

    The choice depends on the sentences and the seed alone, not on their order.

    Raises:
        UserError: all share sentences.
    """
    parents: dict[int, int] = {}

    def root(node: int) -> int:
        while (above := parents.setdefault(node, node)) != node:
            parents[node] = node = parents[above]
        return node

    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        one, other = root(source), root(~target)  # the same text on the other side is another sentence
        parents[max(one, other)] = min(one, other)
    groups: dict[int, list[int]] = {}
    for number, source in enumerate(sources.tolist()):
        groups.setdefault(root(source), []).append(number)
    if len(groups) < 2:
        raise UserError(
            f"the pairs of {config.data} can't be split into training and validation: "
            f"{f'all {len(sources):,} share sentences' if len(sources) > 1 else 'there must be two'}. Add pairs",
            code="too-few-pairs",
            setting="data",
        )
    order = sorted(groups)
    random.Random(config.seed).shuffle(order)
    wanted = min(max(1, round(len(sources) * config.val_fraction)), len(sources) - 1)
    chosen: list[int] = []
    for group in order:
        if len(chosen) + len(groups[group]) <= wanted:
            chosen += groups[group]
    # Where each group is larger than the split, the smallest one.
    return np.array(chosen or min(groups.values(), key=len), np.int64)


def _divide(corpus: _Corpus, chosen: Sequence[str], folder: Path, rejections: _Rejections) -> Counter[str]:
    """Write the pairs of each split to a file of its own, still with their places. Returns their numbers by split."""
    numbers: Counter[str] = Counter()
    with (folder / "train.tsv").open("wb") as train, (folder / "val.tsv").open("wb") as val:
        files = {"train": train, "val": val}
        with corpus.path.open("rb") as lines:
            for line, outcome in zip(lines, chosen, strict=True):
                if outcome in files:
                    files[outcome].write(line)
                    numbers[outcome] += 1
                else:
                    rejections.add(*_fields(line, outcome))
    corpus.path.unlink()
    return numbers


def _fields(line: bytes, problem: str) -> tuple[str, str, str, str]:
    place, source, target = line.decode().removesuffix("\n").split("\t")
    return place, problem, source, target


def _sentences(path: Path, num_pairs: int) -> Iterator[str]:
    """Both sides of the pairs of a split; of very many, every second or third pair."""
    step = 1 + 2 * num_pairs // _MAX_VOCABULARY_SENTENCES
    with path.open("rb") as lines:
        for line in islice(lines, 0, None, step):
            yield from _fields(line, "")[2:]


@dataclass(kw_only=True)
class _Written:
    """A split as it is written."""

    num_pairs: int = 0
    num_equal: int = 0  # pairs whose target equals the source
    lengths: Counter[int] = field(default_factory=Counter)  # of the longer side in tokens, up to a multiple of 8
    samples: list[tuple[str, str]] = field(default_factory=list)


def _encode(
    split: str, config: PreprocessConfig, vocabulary: Vocabulary, folder: Path, output: Path, rejections: _Rejections
) -> _Written:
    """Write the file of a split without pairs that have too many tokens."""
    written, rng = _Written(), random.Random(config.seed)
    temporary = folder / f"{split}.kept"
    with (folder / f"{split}.tsv").open("rb") as lines, temporary.open("wb") as kept:
        while chunk := [_fields(line, "too-many-tokens") for line in islice(lines, _CHUNK)]:
            lengths = [list(map(len, vocabulary.encode([entry[side] for entry in chunk]))) for side in (2, 3)]
            for entry, longest in zip(chunk, map(max, *lengths), strict=True):
                if longest > config.max_tokens:
                    rejections.add(*entry)
                    continue
                source, target = entry[2:]
                kept.write(f"{source}\t{target}\n".encode())
                written.num_pairs += 1
                written.num_equal += source == target
                written.lengths[-(-longest // 8) * 8] += 1
                place = rng.randrange(written.num_pairs)  # reservoir sampling: each pair with the same chance
                if len(written.samples) < _NUM_SAMPLES:
                    written.samples.append((source, target))
                elif place < _NUM_SAMPLES:
                    written.samples[place] = source, target
        kept.flush()
        os.fsync(kept.fileno())
    temporary.replace(output / f"{split}.tsv")
    return written


def _check_any(num_pairs: int, split: str, output: Path) -> None:
    if not num_pairs:
        raise UserError(
            f"no usable pair is left in the {split} split; {output / REJECTED} says why of each. Give other text to "
            f"{'validate with' if split == 'val' else 'train on'}",
            code="no-usable-pair",
            setting="data",
        )


def _write_card(
    config: PreprocessConfig,
    spec: TextSpec,
    written: dict[str, _Written],
    problems: Counter[str],
    warnings: Sequence[str],
    output: Path,
) -> None:
    """Write data_card.html: one file that needs no network, and is the same for the same text."""
    filters = {"count": "{:,}".format, "setting": lambda value: json.dumps(value, ensure_ascii=False)}
    page = (
        templates(Path(__file__).with_name("templates"), filters=filters)
        .get_template("text_card.html.j2")
        .render(
            source=config.data,
            spec=spec,
            splits=written,
            problems={PROBLEMS[problem]: number for problem, number in problems.most_common()},
            warnings=warnings,
            config=fingerprinted(config),
        )
    )
    write_atomically(output / DATA_CARD, page.encode(errors="backslashreplace"))
