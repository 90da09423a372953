"""The gate's rate of passes of a drop that it must not pass, and of one that it should.

    python -m benchmarks.gate_power --machine cpu-2core

Draws lost and gained images of many validation sets from a true drop and a true discordance, and asks the gate's own
checks about each: exactly at the budget, where at most 5 % may pass, and without a drop.
"""

from collections import Counter
from typing import Any

import click
import numpy as np

from benchmarks.results import Results, result_options
from components.common.contracts.records import AccuracyReport, AccuracyRow, PairedComparison
from components.common.contracts.verdict import Thresholds, accuracy_checks

NUM_DRAWS = 20_000
NUM_IMAGES = (359, 500, 719, 1000, 2000, 5000)
BUDGETS_POINTS = (0.5, 1.0, 2.0)
DISCORDANCES = (1.0, 2.0, 4.0)  # lost and gained images over the budget; 1: none is gained
FP32_PCT = 90.0


def verdict_of(num_images: int, lost: int, gained: int, budget_points: float) -> str:
    """The gate's verdict on a drop."""
    comparison = PairedComparison.of(num_images, lost, gained)
    facts: dict[str, Any] = {"runtime": "openvino", "num_images": num_images}
    fp32 = AccuracyRow(precision="fp32", score_pct=FP32_PCT, **facts)
    own = AccuracyRow(precision="int8", score_pct=FP32_PCT + comparison.delta_points, comparison=comparison, **facts)
    digests = dict.fromkeys(("dataset_digest", "split_digest", "bundle_digest"), "")
    accuracy = AccuracyReport(rows=(fp32, own), most_frequent_pct=10.0, **digests)
    thresholds = Thresholds(max_drop_points=budget_points)
    return next(check.verdict for check in accuracy_checks(thresholds, accuracy, own))


def shares(
    num_images: int, budget_points: float, *, drop_pct: float, discordance_pct: float, num_draws: int = NUM_DRAWS
) -> dict[str, float]:
    """Share of each verdict in %, over validation sets of so many images, drawn with a true drop and discordance."""
    lost, gained = (discordance_pct + drop_pct) / 200, (discordance_pct - drop_pct) / 200
    draws = np.random.default_rng(0).multinomial(num_images, [lost, gained, 1 - lost - gained], size=num_draws)
    verdicts: Counter[str] = Counter()
    for (lost_images, gained_images), times in Counter(map(tuple, draws[:, :2].tolist())).items():
        verdicts[verdict_of(num_images, lost_images, gained_images, budget_points)] += times
    return {word: 100 * verdicts[word] / num_draws for word in ("pass", "fail", "not enough evidence")}


@click.command()
@result_options
def main(results: Results) -> None:
    """Measure and write gate_power.json."""
    runs: list[dict[str, float]] = []
    for budget in BUDGETS_POINTS:
        for num_images in NUM_IMAGES:
            for drop, discordance in [(budget, budget * ratio) for ratio in DISCORDANCES] + [(0.0, 1.0)]:
                found = shares(num_images, budget, drop_pct=drop, discordance_pct=discordance)
                case = {"budget_points": budget, "num_images": num_images, "drop_points": drop}
                runs.append({**case, "discordance_pct": discordance, **found})
                print(runs[-1], flush=True)
    at_budget = [run["pass"] for run in runs if run["drop_points"]]
    measures = {
        "pass_pct_at_budget_max": max(at_budget),
        "pass_pct_at_budget_mean": sum(at_budget) / len(at_budget),
        "num_cases_at_budget": len(at_budget),
    }
    for run in runs:
        if not run["drop_points"]:
            measures[f"pass_pct_no_drop_{run['num_images']}_images_{run['budget_points']:g}_points"] = run["pass"]
    results.write(
        "gate_power",
        measures=measures,
        runs=runs,
        notes=(
            f"{NUM_DRAWS:,} drawn validation sets each, seed 0, judged by the gate's own check of the top-1 drop. At "
            "the budget: the true drop is the budget, lost and gained images together are 1 to 4 times as many. No "
            "drop: 1 % of the images differ, as many lost as gained. Shares of passes in %; their standard error is "
            "0.16 at 5 %."
        ),
    )


if __name__ == "__main__":
    main()
