"""A page and a picture of what `benchmarks.networks` measured.

python -m benchmarks.networks_page benchmarks/results/h200/networks.json docs/examples/h200
"""

import json
from pathlib import Path
from typing import Any

import click
import matplotlib
from matplotlib.figure import Figure

_HEAD = (
    "network",
    "pixels",
    "FP32 top-1 %",
    "delta FP16",
    "delta INT8",
    "drop at most",
    "FP32",
    "FP16",
    "INT8 everywhere",
    "chosen",
    "what",
    "over FP16",
    "batch 1",
    "build s",
    "search s",
)


@click.command()
@click.argument("result", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
def main(result: Path, folder: Path) -> None:
    record = json.loads(result.read_text())
    (folder / "networks.md").write_text(page(record))
    write_picture(record["runs"], folder / "networks.png")


def page(result: dict[str, Any]) -> str:
    """Markdown: a table of the networks, by their gain, and those for which INT8 does not pay."""
    rows = _by_gain(result["runs"])
    slow = ", ".join(row["network"] for row in rows if row["chosen"] != "int8" and row["within_budget"])
    inaccurate = ", ".join(row["network"] for row in rows if not row["within_budget"])
    measures, machine = result["measures"], result["machine"]
    built_by = "".join(f", TensorRT {version}" for version in sorted({row.get("tensorrt", "") for row in rows} - {""}))
    over_fp16, over_best = (measures[f"chosen_over_{name}"] for name in ("fp16_b128_geomean", "best_b128_min"))
    lines = [
        "# Which networks are faster in INT8?",
        "",
        f"{result['date']}, {machine['gpu']}{built_by}. Each network was trained on "
        f"40,000 textures and validated on {rows[0]['num_images']:,} others. {result['notes']}",
        "",
        f"The chosen engine is {over_fp16:.3f} times as fast as FP16 at batch 128 in the geometric mean of {len(rows)} "
        f"networks, and at least {over_best:.3f} times the faster of FP16 and, where it is within the accuracy budget, "
        f"INT8 everywhere. FP16 is chosen where INT8 does not pay: {slow or 'none'}; and where its drop may exceed the "
        f"budget: {inaccurate or 'none'}.",
        "",
        "![Speed over FP16 of the chosen engine and of INT8 everywhere](networks.png)",
        "",
        "Deltas and drops are of top-1, in points; the drop's bound is the upper end of the one-sided 95 % interval of "
        "INT8. Speeds are images/s at batch 128; the column batch 1 is chosen over FP16 there.",
        "",
        f"| {' | '.join(_HEAD)} |",
        f"|---{'|--:' * 9}|---{'|--:' * 4}|",
        *(f"| {' | '.join(_cells(row))} |" for row in rows),
        "",
    ]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    kind = f"{row['int8_layers']} of {row['layers']} layers in INT8" if row["chosen"] == "int8" else "FP16"
    speeds = [row[f"images_per_s_{name}_b128"] for name in ("fp32", "fp16", "int8_everywhere", row["chosen"])]
    return [
        row["network"],
        str(row["image_size"]),
        f"{row['top1_pct_fp32']:.2f}",
        *(f"{row[f'delta_points_{precision}']:+.2f}" for precision in ("fp16", "int8")),
        f"{row['drop_upper_points_int8']:.2f}",
        *(f"{speed:,.0f}" for speed in speeds),
        kind,
        *(f"{row[f'chosen_over_fp16_b{batch}']:.2f}" for batch in (128, 1)),
        f"{row['build_seconds']:.0f}",
        f"{row['search_seconds']:.0f}",
    ]


def write_picture(runs: list[dict[str, Any]], file: Path) -> None:
    """Bars by network: the speed at batch 128 over FP16, of INT8 everywhere and of the chosen engine."""
    rows = _by_gain(runs)[::-1]
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 1.2 + 0.45 * len(rows)), layout="constrained")
        axes = figure.subplots()
        everywhere = [row["images_per_s_int8_everywhere_b128"] / row["images_per_s_fp16_b128"] for row in rows]
        for shift, values, color, label in (
            (0.2, [row["chosen_over_fp16_b128"] for row in rows], "#1b7f4d", "chosen"),
            (-0.2, everywhere, "#b9c4cc", "INT8 everywhere"),
        ):
            bars = axes.barh([index + shift for index in range(len(rows))], values, 0.38, color=color, label=label)
            axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.axvline(1, color="#333333", linewidth=1)
        axes.set_yticks(range(len(rows)), [row["network"] for row in rows])
        axes.set_xlabel("images/s over FP16, batch 128")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
        figure.savefig(file, dpi=130)


def _by_gain(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(runs, key=lambda row: -row["chosen_over_fp16_b128"])


if __name__ == "__main__":
    main()
