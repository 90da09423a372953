"""Phrases: English and German numbers, dates, amounts of money and clock times, from digits to words and back."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from components.common.contracts.manifests import write_atomically
from enginery.datasets import DatasetSummary, check_range, write_dataset

SYNTHESIS_VERSION = 1
"""Raise it when a change alters the pairs of a given seed."""

MAX_PAIRS = 1_000_000  # takes half a minute

Gender = Literal["m", "f", "n"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_EN_UNITS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_EN_TENS = _words("- - twenty thirty forty fifty sixty seventy eighty ninety")
_EN_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
_EN_ORDINALS |= {"twelve": "twelfth"}
_DE_UNITS = _words(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn "
    "achtzehn neunzehn"
)
_DE_TENS = _words("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
_DE_ORDINALS = {1: "erst", 3: "dritt", 7: "siebt", 8: "acht"}
_EN_MONTHS = _words("January February March April May June July August September October November December")
_DE_MONTHS = _words("Januar Februar März April Mai Juni Juli August September Oktober November Dezember")
_EN_DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_DE_DAYS = _words("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag")
_SIZES = ((1_000_000, "million"), (1000, "thousand"), (100, "hundred"))


def english_number(number: int) -> str:
    """A cardinal number below ten million, as in British English: "one thousand two hundred and five"."""
    if number < 20:
        return _EN_UNITS[number]
    if number < 100:
        return _EN_TENS[number // 10] + (f"-{_EN_UNITS[number % 10]}" if number % 10 else "")
    size, name = next(each for each in _SIZES if number >= each[0])
    rest = number % size
    joint = " and " if rest < 100 else " "
    return f"{english_number(number // size)} {name}" + (joint + english_number(rest) if rest else "")


def english_hundreds(number: int) -> str:
    """A number from 1,100 to 9,999 as people say it: "twelve hundred and five"."""
    rest = number % 100
    return f"{english_number(number // 100)} hundred" + (f" and {english_number(rest)}" if rest else "")


def english_ordinal(number: int) -> str:
    """An ordinal number: "twenty-first"."""
    words = english_number(number)
    last = words.replace("-", " ").split()[-1]
    ordinal = _EN_ORDINALS.get(last, f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")
    return words[: len(words) - len(last)] + ordinal


def english_year(year: int) -> str:
    """A year from 1100 to 2099: "nineteen oh five", "two thousand and five", "twenty ten"."""
    century, rest = divmod(year, 100)
    if century == 20 and rest < 10:
        return english_number(year)
    tail = english_number(rest) if rest >= 10 else f"oh {_EN_UNITS[rest]}" if rest else "hundred"
    return f"{english_number(century)} {tail}"


def german_number(number: int, gender: Gender | None = None) -> str:
    """A cardinal number below ten million: "eintausendzweihundertfünf".

    A 1 at the end is "eins" alone, and before a noun (one thing: number 1) "ein" or "eine" by its gender.
    """
    if number == 1 and gender:
        return "eine" if gender == "f" else "ein"
    millions, rest = divmod(number, 1_000_000)
    if millions:
        words = "eine Million" if millions == 1 else f"{german_number(millions)} Millionen"
        return words + (f" {german_number(rest)}" if rest else "")
    thousands, hundreds = divmod(number, 1000)
    return (_german_hundreds(thousands, "ein") + "tausend" if thousands else "") + (
        _german_hundreds(hundreds, "eins") if hundreds or not number else ""
    )


def _german_hundreds(number: int, one: str) -> str:
    """A number below 1,000 whose last 1 is `one`."""
    hundreds, rest = divmod(number, 100)
    words = {0: "", 1: "einhundert"}.get(hundreds, f"{_DE_UNITS[hundreds]}hundert")
    if hundreds and not rest:
        return words
    if rest < 20:
        return words + (one if rest == 1 else _DE_UNITS[rest])
    tens, units = divmod(rest, 10)
    joint = {0: "", 1: "einund"}.get(units, f"{_DE_UNITS[units]}und")
    return words + joint + _DE_TENS[tens]


def german_ordinal(number: int, ending: str = "e") -> str:
    """An ordinal number from 1 to 999,999: "einundzwanzigste"; "am ersten" with the ending "en"."""
    last = number % 100
    if not 0 < last < 20:
        return f"{german_number(number)}st{ending}"
    before = german_number(number - last) if number > last else ""
    return before + _DE_ORDINALS.get(last, f"{_DE_UNITS[last]}t") + ending


def german_year(year: int) -> str:
    """A year from 1100 to 2099: "neunzehnhundertfünf", "zweitausendfünf"."""
    century, rest = divmod(year, 100)
    if century >= 20:
        return german_number(year)
    return f"{german_number(century)}hundert" + (german_number(rest) if rest else "")


def english_digits(number: int) -> str:
    """1,205."""
    return f"{number:,}"


def german_digits(number: int) -> str:
    """1.205."""
    return english_digits(number).replace(",", ".")


@dataclass(frozen=True)
class Phrase:
    """One thing in all forms."""

    english_digits: str
    english_words: str
    german_digits: str
    german_words: str

    def pair(self, from_digits: bool) -> tuple[str, str]:
        """English in one form, German in the other."""
        if from_digits:
            return self.english_digits, self.german_words
        return self.english_words, self.german_digits


_NOUNS: tuple[tuple[str, str, str, str, Gender], ...] = (
    ("book", "books", "Buch", "Bücher", "n"),
    ("apple", "apples", "Apfel", "Äpfel", "m"),
    ("lamp", "lamps", "Lampe", "Lampen", "f"),
    ("table", "tables", "Tisch", "Tische", "m"),
    ("house", "houses", "Haus", "Häuser", "n"),
    ("car", "cars", "Auto", "Autos", "n"),
    ("flower", "flowers", "Blume", "Blumen", "f"),
    ("bottle", "bottles", "Flasche", "Flaschen", "f"),
    ("chair", "chairs", "Stuhl", "Stühle", "m"),
    ("picture", "pictures", "Bild", "Bilder", "n"),
)
# Of each currency its sign, and the English and German names of one and of several, whole and in hundredths.
_CURRENCIES = (
    ("€", ("euro", "euros"), ("cent", "cents"), "Euro", ("Cent", "Cent")),
    ("$", ("dollar", "dollars"), ("cent", "cents"), "Dollar", ("Cent", "Cent")),
    ("£", ("pound", "pounds"), ("penny", "pence"), "Pfund", ("Penny", "Pence")),
)


def number_phrase(number: int, *, hundreds: bool) -> Phrase:
    """A number alone; with `hundreds` as english_hundreds says it."""
    words = english_hundreds(number) if hundreds else english_number(number)
    return Phrase(english_digits(number), words, german_digits(number), german_number(number))


def counted_phrase(number: int, noun: int) -> Phrase:
    """So many things; no number like 101, whose German form before a noun is disputed."""
    one, several, eines, mehrere, gender = _NOUNS[noun]
    english, german = (one, eines) if number == 1 else (several, mehrere)
    return Phrase(
        f"{english_digits(number)} {english}",
        f"{english_number(number)} {english}",
        f"{german_digits(number)} {german}",
        f"{german_number(number, gender)} {german}",
    )


def ordinal_phrase(number: int) -> Phrase:
    """The 21st."""
    suffix = "th" if 10 < number % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return Phrase(
        f"the {english_digits(number)}{suffix}",
        f"the {english_ordinal(number)}",
        f"der {german_digits(number)}.",
        f"der {german_ordinal(number)}",
    )


def money_phrase(whole: int, cents: int, currency: int, *, hundreds: bool = False) -> Phrase:
    """An amount; `whole` or `cents` may be 0, but not both. No number like 101, as in counted_phrase."""
    sign, units, parts, einheit, teile = _CURRENCIES[currency]
    words = english_hundreds(whole) if hundreds else english_number(whole)
    english = [f"{words} {units[whole != 1]}"] if whole else []
    german = [f"{german_number(whole, 'm')} {einheit}"] if whole else []
    if cents:
        english.append(f"{english_number(cents)} {parts[cents != 1]}")
        german.append(f"{german_number(cents, 'm')} {teile[cents != 1]}")
    if whole:
        fraction = f"{cents:02d}" if cents else ""
        english_amount = f"{sign}{english_digits(whole)}" + (f".{fraction}" if cents else "")
        german_amount = f"{german_digits(whole)}" + (f",{fraction}" if cents else "") + f" {einheit}"
    else:
        english_amount, german_amount = f"{cents} {parts[cents != 1]}", f"{cents} {teile[cents != 1]}"
    return Phrase(english_amount, " and ".join(english), german_amount, " und ".join(german))


def date_phrase(day: date, *, weekday: bool = False) -> Phrase:
    """A day with "on", and perhaps the day of the week: "on Sunday, 3 May 1987"."""
    english, german = _EN_MONTHS[day.month - 1], _DE_MONTHS[day.month - 1]
    name_of_day = _EN_DAYS[day.weekday()]
    on = f"on {name_of_day}, " if weekday else "on "
    am = f"am {_DE_DAYS[day.weekday()]}, dem " if weekday else "am "
    return Phrase(
        f"{on}{day.day} {english} {day.year}",
        f"{on}the {english_ordinal(day.day)} of {english} {english_year(day.year)}",
        f"{am}{day.day}. {german} {day.year}",
        f"{am}{german_ordinal(day.day, 'en')} {german} {german_year(day.year)}",
    )


def time_phrase(hour: int, minute: int) -> Phrase:
    """A time of day with "at": on a clock of twelve hours in digits and in words ("half past three"), in German both.

    "3:30 pm" becomes "halb vier nachmittags", and "half past three in the afternoon" "15:30 Uhr".
    """
    part = "in the morning" if hour < 12 else "in the afternoon" if hour < 18 else "in the evening"
    ends = {5: "nachts", 10: "morgens", 12: "vormittags", 13: "mittags", 18: "nachmittags", 22: "abends", 24: "nachts"}
    german_part = next(name for end, name in ends.items() if hour < end)
    digits = f"at {hour % 12 or 12}:{minute:02d} {'am' if hour < 12 else 'pm'}"
    return Phrase(
        digits,
        f"at {_english_time(hour, minute)}" + ("" if minute == hour % 12 == 0 else f" {part}"),
        f"um {hour}:{minute:02d} Uhr",
        f"um {_german_time(hour, minute)} {german_part}",
    )


def railway_phrase(hour: int, minute: int) -> Phrase:
    """The same on a clock of 24 hours: "at 15:30" and "at fifteen thirty hours" are "um fünfzehn Uhr dreißig"."""
    first, last = (english_number(each) if each >= 10 else f"zero {_EN_UNITS[each]}" for each in (hour, minute))
    return Phrase(
        f"at {hour:02d}:{minute:02d}",
        f"at {first} {last if minute else 'hundred'} hours",
        f"um {hour}:{minute:02d} Uhr",
        f"um {german_number(hour, 'm')} Uhr" + (f" {german_number(minute)}" if minute else ""),
    )


def _english_time(hour: int, minute: int) -> str:
    if not minute:
        return {0: "midnight", 12: "noon"}.get(hour, f"{english_number(hour % 12)} o'clock")
    past = minute <= 30
    away = minute if past else 60 - minute
    spoken = english_number((hour if past else hour + 1) % 12 or 12)
    if away in (15, 30):
        name = {15: "a quarter", 30: "half"}[away]
    else:
        name = english_number(away)
        if away % 5:
            name += " minute" if away == 1 else " minutes"
    return f"{name} {'past' if past else 'to'} {spoken}"


def _german_time(hour: int, minute: int) -> str:
    this, following = (german_number(each % 12 or 12) for each in (hour, hour + 1))
    if not minute:
        return f"{german_number(hour % 12 or 12, 'm')} Uhr"
    if minute == 30:
        return f"halb {following}"
    if minute in (25, 35):
        return f"fünf {'vor' if minute == 25 else 'nach'} halb {following}"
    past = minute < 30
    away = minute if past else 60 - minute
    if away == 15:
        name = "Viertel"
    elif away % 5 == 0:
        name = german_number(away)
    else:
        name = f"{german_number(away, 'f')} {'Minute' if away == 1 else 'Minuten'}"
    return f"{name} {'nach' if past else 'vor'} {this if past else following}"


def _draw_number(rng: np.random.Generator, max_digits: int = 7) -> int:
    """As many of one length as of another, some of them round; 1 or more."""
    digits = int(rng.integers(1, max_digits + 1))
    number = int(rng.integers(10 ** (digits - 1), 10**digits))
    if rng.random() < 0.25:
        number -= number % 10 ** int(rng.integers(0, digits))
    return number


def _draw_countable(rng: np.random.Generator, least: int) -> int:
    while (number := _draw_number(rng, 5)) < least or (number > 1 and number % 100 == 1):
        pass
    return number


def _draw_plain(rng: np.random.Generator) -> Phrase:
    number = _draw_number(rng)
    return number_phrase(number, hundreds=_has_hundreds(number) and rng.random() < 0.5)


def _has_hundreds(number: int) -> bool:
    return 1100 <= number < 10_000 and number // 100 % 10 != 0


def _draw_counted(rng: np.random.Generator, least: int) -> Phrase:
    return counted_phrase(_draw_countable(rng, least), int(rng.integers(len(_NOUNS))))


def _draw_money(rng: np.random.Generator, least: int) -> Phrase:
    whole, cents, kind = _draw_countable(rng, least), int(rng.integers(least, 100)), rng.random()
    if kind < 0.5:
        cents = 0
    elif kind < 0.55:
        whole = 0
    hundreds = _has_hundreds(whole) and rng.random() < 0.5
    return money_phrase(whole, cents, int(rng.integers(len(_CURRENCIES))), hundreds=hundreds)


def _draw_date(rng: np.random.Generator, weekday: bool) -> Phrase:
    first, last = date(1700, 1, 1).toordinal(), date(2099, 12, 31).toordinal()
    return date_phrase(date.fromordinal(int(rng.integers(first, last + 1))), weekday=weekday)


def _draw_time(rng: np.random.Generator) -> Phrase:
    hour, minute = int(rng.integers(24)), int(rng.integers(60))
    return railway_phrase(hour, minute) if rng.random() < 0.3 else time_phrase(hour, minute)


# Of several things and of what is paid none is one: its German article would depend on the sentence.
_DRAWERS: dict[str, Callable[[np.random.Generator], Phrase]] = {
    "{number}": _draw_plain,
    "{counted}": partial(_draw_counted, least=1),
    "{several}": partial(_draw_counted, least=2),
    "{ordinal}": lambda rng: ordinal_phrase(_draw_number(rng, 4)),
    "{money}": partial(_draw_money, least=1),
    "{payment}": partial(_draw_money, least=2),
    "{date}": partial(_draw_date, weekday=False),
    "{weekday}": partial(_draw_date, weekday=True),
    "{time}": _draw_time,
}
# English and German; all phrases of a sentence are in the same form.
_TEMPLATES = (
    ("{number}", "{number}"),
    ("{counted}", "{counted}"),
    ("{ordinal}", "{ordinal}"),
    ("{money}", "{money}"),
    ("{date}", "{date}"),
    ("{weekday}", "{weekday}"),
    ("{time}", "{time}"),
    ("she was born {date}", "sie wurde {date} geboren"),
    ("the train leaves {time}", "der Zug fährt {time} ab"),
    ("{time} {date}", "{date} {time}"),
    ("we paid {payment} {weekday}", "wir zahlten {payment} {weekday}"),
    ("he bought {several} for {payment}", "er kaufte {several} für {payment}"),
)


def phrase_pair(rng: np.random.Generator) -> tuple[str, str]:
    """An English sentence and its German one. Everything random is drawn from `rng`, in a fixed order."""
    english, german = _TEMPLATES[rng.integers(len(_TEMPLATES))]
    from_digits = bool(rng.random() < 0.5)
    for slot, draw in _DRAWERS.items():
        if slot in english:
            source, target = draw(rng).pair(from_digits)
            english, german = english.replace(slot, source), german.replace(slot, target)
    return english, german


def write_phrases(directory: Path, *, num_pairs: int = 80_000, seed: int = 0) -> DatasetSummary:
    """Write DIRECTORY/pairs.tsv: an English sentence, a tab and its German one a line, none twice.

    Args:
        directory: New, empty, or of an earlier run with the same arguments.
        num_pairs: 100 to MAX_PAIRS.
        seed: 0 or more. Another seed gives other pairs.

    Raises:
        UserError: an argument is out of range, or the directory holds something else.
    """
    check_range(num_pairs=(num_pairs, 100, MAX_PAIRS), seed=(seed, 0))
    arguments: dict[str, str | int] = {
        "dataset": "phrases",
        "num_pairs": num_pairs,
        "seed": seed,
        "synthesis_version": SYNTHESIS_VERSION,
    }

    def write() -> None:
        rng, pairs = np.random.default_rng(seed), dict[str, str]()
        while len(pairs) < num_pairs:
            pairs.setdefault(*phrase_pair(rng))
        lines = "".join(f"{source}\t{target}\n" for source, target in pairs.items())
        write_atomically(directory / "pairs.tsv", lines.encode())

    return write_dataset(directory, arguments, write, num_images=num_pairs, num_classes=0)
