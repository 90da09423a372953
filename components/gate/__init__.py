"""Decide whether a precision may be promoted: measured values against thresholds.

Reads:   a Report.
Writes:  a Verdict: manifest.json with every check's measured value, threshold and verdict.
Needs:   nothing. The only step that fails a pipeline for quality: it writes its verdict first, then exits with 3.
"""
