"""Values on their way from flags, files and defaults into a pipeline."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from components.common.contracts.errors import UserError
from components.common.contracts.settings import resolve
from components.train.config import TrainConfig
from enginery.cli.commands import cli
from enginery.cli.run import command_for
from enginery.local.execution import StateDirectory, run_locally
from enginery.local.parameters import STEP_CONFIGS, PipelineFile, load_pipeline, resolve_arguments

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_PIPELINE = """
from kfp import dsl

@dsl.component(base_image="python:3.11", packages_to_install=[])
def show(number: int, share: float, text: str, yes: bool, numbers: list):
    print(number)

@dsl.pipeline(name="own")
def own(number: int = 3, share: float = 0.5, text: str = "a", yes: bool = False, numbers: list = [1]):
    show(number=number, share=share, text=text, yes=yes, numbers=numbers)
"""


@pytest.fixture(scope="module")
def resnet50() -> PipelineFile:
    return load_pipeline(REPOSITORY / "pipelines/resnet50.py")


@pytest.fixture(scope="module")
def quantize() -> PipelineFile:
    return load_pipeline(REPOSITORY / "pipelines/quantize.py")


@pytest.fixture
def arguments(resnet50: PipelineFile, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`arguments(yaml, "--set"s, flags)` of resnet50; `data` is given."""

    def resolved(text: str = "", *assignments: str, **flags: str) -> dict[str, Any]:
        config = tmp_path / "config.yaml"
        config.write_text(text)
        return resolve_arguments(
            resnet50, config_file=config, flags={"data": "images", **flags}, assignments=assignments
        )

    return resolved


def test_defaults(arguments: Callable[..., dict[str, Any]]) -> None:
    values = arguments()
    assert (values["epochs"], values["learning_rate"], values["architecture"]) == (90, 0.2, "resnet50")
    assert [values[step] for step in STEP_CONFIGS] == [{}] * 6


def test_flag_wins_over_file_wins_over_default(arguments: Callable[..., dict[str, Any]]) -> None:
    text = "epochs: 7\nglobal_batch_size: 64\n"
    values = arguments(text, epochs="5")
    assert (values["epochs"], values["global_batch_size"], values["image_size"]) == (5, 64, 224)


def test_set_wins_over_file_and_leaves_the_rest(arguments: Callable[..., dict[str, Any]]) -> None:
    text = "train:\n  weight_decay: 1e-3\n  momentum: 0.8\n"
    values = arguments(text, "train.weight_decay=1e-4", "gate.min_speedup=1.5")
    assert values["train"] == {"weight_decay": 1e-4, "momentum": 0.8}
    assert values["gate"] == {"min_speedup": 1.5}


def test_a_latency_budget_is_one_setting_however_it_is_typed(arguments: Callable[..., dict[str, Any]]) -> None:
    assert arguments()["latency_budget"] == ""
    assert arguments(latency_budget="7 ms")["latency_budget"] == "7ms"
    assert arguments("latency_budget: 7\n")["latency_budget"] == "7ms"
    assert arguments("", "validate.latency_budget=0.007s")["latency_budget"] == "7ms"
    with pytest.raises(UserError, match=r"validate.latency_budget: can't read 'soon' as a latency; .* such as 7ms"):
        arguments(latency_budget="soon")


def test_the_long_name_of_a_plain_input_sets_it(arguments: Callable[..., dict[str, Any]]) -> None:
    values = arguments("train:\n  epochs: 4\n", "export.num_calibration_images=64")
    assert (values["epochs"], values["num_calibration_images"]) == (4, 64)
    assert (values["train"], values["export"]) == ({}, {})


def test_a_mapping_can_be_set(arguments: Callable[..., dict[str, Any]]) -> None:
    values = arguments("", "train.augmentation={min_area: 0.5, flip_probability: 0}")
    expected = {"min_area": 0.5, "flip_probability": 0.0, "max_aspect_ratio": 4 / 3}
    assert expected.items() <= values["train"]["augmentation"].items()


def test_typed_text_becomes_numbers(arguments: Callable[..., dict[str, Any]]) -> None:
    values = arguments(epochs="5", learning_rate="0.1", seed="3")
    assert [(values[name], type(values[name])) for name in ("epochs", "learning_rate", "seed")] == [
        (5, int),
        (0.1, float),
        (3, int),
    ]


@pytest.mark.parametrize(
    ("text", "assignments", "flags", "message"),
    [
        ("", ["train.weigth_decay=1"], {}, "unknown setting train.weigth_decay; did you mean train.weight_decay?"),
        ("", ["train.zzz=1"], {}, "unknown setting train.zzz; valid keys: architecture, image_size"),
        ("train:\n  momentun: 1\n", [], {}, "did you mean train.momentum?"),
        ("epoch: 3\n", [], {}, "the pipeline resnet50 has no input 'epoch'; did you mean epochs?"),
        ("zzz: 3\n", [], {}, "has no input 'zzz'; valid: data, architecture"),
        ("", ["tain.momentum=1"], {}, "--set: the pipeline resnet50 has no input 'tain'; did you mean train?"),
        ("", ["momentum=1"], {}, "--set takes STEP.KEY=VALUE"),
        ("", ["train.momentum"], {}, "--set takes STEP.KEY=VALUE"),
        ("", ["train.augmentation={a"], {}, "can't read the value '{a' as YAML"),
        ("", [], {"epochs": "many"}, "train.epochs: got 'many', needs an integer of at least 1 (default 90)"),
        ("", [], {"epochs": "1.5"}, "train.epochs: got '1.5', needs an integer"),
        ("", [], {"global_batch_size": "-8"}, "global_batch_size: got '-8', needs an integer of at least 2"),
        ("", [], {"learning_rate": "nan"}, "train.learning_rate"),
        ("", [], {"learning_rate": "inf"}, "train.learning_rate"),
        ("", [], {"calibration_method": "magic"}, "got 'magic', needs one of "),
        ("train: 3\n", [], {}, "train must be a mapping of settings, got 3"),
        ("- a\n", [], {}, "must hold a mapping of settings, found a list"),
        ("a: [\n", [], {}, "is not valid YAML"),
        ("", [], {"data": ""}, "preprocess.data"),
    ],
)
def test_what_is_refused_and_how(
    arguments: Callable[..., dict[str, Any]], text: str, assignments: list[str], flags: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        arguments(text, *assignments, **flags)
    assert caught.value.exit_code == 2


def test_all_errors_of_a_step_come_at_once(arguments: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UserError) as caught:
        arguments("", "train.momentum=2", "train.weigth_decay=1", epochs="0")
    assert len(str(caught.value).splitlines()) == 3


def test_all_errors_of_all_steps_come_at_once(arguments: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UserError) as caught:
        arguments("", "gate.precision=int4", "export.mean=[0.5]", epochs="0")
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "train.epochs",
        "export.mean[1]",
        "export.mean[2]",
        "gate.precision",
    ]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "train.augmentation={min_aera: 0.5}",
            "unknown setting train.augmentation.min_aera; did you mean train.augmentat",
        ),
        (
            "train.augmentation={min_area: 2}",
            "train.augmentation.min_area: got 2, needs a number above 0 and at most 1",
        ),
        ("train.augmentation.min_area=1", "is a mapping, set as a whole: --set 'train.augmentation={min_area: VALUE}'"),
        (
            "train.augmentation=1",
            "train.augmentation: got '1', needs a mapping of min_area, max_aspect_ratio, flip_prob",
        ),
        (
            "train.image_size=7",
            "train.image_size: got '7', needs an integer of at least 32 and at most 1024 (default 224)",
        ),
        ("train.verify=maybe", "train.verify: got 'maybe', needs true or false (default false)"),
        ("export.mean=3", "export.mean: got '3', needs a list of 3 numbers, such as [0.485, 0.456, 0.406]"),
        ("export.std=[1, 1]", "export.std: got [1, 1], needs a list of 3 numbers, such as [0.229, 0.224, 0.225]"),
    ],
)
def test_what_is_allowed_is_said(arguments: Callable[..., dict[str, Any]], assignment: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        arguments("", assignment)


def test_a_missing_config_file_is_named(resnet50: PipelineFile, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"can't read the config file .*absent\.yaml: No such file"):
        resolve_arguments(resnet50, config_file=tmp_path / "absent.yaml", flags={"data": "a"}, assignments=[])


def test_a_required_input_is_asked_for(resnet50: PipelineFile, quantize: PipelineFile) -> None:
    with pytest.raises(UserError, match="--data is required"):
        resolve_arguments(resnet50, config_file=None, flags={}, assignments=[])
    with pytest.raises(UserError, match="--model is required"):
        resolve_arguments(quantize, config_file=None, flags={"data": "a"}, assignments=[])


def test_kfp_hands_integers_over_as_floats() -> None:
    config = resolve(TrainConfig, "train", {"epochs": 5.0, "seed": 0.0, "global_batch_size": 64.0})
    assert (config.epochs, config.seed, config.global_batch_size) == (5, 0, 64)
    assert type(config.epochs) is int
    with pytest.raises(UserError, match=r"train.epochs: got 5.5, needs an integer of at least 1 \(default 90\)"):
        resolve(TrainConfig, "train", {"epochs": 5.5})


def test_paths_become_absolute_and_uris_stay(
    quantize: PipelineFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")

    def paths(data: str, model: str, *, local: bool = True) -> tuple[str, str]:
        flags = {"data": data, "model": model}
        values = resolve_arguments(quantize, config_file=None, flags=flags, assignments=[], local=local)
        return values["data"], values["model"]

    assert paths("images", "~/model.onnx") == (str(tmp_path / "images"), "/home/somebody/model.onnx")
    assert paths("s3://bucket/images", "/abs/m.onnx") == ("s3://bucket/images", "/abs/m.onnx")
    assert paths("file:/images", "/abs/m.onnx")[0] == "file:/images"
    assert paths("images", "mnt/model.onnx", local=False) == ("images", "mnt/model.onnx")


def test_python3_in_a_value_is_refused_before_anything_runs(
    resnet50: PipelineFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from enginery.formats import new_console

    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    values = resolve_arguments(
        resnet50, config_file=None, flags={"data": "/data/python3/images"}, assignments=["gate.min_speedup=1"]
    )
    with pytest.raises(UserError, match=r"--data has 'python3' in its value \(/data/python3/images\)"):
        run_locally(resnet50, values, experiment="e", console=new_console(), summary_path=None)
    assert not (tmp_path / "home").exists()

    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "python3.11"))
    with pytest.raises(UserError, match="set ENGINERY_HOME to a directory without it"):
        StateDirectory.current()


@pytest.mark.parametrize("name", ["resnet50", "quantize"])
def test_help_lists_every_input_and_every_setting_with_its_default(name: str) -> None:
    path = REPOSITORY / f"pipelines/{name}.py"
    file = load_pipeline(path)
    result = CliRunner().invoke(command_for(path), ["--help"], terminal_width=200)
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    plain = file.plain_inputs()
    assert len(plain) >= 9
    for name_ in plain:
        spec = file.inputs[name_]
        assert f"--{name_.replace('_', '-')} " in text
        expected = "[required]" if not spec.optional else f"[default: {spec.default}]"
        assert expected in text or spec.default == ""
    settings = 0
    for step in file.steps:
        for key, field in STEP_CONFIGS[step].model_fields.items():
            if step in file.owners(key) or (step, key) in (
                ("export", "gate"),
                ("validate", "gate"),
            ):  # comes from the gate
                assert f"{step}.{key} " not in text
                continue
            position = text.index(f"{step}.{key} (")
            assert "[default:" in text[position : position + 400], key
            assert (field.description or "?")[:30] in text[position : position + 400]
            settings += 1
    assert settings > 25


def test_files_that_are_no_pipeline(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no pipeline file"):
        load_pipeline(tmp_path / "absent.py")
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="defines no pipeline"):
        load_pipeline(tmp_path / "empty.py")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(UserError, match=r"can't be imported: ModuleNotFoundError: .*nothing_of_that_name"):
        load_pipeline(tmp_path / "broken.py")


def test_inputs_of_a_pipeline_of_ones_own_get_the_type_they_declare(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_PIPELINE)
    file = load_pipeline(tmp_path / "own.py")
    flags = {"number": "5", "share": "1", "yes": "true", "numbers": "[1, 2]"}
    values = resolve_arguments(file, config_file=None, flags=flags, assignments=[])
    assert values == {"number": 5, "share": 1.0, "text": "a", "yes": True, "numbers": [1, 2]}
    assert type(values["share"]) is float
    with pytest.raises(UserError, match=r"number: got 'five', needs an integer"):
        resolve_arguments(file, config_file=None, flags={"number": "five"}, assignments=[])


def test_the_file_comes_first() -> None:
    """Which options there are, only the file says."""
    result = CliRunner().invoke(cli, ["run", "--in-containers", "pipelines/resnet50.py"])
    assert result.exit_code == 2
    assert "FILE.py comes first, before --in-containers: enginery run FILE.py --in-containers" in result.output
