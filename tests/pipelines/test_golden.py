"""The compiled pipelines, as files: a change of the graph, an image or an input shows in review.

`pytest tests/pipelines/test_golden.py --update-golden` writes them again.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from enginery.local.parameters import STEP_CONFIGS, PipelineFile, load_pipeline
from tests.pipelines.running import CLUSTER_YAML, ROOT, compiled

GOLDEN = Path(__file__).parent / "golden"
PIPELINES = ("resnet50", "resnet50_parts", "segmentation", "detection", "translation", "quantize", "engines")


def documents(text: str) -> list[dict[str, Any]]:
    """The YAML documents (pipeline and platform spec) without what another KFP version writes differently."""
    specs = list(yaml.safe_load_all(text))
    for spec in specs:
        spec.pop("sdkVersion", None)
    return specs


CLUSTER = ("--settings", CLUSTER_YAML)


@pytest.mark.parametrize(
    ("name", "golden_name", "options"),
    [
        *((name, name, ()) for name in PIPELINES),
        ("resnet50", "resnet50_cluster", CLUSTER),
        ("resnet50", "resnet50_nodes", (*CLUSTER, "--num-nodes", "4")),
    ],
)
def test_compiled_pipeline_is_the_golden_file(
    name: str, golden_name: str, options: tuple[str, ...], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    compiled(name, tmp_path, *options)
    text = (tmp_path / "compiled.yaml").read_text()
    golden = GOLDEN / f"{golden_name}.yaml"
    if pytestconfig.getoption("--update-golden"):
        golden.write_text(text)
    assert documents(text) == documents(golden.read_text()), (
        f"{golden} is out of date: see whether the change is meant, then run this with --update-golden"
    )


@pytest.mark.parametrize("name", ["resnet50_parts"])  # with loops, and made of the same functions as the others
def test_stock_kfp_compiles_the_same(name: str, tmp_path: Path) -> None:
    output = tmp_path / "stock.yaml"
    kfp = Path(sys.executable).parent / "kfp"
    command = [str(kfp), "dsl", "compile", "--py", f"pipelines/{name}.py", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert documents(output.read_text()) == documents((GOLDEN / f"{name}.yaml").read_text())


@pytest.fixture(scope="module", params=PIPELINES)
def pipeline(request: pytest.FixtureRequest) -> PipelineFile:
    return load_pipeline(ROOT / f"pipelines/{request.param}.py")


def test_input_defaults_are_those_of_the_steps(pipeline: PipelineFile) -> None:
    checked = 0
    for name in pipeline.plain_inputs():
        spec = pipeline.inputs[name]
        # The first owner speaks: in resnet50 train decides image_size and architecture, and export follows the model.
        owners = pipeline.owners(name)
        if not owners:
            assert name in ("model", "num_parts")
            continue
        field = STEP_CONFIGS[owners[0]].model_fields[name]
        assert spec.optional == (not field.is_required()), name
        if spec.optional:
            own = pipeline.task != "classification" and "train" in owners
            assert own or spec.default == field.default, name
            checked += 1
    assert checked > 1


def test_seed_has_one_default(pipeline: PipelineFile) -> None:
    defaults = {STEP_CONFIGS[step].model_fields["seed"].default for step in pipeline.owners("seed")}
    assert pipeline.owners("seed")
    assert defaults == {pipeline.inputs["seed"].default}


def test_every_step_takes_its_settings_and_every_input_has_a_reader(pipeline: PipelineFile) -> None:
    spec = documents((GOLDEN / f"{pipeline.name.replace('-', '_')}.yaml").read_text())[0]
    dags = [spec["root"], *(component for component in spec["components"].values() if "dag" in component)]
    tasks = [task for holder in dags for task in holder["dag"]["tasks"].values()]  # those in loops, too
    read = {
        source["componentInputParameter"].removeprefix("pipelinechannel--")
        for task in tasks
        for source in task["inputs"].get("parameters", {}).values()
        if "componentInputParameter" in source
    }
    assert read - {"list-parts-Output-loop-item", "parts-loop-item"} == set(pipeline.inputs)
    settings = [
        task["inputs"]["parameters"]["settings"]["componentInputParameter"].removeprefix("pipelinechannel--")
        for task in tasks
        if "settings" in task["inputs"].get("parameters", {})
    ]
    assert sorted(settings) == sorted(pipeline.steps)
    fan_out = {"list-parts", "parts", "merge"} if pipeline.name == "resnet50-parts" else set()
    assert {task["taskInfo"]["name"] for task in tasks} == set(pipeline.steps) | fan_out
