"""Sentences that come from outside: what can be translated of them."""

import re
import unicodedata
from collections.abc import Sequence

from components.common.contracts.errors import UserError
from components.common.tasks.translation.runners import BATCH_SIZE, Translator

# What ends a line for some programs, or turns the direction of text, beside the control characters themselves.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
# Unicode's Default_Ignorable_Code_Point: what shows nothing, and joins or parts letters in some scripts.
_INVISIBLE = re.compile(
    "[\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2060-\u206f\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0000-\U000e0fff]"
)
# sacrebleu's, by language without spaces between words; its own choice for Japanese and Korean needs dictionaries.
BLEU_TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char", "th": "char", "lo": "char", "my": "char", "km": "char"}


def base_language(code: str) -> str:
    """Return "pt" of "pt-BR"."""
    return code.partition("-")[0].lower()


def visible(text: str) -> str:
    """Text as readers tell it from other text: one space between words, and nothing that is not seen."""
    return " ".join((text if text.isascii() else _INVISIBLE.sub("", text)).split())


def read_sentence(given: bytes | str, name: str) -> str:
    """Text in Unicode's form NFC without space around it.

    Args:
        given: the text, or its bytes in UTF-8.
        name: of the sentence in messages, such as "sentence 3".

    Raises:
        UserError: it is not UTF-8, empty or invisible, or holds control characters.
    """
    try:
        text = (given.decode() if isinstance(given, bytes) else given).strip()
        text.encode()
    except UnicodeError as error:
        message = f"{name} is not UTF-8 ({error.reason} at {error.start}); convert it"  # type: ignore[attr-defined]
        raise UserError(message, code="not-utf8") from None
    if not visible(text):
        raise UserError(f"{name} is empty; leave it out", code="empty-sentence")
    if found := CONTROL.search(text):
        raise UserError(
            f"{name} holds the control character U+{ord(found[0]):04X} at character {found.start() + 1}; remove it",
            code="control-character",
        )
    return unicodedata.normalize("NFC", text)


def on_one_line(translation: str) -> str:
    """A translation whose control characters, which a network may spell byte by byte, are spaces."""
    return CONTROL.sub(" ", translation)


def translate_each(
    translator: Translator, sentences: Sequence[bytes | str], *, beam_size: int = 1, batch_size: int = BATCH_SIZE
) -> list[str | UserError]:
    """A translation of each sentence, or why there is none, which calls the sentence "it"."""
    read: list[list[int] | UserError] = []
    for sentence in sentences:
        try:
            read += translator.tokens([read_sentence(sentence, "it")])
        except UserError as error:
            read.append(UserError(str(error).replace("sentence 1 ", "it ", 1), code=error.code))
    good = [ids for ids in read if isinstance(ids, list)]
    said = iter(translator.translate_tokens(good, beam_size=beam_size, batch_size=batch_size))
    return [next(said) if isinstance(ids, list) else ids for ids in read]
