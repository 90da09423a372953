"""Translation: a sentence in another language, scored by BLEU. `scores` and `predictions` need no torch."""
