"""`enginery benchmark` as it is typed, on a CPU."""

import csv
from pathlib import Path

import pytest
from click.testing import CliRunner

from components.common.contracts.errors import UserError
from enginery.cli.benchmark import benchmark

OPTIONS = ["--models", "squeezenet1_1", "--batch-sizes", "2,1", "--seconds", "0.05", "--image-size", "64"]


def test_table_of_a_cpu(tmp_path: Path) -> None:
    arguments = [*OPTIONS, "--price-per-hour", "3.6", "--output", str(tmp_path / "new")]
    result = CliRunner().invoke(benchmark, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    with (tmp_path / "new" / "table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(r["precision"], r["batch"]) for r in rows] == [("FP32", "1"), ("FP32", "2"), ("INT8", "1"), ("INT8", "2")]
    for row in rows:
        assert float(row["cost"]) == pytest.approx(1000 / float(row["images_per_s"]))
        assert row["power_w"] == ""  # nothing here measures it
    text = (tmp_path / "new" / "table.md").read_text()
    assert text.strip() in result.output
    assert text.count("squeezenet1_1") == 4
    notes = text.splitlines()[0]
    assert "latency as the time of the call. Nothing tells the power, and FP16 needs TensorRT." in notes
    assert "NVML" not in notes
    assert (tmp_path / "new" / "throughput.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "resnet5O"], "no model 'resnet5O'; did you mean resnet50"),
        (["--models", " , "], "--models  , : write names"),
        (["--batch-sizes", "8,0"], "--batch-sizes 8,0: write whole numbers"),
        (["--precisions", "int4"], "--precisions int4: write some of fp32,fp16,int8"),
        (["--precisions", "fp16"], "FP16 is measured with TensorRT, and no CUDA GPU"),
        (["--output", "."], "is not empty"),
        (["--seconds", "nan"], "--seconds nan: write a number"),
        (["--price-per-hour", "inf"], "--price-per-hour inf: write a number"),
        (["--image-size", "32"], "alexnet can't run on images of 32 x 32 pixels: .* Choose another --image-size"),
        (["--image-size", "256", "--models", "resnet18,vgg11"], "vgg11 .* avgpool pools 8 x 8 to 7 x 7, .* as 224"),
        (["--models", "timm/vit_tiny_patch16_224", "--image-size", "96"], "Input height .96. doesn't match model"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(benchmark, arguments, catch_exceptions=False)
