"""Would more digits help? The curve of `enginery advise --how-much-data`, and how well it foretells its end."""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.results import Results, result_options
from enginery.advise.learning_curve import forecast, measure, verdict
from enginery.datasets.digits import write_digits


@click.command()
@result_options
@click.option("--architecture", default="resnet18", show_default=True)
@click.option("--num-runs", default=2, type=click.IntRange(1, 20), show_default=True)
def main(architecture: str, num_runs: int, results: Results) -> None:
    """Train on an eighth, a quarter, a half and all of the digits."""
    config = Path(__file__).parents[1] / "pipelines/configs/digits.yaml"
    with TemporaryDirectory() as folder:
        data, work = Path(folder) / "digits", Path(folder) / "work"
        write_digits(data)
        work.mkdir()
        points, num_val = measure(data, architecture, work, config=config, num_runs=num_runs, on_progress=print)
    largest = points[-1].num_images
    foretold, twice = forecast(points[:-1], num_val, largest), forecast(points, num_val, 2 * largest)
    measures = {f"error_pct_{point.num_images}": 100 * sum(point.errors) / len(point.errors) for point in points}
    for name, values in (("foretold_error_pct", foretold.error_pct), ("twice_gain_points", twice.gain_points)):
        measures |= {f"{name}_{end}": value for end, value in zip(("low", "middle", "high"), values, strict=True)}
    results.write(
        "learning_curve",
        measures=measures,
        runs=[asdict(point) for point in points],
        notes=f"{architecture} on the digits by pipelines/configs/digits.yaml, {num_runs} runs of each number of "
        f"images, all judged by the same {num_val} validation images. foretold: the error at {largest} "
        f"images by the smaller numbers alone. {verdict(twice)}",
    )


if __name__ == "__main__":
    main()
