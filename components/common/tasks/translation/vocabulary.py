"""The vocabulary that both languages of a translation share: sentences to tokens and back, by SentencePiece."""

import io
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import sentencepiece

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import write_atomically

VOCABULARY = "vocabulary.model"  # its file in an artifact
PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
_MAX_CHARACTERS = 1000  # of a sentence that are looked at for the vocabulary
_NUM_THREADS = 4
_FEW = 64  # sentences that one thread encodes sooner than several are started


class Vocabulary:
    """Tokens by number, PAD, BOS, EOS and UNKNOWN first."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor
        self.size: int = processor.vocab_size()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what train_vocabulary wrote.

        Raises:
            EngineryError: the file is damaged, or of another vocabulary.
            OSError: it can't be read.
        """
        try:
            processor = sentencepiece.SentencePieceProcessor()
            processor.load_from_serialized_proto(path.read_bytes())
            own = cls(processor)
        except RuntimeError as error:
            raise EngineryError(
                f"{path} is no vocabulary of SentencePiece, or damaged; write the dataset again with "
                "`python -m components.preprocess`",
                code="damaged-vocabulary",
            ) from error
        found = (own._processor.pad_id(), own._processor.bos_id(), own._processor.eos_id(), own._processor.unk_id())
        if found != (PAD, BOS, EOS, UNKNOWN):
            raise EngineryError(
                f"{path} numbers padding, begin, end and unknown {found}, and {(PAD, BOS, EOS, UNKNOWN)} is needed; "
                "let preprocess write the vocabulary",
                code="other-vocabulary",
            )
        return own

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Tokens of each sentence, in Unicode's form NFC, with EOS at the end and without BOS.

        Raises:
            UserError: a sentence holds half of a surrogate pair, so that it is no text.
        """
        num_threads = _NUM_THREADS if len(lines) > _FEW else 1
        try:
            normalized = [unicodedata.normalize("NFC", line).encode() for line in lines]
        except UnicodeEncodeError as error:
            raise UserError(
                f"sentence {error.object[:80]!r} holds a lone surrogate at character {error.start}, so it is no text; "
                "send it in UTF-8",
                code="lone-surrogate",
            ) from None
        # Bytes, since the library would take a str with NUL for one that ends there.
        tokens: list[list[int]] = self._processor.encode(normalized, add_eos=True, num_threads=num_threads)
        return tokens

    def decode(self, tokens: Iterable[Sequence[int]]) -> list[str]:
        """The sentence of each list of tokens, up to the first EOS; bytes that are no UTF-8 become U+FFFD."""
        ended = [list(ids[: ids.index(EOS)]) if EOS in ids else list(ids) for ids in tokens]
        num_threads = _NUM_THREADS if len(ended) > _FEW else 1
        # For an empty list the library returns one empty sentence.
        sentences: list[str] = self._processor.decode(ended, num_threads=num_threads) if ended else []
        return sentences


def train_vocabulary(lines: Iterable[str], size: int, path: Path) -> int:
    """Write a vocabulary of both languages' sentences by byte-pair encoding; its tokens also spell any byte.

    Digits are tokens of their own. The same sentences in the same order give the same file. SentencePiece's unigram
    model is not used: it chooses among strings that different characters follow, so that a frequent word becomes no
    token where a space always follows it, as "and" in the built-in phrases.

    Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (2016); Kudo and Richardson,
    "SentencePiece" (2018).

    Args:
        lines: sentences in NFC.
        size: number of tokens; fewer where the text has no more.
        path: of the file.

    Returns:
        The number of tokens.

    Raises:
        UserError: `size` is too small for the characters of the text, or there is none.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line[:_MAX_CHARACTERS] for line in lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            hard_vocab_limit=False,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=4 * _MAX_CHARACTERS + 1,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNKNOWN,
            num_threads=_NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        fix = f"its characters take {int(needed[1]):,}; set vocabulary_size to more" if needed else "it holds no words"
        raise UserError(
            f"the text has no vocabulary of {size:,} tokens: {fix}",
            code="no-vocabulary",
            setting="preprocess.vocabulary_size",
        ) from None
    write_atomically(path, model.getvalue())
    return Vocabulary.read(path).size
