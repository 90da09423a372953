"""BLEU and chrF are sacrebleu's, the paired bootstrap follows from sums, and what is shown of translations."""

import numpy as np
import pytest
import sacrebleu

from components.common.tasks.translation.predictions import TextPredictions
from components.common.tasks.translation.scores import bleu_pct, bleu_statistics, chrf_pct, signatures

# Of the Universal Declaration of Human Rights.
RIGHTS = (
    "All human beings are born free and equal in dignity and rights.",
    "They are endowed with reason and conscience and should act towards one another in a spirit of brotherhood.",
    "Everyone is entitled to all the rights and freedoms set forth in this Declaration, without any distinction.",
    "Everyone has the right to life, liberty and security of person.",
    "No one shall be held in slavery or servitude; slavery and the slave trade shall be prohibited in all their forms.",
    "No one shall be subjected to torture or to cruel, inhuman or degrading treatment or punishment.",
    "Everyone has the right to recognition everywhere as a person before the law.",
    "All are equal before the law and are entitled without any discrimination to equal protection of the law.",
    "No one shall be subjected to arbitrary arrest, detention or exile.",
    "Everyone has the right to freedom of movement and residence within the borders of each State.",
    "Everyone has the right to leave any country, including his own, and to return to his country.",
    "Everyone has the right to a nationality.",
    "Everyone has the right to own property alone as well as in association with others.",
    "The will of the people shall be the basis of the authority of government.",
    "Everyone has the right to rest and leisure, including reasonable limitation of working hours.",
    "Education shall be free, at least in the elementary and fundamental stages.",
)
OPTIONS = "nrefs:1|case:mixed|eff:no"


def references(times: int = 4) -> list[str]:
    return list(RIGHTS) * times


def disturbed(sentences: list[str], share: float, seed: int = 1) -> list[str]:
    """With this share of the words left out or replaced."""
    random = np.random.default_rng(seed)
    found = []
    for sentence in sentences:
        words = sentence.split()
        kept = [word if random.random() > share else random.choice(["", "the", word.upper()]) for word in words]
        found.append(" ".join(filter(None, kept)))
    return found


@pytest.mark.parametrize("language", ["en", "zh-Hans", "ja"])
def test_bleu_of_the_sums_is_that_of_sacrebleu(language: str) -> None:
    texts = references()
    hypotheses = [*disturbed(texts[:-3], 0.2), "", "?", texts[-1]]
    tokenizer = {"en": "13a", "zh-Hans": "zh", "ja": "char"}[language]
    assert signatures(language)["BLEU"] == f"{OPTIONS}|tok:{tokenizer}|smooth:exp|version:{sacrebleu.__version__}"
    counted = bleu_statistics(hypotheses, texts, language)
    found = bleu_pct(counted.sum(axis=0)[None])
    theirs = sacrebleu.corpus_bleu(hypotheses, [texts], tokenize=tokenizer)
    assert found[0] == pytest.approx(theirs.score, abs=1e-9)
    assert 20 < found[0] < 95
    which = np.random.default_rng(3).integers(0, len(texts), len(texts))  # a draw of the bootstrap
    weights = np.bincount(which, minlength=len(texts))
    drawn = sacrebleu.corpus_bleu([hypotheses[i] for i in which], [[texts[i] for i in which]], tokenize=tokenizer)
    assert bleu_pct((weights @ counted)[None])[0] == pytest.approx(drawn.score, abs=1e-9)
    alone = bleu_pct(counted, of_sentences=True)
    every = [
        sacrebleu.sentence_bleu(own, [text], tokenize=tokenizer, use_effective_order=True).score
        for own, text in zip(hypotheses, texts, strict=True)
    ]
    assert alone.tolist() == pytest.approx(every, abs=1e-9)
    assert chrf_pct(hypotheses, texts) == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [texts]).score, abs=1e-9)


def test_empty_sentences_and_no_sentences_have_a_score() -> None:
    found = TextPredictions.of_texts(["", " ", "a b c d", ""], ["a", "", "a b c d", "\u202e"], "en")
    assert found.num_undefined == 3
    assert found.per_image.tolist() == [0.0, 0.0, pytest.approx(100.0), 0.0]
    assert 0 < found.score_pct < 100
    assert found.measures()["chrf_pct"] > 0
    nothing = found.select(slice(0, 0))
    assert (nothing.score_pct, nothing.measures()) == (0.0, {"chrf_pct": 0.0})
    silent = TextPredictions.of_texts([""] * 4, ["a", "b", "c", "d"], "en")
    same = silent.comparison(silent)
    assert (silent.score_pct, same.delta_points, same.mcnemar_p) == (0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="1 translations of 2"):
        TextPredictions.of_texts(["a"], ["a", "b"], "en")


def test_what_is_shown_of_sentences_that_differ() -> None:
    texts = references(1)
    fp32 = TextPredictions.of_texts(texts, texts, "en")
    changed = list(texts)
    changed[4], changed[7], changed[9] = "Nothing of it.", disturbed([texts[7]], 0.3)[0], f"{texts[9]}  "
    own = TextPredictions.of_texts(changed, texts, "en")
    assert own.num_differing(fp32) == 3
    assert own.agreement_pct(fp32) == pytest.approx(100 * 13 / 16)
    assert own.differing(fp32, 24).tolist() == [4, 7, 9]
    assert own.differing(fp32, 1).tolist() == [4]
    assert own.described(4, ()) == (texts[4], "Nothing of it.")
    long = TextPredictions.of_texts(["a" * 9999], ["b"], "en")
    assert len(long.described(0, ())[1]) == 501
    assert (own.arrays()[""] == own.statistics).all()
