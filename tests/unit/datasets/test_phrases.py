"""`enginery data phrases`: correct English and German, no pair twice, values that only validation has."""

import re
from collections import defaultdict
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from enginery.datasets import phrases
from enginery.datasets.phrases import phrase_pair, write_phrases
from tests.unit.refusals import refuses
from tests.unit.registered import files

BOOK, APPLE, LAMP = 0, 1, 2
EURO, DOLLAR, POUND = 0, 1, 2


NUMBERS = [
    (0, "zero", "null"),
    (1, "one", "eins"),
    (12, "twelve", "zwölf"),
    (16, "sixteen", "sechzehn"),
    (17, "seventeen", "siebzehn"),
    (21, "twenty-one", "einundzwanzig"),
    (30, "thirty", "dreißig"),
    (76, "seventy-six", "sechsundsiebzig"),
    (100, "one hundred", "einhundert"),
    (101, "one hundred and one", "einhunderteins"),
    (219, "two hundred and nineteen", "zweihundertneunzehn"),
    (1001, "one thousand and one", "eintausendeins"),
    (1205, "one thousand two hundred and five", "eintausendzweihundertfünf"),
    (21_000, "twenty-one thousand", "einundzwanzigtausend"),
    (101_040, "one hundred and one thousand and forty", "einhunderteintausendvierzig"),
    (640_511, "six hundred and forty thousand five hundred and eleven", "sechshundertvierzigtausendfünfhundertelf"),
    (1_000_000, "one million", "eine Million"),
    (1_000_001, "one million and one", "eine Million eins"),
    (7_021_300, "seven million twenty-one thousand three hundred", "sieben Millionen einundzwanzigtausenddreihundert"),
]
ORDINALS = [
    (1, "first", "erste"),
    (2, "second", "zweite"),
    (3, "third", "dritte"),
    (7, "seventh", "siebte"),
    (8, "eighth", "achte"),
    (9, "ninth", "neunte"),
    (12, "twelfth", "zwölfte"),
    (19, "nineteenth", "neunzehnte"),
    (20, "twentieth", "zwanzigste"),
    (21, "twenty-first", "einundzwanzigste"),
    (98, "ninety-eighth", "achtundneunzigste"),
    (100, "one hundredth", "einhundertste"),
    (101, "one hundred and first", "einhunderterste"),
    (113, "one hundred and thirteenth", "einhundertdreizehnte"),
    (4000, "four thousandth", "viertausendste"),
]
YEARS = [
    (1700, "seventeen hundred", "siebzehnhundert"),
    (1905, "nineteen oh five", "neunzehnhundertfünf"),
    (1987, "nineteen eighty-seven", "neunzehnhundertsiebenundachtzig"),
    (2000, "two thousand", "zweitausend"),
    (2001, "two thousand and one", "zweitausendeins"),
    (2010, "twenty ten", "zweitausendzehn"),
]


@pytest.mark.parametrize(
    ("kind", "number", "english", "german"),
    [
        *(("number", *row) for row in NUMBERS),
        *(("ordinal", *row) for row in ORDINALS),
        *(("year", *row) for row in YEARS),
    ],
)
def test_numbers(kind: str, number: int, english: str, german: str) -> None:
    spoken = [getattr(phrases, f"{language}_{kind}")(number) for language in ("english", "german")]
    assert spoken == [english, german]


@pytest.mark.parametrize(
    ("phrase", "from_digits", "from_words"),
    [
        (
            phrases.number_phrase(1205, hundreds=True),
            ("1,205", "eintausendzweihundertfünf"),
            ("twelve hundred and five", "1.205"),
        ),
        (phrases.counted_phrase(1, BOOK), ("1 book", "ein Buch"), ("one book", "1 Buch")),
        (phrases.counted_phrase(1, LAMP), ("1 lamp", "eine Lampe"), ("one lamp", "1 Lampe")),
        (phrases.counted_phrase(21, APPLE), ("21 apples", "einundzwanzig Äpfel"), ("twenty-one apples", "21 Äpfel")),
        (phrases.ordinal_phrase(2), ("the 2nd", "der zweite"), ("the second", "der 2.")),
        (phrases.ordinal_phrase(11), ("the 11th", "der elfte"), ("the eleventh", "der 11.")),
        (
            phrases.ordinal_phrase(1023),
            ("the 1,023rd", "der eintausenddreiundzwanzigste"),
            ("the one thousand and twenty-third", "der 1.023."),
        ),
        (
            phrases.money_phrase(1205, 0, DOLLAR, hundreds=True),
            ("$1,205", "eintausendzweihundertfünf Dollar"),
            ("twelve hundred and five dollars", "1.205 Dollar"),
        ),
        (phrases.money_phrase(1, 0, EURO), ("€1", "ein Euro"), ("one euro", "1 Euro")),
        (
            phrases.money_phrase(2, 1, POUND),
            ("£2.01", "zwei Pfund und ein Penny"),
            ("two pounds and one penny", "2,01 Pfund"),
        ),
        (phrases.money_phrase(0, 50, EURO), ("50 cents", "fünfzig Cent"), ("fifty cents", "50 Cent")),
        (
            phrases.date_phrase(date(1987, 5, 3)),
            ("on 3 May 1987", "am dritten Mai neunzehnhundertsiebenundachtzig"),
            ("on the third of May nineteen eighty-seven", "am 3. Mai 1987"),
        ),
        (
            phrases.date_phrase(date(2026, 3, 31), weekday=True),
            ("on Tuesday, 31 March 2026", "am Dienstag, dem einunddreißigsten März zweitausendsechsundzwanzig"),
            ("on Tuesday, the thirty-first of March twenty twenty-six", "am Dienstag, dem 31. März 2026"),
        ),
        (
            phrases.time_phrase(16, 20),
            ("at 4:20 pm", "um zwanzig nach vier nachmittags"),
            ("at twenty past four in the afternoon", "um 16:20 Uhr"),
        ),
        (
            phrases.time_phrase(15, 30),
            ("at 3:30 pm", "um halb vier nachmittags"),
            ("at half past three in the afternoon", "um 15:30 Uhr"),
        ),
        (
            phrases.time_phrase(0, 30),
            ("at 12:30 am", "um halb eins nachts"),
            ("at half past twelve in the morning", "um 0:30 Uhr"),
        ),
        (
            phrases.time_phrase(12, 45),
            ("at 12:45 pm", "um Viertel vor eins mittags"),
            ("at a quarter to one in the afternoon", "um 12:45 Uhr"),
        ),
        (
            phrases.time_phrase(23, 35),
            ("at 11:35 pm", "um fünf nach halb zwölf nachts"),
            ("at twenty-five to twelve in the evening", "um 23:35 Uhr"),
        ),
        (
            phrases.time_phrase(6, 59),
            ("at 6:59 am", "um eine Minute vor sieben morgens"),
            ("at one minute to seven in the morning", "um 6:59 Uhr"),
        ),
        (
            phrases.time_phrase(13, 0),
            ("at 1:00 pm", "um ein Uhr nachmittags"),
            ("at one o'clock in the afternoon", "um 13:00 Uhr"),
        ),
        (phrases.time_phrase(12, 0), ("at 12:00 pm", "um zwölf Uhr mittags"), ("at noon", "um 12:00 Uhr")),
        (phrases.time_phrase(0, 0), ("at 12:00 am", "um zwölf Uhr nachts"), ("at midnight", "um 0:00 Uhr")),
        (
            phrases.railway_phrase(15, 5),
            ("at 15:05", "um fünfzehn Uhr fünf"),
            ("at fifteen zero five hours", "um 15:05 Uhr"),
        ),
        (phrases.railway_phrase(1, 0), ("at 01:00", "um ein Uhr"), ("at zero one hundred hours", "um 1:00 Uhr")),
        (
            phrases.railway_phrase(0, 21),
            ("at 00:21", "um null Uhr einundzwanzig"),
            ("at zero zero twenty-one hours", "um 0:21 Uhr"),
        ),
    ],
)
def test_phrases(phrase: phrases.Phrase, from_digits: tuple[str, str], from_words: tuple[str, str]) -> None:
    assert (phrase.pair(True), phrase.pair(False)) == (from_digits, from_words)


def test_a_target_follows_from_its_source() -> None:
    rng, targets = np.random.default_rng(0), defaultdict(set)
    for _ in range(20_000):
        source, target = phrase_pair(rng)
        targets[source].add(target)
        assert re.search(r"\d", source) is None or re.search(r"\d", target) is None
        assert "{" not in source + target
    assert {len(each) for each in targets.values()} == {1}


def test_no_source_twice_the_same_each_time_and_others_for_another_seed(tmp_path: Path) -> None:
    def pairs(folder: str, **options: int) -> list[str]:
        write_phrases(tmp_path / folder, num_pairs=3000, **options)
        return (tmp_path / folder / "pairs.tsv").read_text(encoding="utf-8").splitlines()

    first = pairs("first")
    assert len(first) == len({line.split("\t")[0] for line in first}) == 3000
    assert files(tmp_path / "first").keys() == {"pairs.tsv", "dataset.json"}
    assert pairs("again") == first
    assert len(set(pairs("other", seed=1)) & set(first)) < 300
    assert write_phrases(tmp_path / "first", num_pairs=3000).already_complete
    with refuses("other-dataset"):
        write_phrases(tmp_path / "first", num_pairs=3001)


def test_numbers_that_no_other_part_has(tmp_path: Path) -> None:
    write_phrases(tmp_path / "data", num_pairs=4000)
    lines = (tmp_path / "data/pairs.tsv").read_text(encoding="utf-8").splitlines()
    numbers = [set(re.findall(r"\d[\d.,]{3,}", line)) for line in lines]
    seen = set().union(*numbers[800:])
    assert sum(bool(own - seen) for own in numbers[:800]) > 80
