"""What a report says where engines could not be built."""

from pathlib import Path

import pytest

from components.validate.report import write_report
from components.validate.report_text import limitations
from components.validate.schema import Report


@pytest.mark.parametrize(
    ("num_built", "said"), [(0, "There are no TensorRT"), (1, "Some TensorRT engines are missing")]
)
def test_all_or_some(reports: dict[str, Report], tmp_path: Path, num_built: int, said: str) -> None:
    report = reports["ten classes"]
    built = report.model.engines[:num_built]
    assert len(built) == num_built
    model = report.model.model_copy(update={"engines": built, "layers": (), "engines_missing": "no memory left"})
    report = report.model_copy(update={"model": model})
    assert any(point.startswith(said) and point.endswith(": no memory left.") for point in limitations(report))
    write_report(report, {}, tmp_path)
    for name in ("report.html", "model_card.md"):
        text = (tmp_path / name).read_text()
        assert said in text
        assert text.count("no memory left") >= 2
