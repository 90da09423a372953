"""The learning curve: its forecasts hold as often as they say, on curves whose end is known."""

from pathlib import Path

import numpy as np
import pytest

from enginery.advise import learning_curve
from enginery.advise.learning_curve import Point, forecast, measure, miss, verdict
from enginery.datasets.digits import write_digits
from tests.unit.refusals import refuses

_NUM_VAL = 2000


def _points(floor: float, scale: float, exponent: float, seed: int, num_val: int = _NUM_VAL) -> list[Point]:
    """Two runs each of 500 to 4,000 images, judged by images drawn again."""
    chance = np.random.default_rng(seed)
    points = []
    for number in (500, 1000, 2000, 4000):
        error = floor + scale * (number / 500) ** -exponent
        errors = tuple(float(each) / num_val for each in chance.binomial(num_val, error, 2))
        points.append(Point(num_images=number, errors=errors))
    return points


@pytest.mark.parametrize(("floor", "scale", "exponent"), [(0.02, 0.3, 0.5), (0.0, 0.2, 0.35), (0.1, 0.1, 1.0)])
def test_ranges_hold_in_most_cases(floor: float, scale: float, exponent: float) -> None:
    truth = 100 * (floor + scale * 16**-exponent)
    forecasts = [forecast(_points(floor, scale, exponent, seed), _NUM_VAL, 8000) for seed in range(40)]
    held = sum(each.error_pct[0] <= truth <= each.error_pct[2] for each in forecasts)
    assert held >= 33
    # They say something.
    assert np.mean([each.error_pct[2] - each.error_pct[0] for each in forecasts]) < 100 * scale / 2


def test_verdicts() -> None:
    steep = forecast(_points(0.0, 0.4, 0.5, 0), _NUM_VAL, 8000)
    assert verdict(steep).startswith("More images help")
    flat = forecast(_points(0.05, 0.0, 1.0, 0, 50_000), 50_000, 8000)
    assert verdict(flat).startswith("More images hardly help")
    unsure = forecast(_points(0.03, 0.05, 0.5, 0, 100), 100, 8000)
    assert verdict(unsure).startswith("Undecided")


def test_no_error_seen_is_not_certain() -> None:
    perfect = [Point(num_images=number, errors=(0.0,)) for number in (100, 200, 400)]
    assert forecast(perfect, 50, 800).error_pct[2] > 0.1


def test_what_can_not_be_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(data: Path, architecture: str = "resnet18") -> None:
        """With enginery's own settings for the digits, beside a folder of their name."""
        measure(data, architecture, tmp_path, config=Path("digits"), num_runs=1, on_progress=print)

    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)

    with refuses("no-folder"):
        run(tmp_path / "none")
    with refuses("other-task", "MODEL"):
        run(tmp_path / "digits", "detection/fcos_small")
    for label in ("a", "b"):
        (tmp_path / "few" / label).mkdir(parents=True)
        for number in range(6):
            (tmp_path / "few" / label / f"{number}.png").write_bytes(b"\x89PNG" + bytes([number]))
    with refuses("too-few-images"):
        run(tmp_path / "few")


@pytest.mark.slow
def test_parts_of_the_digits_are_trained_for_as_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the images for twice the epochs, whatever the settings say of tracking; nothing is left behind."""
    monkeypatch.setattr(learning_curve, "SHARES", (0.5, 1.0))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    settings = tmp_path / "settings.yaml"
    settings.write_text("image_size: 32\nepochs: 1\nglobal_batch_size: 48\ntrain: {num_processes: 1}\n")
    write_digits(tmp_path / "digits")
    (tmp_path / "work").mkdir()
    lines: list[str] = []
    points, num_val = measure(
        tmp_path / "digits", "resnet18", tmp_path / "work", config=settings, num_runs=1, on_progress=lines.append
    )
    assert [point.num_images for point in points] == [719, 1438]
    assert num_val == 359
    assert all(0 < point.errors[0] < 0.95 for point in points)
    assert len(lines) == 2
    assert not list((tmp_path / "work").iterdir())


def test_errors_that_follow_no_curve_are_said() -> None:
    for errors, is_missed in (((0.42, 0.71, 0.55, 0.17), True), ((0.04, 0.02, 0.012, 0.006), False)):
        points = [Point(num_images=n, errors=(error,)) for n, error in zip((135, 270, 539, 1078), errors, strict=True)]
        assert bool(miss(forecast(points[:-1], 719, 1078), points[-1], 719)) == is_missed
