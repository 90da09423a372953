"""Values on their way from flags, files and defaults into a pipeline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from enginery.cli.run import command_for
from enginery.local.parameters import STEP_CONFIGS, PipelineFile, load_pipeline, resolve_arguments, settings_help
from enginery.local.run import StateDirectory, run_locally
from tests.pipelines.running import load_once
from tests.unit.registered import ROOT, enginery, refuses

Arguments = Callable[..., dict[str, Any]]
OWN_PIPELINE = """
from kfp import dsl

@dsl.component(base_image="python:3.11", packages_to_install=[])
def show(number: int, share: float, text: str, yes: bool, numbers: list):
    print(number)

@dsl.pipeline(name="own")
def own(number: int = 3, share: float = 0.5, text: str = "a", yes: bool = False, numbers: list = [1]):
    show(number=number, share=share, text=text, yes=yes, numbers=numbers)
"""


def pipeline(name: str = "resnet50") -> PipelineFile:
    return load_once(ROOT / f"pipelines/{name}.py")


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    """`arguments(yaml, "--set"s, flags)` of resnet50; `data` is given."""

    def resolved(text: str = "", *assignments: str, **flags: str) -> dict[str, Any]:
        config = tmp_path / "config.yaml"
        config.write_text(text)
        flags = {"data": "images", **flags}
        return resolve_arguments(pipeline(), config_file=config, flags=flags, assignments=assignments)

    return resolved


@pytest.mark.parametrize(
    ("text", "assignments", "flags", "expected"),
    [
        (
            "epochs: 7\nglobal_batch_size: 64\n",  # a flag wins over the file, and that over the default
            [],
            {"epochs": "5"},
            {"epochs": 5, "global_batch_size": 64, "image_size": 224},
        ),
        (
            "train:\n  weight_decay: 1e-3\n  momentum: 0.8\n",  # --set wins over the file, and leaves the rest
            ["train.weight_decay=1e-4", "gate.min_speedup=1.5"],
            {},
            {"train": {"weight_decay": 1e-4, "momentum": 0.8}, "gate": {"min_speedup": 1.5}},
        ),
        (
            "max_top1_drop_points: 2\n",  # names of earlier versions
            ["gate.min_top1_pct=50"],
            {},
            {"max_drop_points": 2.0, "gate": {"min_score_pct": 50}},
        ),
        ("", [], {}, {"latency_budget": ""}),
        ("", [], {"latency_budget": "7 ms"}, {"latency_budget": "7ms"}),  # one setting, however it is typed
        ("latency_budget: 7\n", [], {}, {"latency_budget": "7ms"}),
        ("", ["validate.latency_budget=0.007s"], {}, {"latency_budget": "7ms"}),
        (
            "train:\n  epochs: 4\n",  # the long name of a plain input sets it
            ["export.num_calibration_images=64"],
            {},
            {"epochs": 4, "num_calibration_images": 64, "train": {}, "export": {}},
        ),
        ("", [], {"epochs": "5", "learning_rate": "0.1"}, {"epochs": 5, "learning_rate": 0.1}),
    ],
)
def test_what_wins(
    arguments: Arguments, text: str, assignments: list[str], flags: dict[str, str], expected: dict[str, Any]
) -> None:
    values = arguments(text, *assignments, **flags)
    assert {name: values[name] for name in expected} == expected
    assert [type(values[name]) for name in expected] == [type(value) for value in expected.values()]


def test_defaults_are_the_pipelines_and_a_mapping_can_be_set(arguments: Arguments) -> None:
    values = arguments()
    assert (values["epochs"], values["learning_rate"], values["architecture"]) == (90, 0.2, "resnet50")
    assert [values[step] for step in STEP_CONFIGS] == [{}] * 6
    values = arguments("", "train.augmentation={min_area: 0.5, flip_probability: 0}")
    expected = {"min_area": 0.5, "flip_probability": 0.0, "max_aspect_ratio": 4 / 3}
    assert expected.items() <= values["train"]["augmentation"].items()


@pytest.mark.parametrize(
    ("code", "given", "setting", "words"),
    [
        # Of what a step's config refuses, one per source: contracts/test_settings.py has the others, and the texts.
        ("invalid-setting", "--set train.weigth_decay=1", "train.weigth_decay", ""),
        ("invalid-setting", "train:\n  momentun: 1\n", "train.momentun", "config.yaml: "),
        ("invalid-setting", "train: {1: 1}\n", "train.1", "config.yaml: "),
        ("unknown-input", "1: 3\n", "1", "config.yaml: "),
        ("invalid-setting", "epochs: many\n", "train.epochs", "config.yaml: "),
        ("invalid-setting", "train:\n  image_sizes: [7]\n", "train.image_sizes[0]", "config.yaml: "),
        ("invalid-setting", "--epochs many", "train.epochs", ""),
        ("invalid-setting", "--latency_budget soon", "validate.latency_budget", "such as 7ms"),
        ("invalid-setting", "--set train.augmentation.min_area=1", "train.augmentation.min_area", ""),
        ("unknown-input", "epoch: 3\n", "epoch", "did you mean epochs?"),
        ("unknown-input", "zzz: 3\n", "zzz", "valid: data, architecture"),
        ("unknown-input", "--set tain.momentum=1", "tain", "did you mean train?"),
        ("set-not-key-value", "--set momentum=1", "--set", ""),
        ("set-not-key-value", "--set train.momentum", "--set", ""),
        ("set-the-gate", "--set export.gate={min_score_pct: 1}", "export.gate", ""),
        ("not-a-mapping", "train: 3\n", "train", ""),
        ("invalid-yaml", "--set train.augmentation={a", "", ""),
        ("invalid-yaml", "- a\n", "", ""),
        ("invalid-yaml", "a: [\n", "", ""),
    ],
)
def test_what_is_refused_and_how(arguments: Arguments, code: str, given: str, setting: str, words: str) -> None:
    """`given` is an option with its value, or the text of a file."""
    option, _, value = given.partition(" ")
    text = "" if option.startswith("--") else given
    flags = {option[2:]: value} if option.startswith("--") and option != "--set" else {}
    with refuses(code) as caught:
        arguments(text, *([value] if option == "--set" else []), **flags)
    assert caught.value.exit_code == 2
    assert caught.value.setting.startswith(setting)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "assignment"),
    [
        ("seed: 1\n", "train.seed=-5"),
        ("train: {augmentation: {min_area: 0.1}}\n", "train.augmentation={min_area: 2}"),
    ],
)
def test_a_file_is_not_blamed_for_what_was_typed(arguments: Arguments, text: str, assignment: str) -> None:
    with refuses("invalid-setting") as caught:
        arguments(text, assignment)
    assert "config.yaml" not in str(caught.value)


def test_all_errors_of_all_steps_come_at_once(arguments: Arguments) -> None:
    with refuses("invalid-setting") as caught:
        arguments("", "train.momentum=2", "gate.precision=int4", "export.mean=[0.5]", epochs="0")
    expected = ["train.epochs", "train.momentum", "export.mean[1]", "export.mean[2]", "gate.precision"]
    assert sorted(
        line.partition(":")[0].removesuffix(" is required") for line in str(caught.value).splitlines()
    ) == sorted(expected)


def test_what_a_run_needs_is_asked_for(tmp_path: Path) -> None:
    for name, flags, setting in (
        ("resnet50", {}, "--data"),
        ("resnet50", {"data": ""}, "--data"),  # of an empty variable of the shell
        ("quantize", {"data": "a"}, "--model"),
        ("quantize", {"data": "a", "model": ""}, "--model"),
    ):
        with refuses("missing-input", setting):
            resolve_arguments(pipeline(name), config_file=None, flags=flags, assignments=[])
    with refuses("missing-input", says="`enginery submit resnet50 --help` lists"):
        resolve_arguments(pipeline(), config_file=None, flags={}, assignments=[], local=False)
    with refuses("no-config-file"):
        resolve_arguments(pipeline(), config_file=tmp_path / "absent.yaml", flags={"data": "a"}, assignments=[])
    (tmp_path / "list.yaml").write_text("data: [a]\n", encoding="utf-8")
    with refuses("invalid-setting", "preprocess.data", says="list.yaml: "):
        resolve_arguments(pipeline(), config_file=tmp_path / "list.yaml", flags={}, assignments=[])


def test_names_of_own_files_are_found_beside_folders_of_the_same_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("shapes", "detection"):
        (tmp_path / name).mkdir()
    file = load_pipeline(Path("detection"))
    values = resolve_arguments(file, config_file=Path("shapes"), flags={"data": "shapes"}, assignments=[])
    assert values["architecture"] == "detection/fcos_small"


def test_paths_become_absolute_and_uris_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")

    def paths(data: str, model: str, *, local: bool = True) -> tuple[str, str]:
        flags = {"data": data, "model": model}
        values = resolve_arguments(pipeline("quantize"), config_file=None, flags=flags, assignments=[], local=local)
        return values["data"], values["model"]

    assert paths("images", "~/model.onnx") == (str(tmp_path / "images"), "/home/somebody/model.onnx")
    assert paths("s3://bucket/images", "/abs/m.onnx") == ("s3://bucket/images", "/abs/m.onnx")
    assert paths("file:/images", "/abs/m.onnx")[0] == "file:/images"
    assert paths("images", "mnt/model.onnx", local=False) == ("images", "mnt/model.onnx")


def test_a_setting_that_is_no_input_of_this_pipeline_stays_with_its_step() -> None:
    flags, assignments = {"data": "a", "model": "b"}, ["export.num_calibration_images=64"]
    values = resolve_arguments(pipeline("engines"), config_file=None, flags=flags, assignments=assignments)
    assert values["export"] == {"num_calibration_images": 64}
    assert values.keys() == pipeline("engines").inputs.keys()


def test_python3_in_a_value_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    flags = {"data": "/data/python3/images"}
    values = resolve_arguments(pipeline(), config_file=None, flags=flags, assignments=["gate.min_speedup=1"])
    with refuses("python3-in-value", "--data"):
        run_locally(pipeline(), values)
    assert not (tmp_path / "home").exists()

    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "python3.11"))
    with refuses("state-directory-unusable", "ENGINERY_HOME"):
        StateDirectory.current()


@pytest.mark.parametrize("name", ["resnet50", "quantize"])
def test_help_lists_every_input_and_every_setting_with_its_default(name: str) -> None:
    file = pipeline(name)
    result = CliRunner().invoke(command_for(ROOT / f"pipelines/{name}.py"), ["--help"], terminal_width=200)
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    plain = file.plain_inputs()
    assert len(plain) >= 9
    for name in plain:
        spec = file.inputs[name]
        assert f"--{name.replace('_', '-')} " in text
        expected = "[required]" if not spec.optional else f"[default: {spec.default}]"
        assert expected in text or spec.default == ""
    settings = 0
    for step in file.steps:
        for key, field in STEP_CONFIGS[step].model_fields.items():
            of_file = (step, key) in (("export", "gate"), ("validate", "gate"), ("preprocess", "task"))
            if step in file.owners(key) or of_file:
                assert f"{step}.{key} " not in text
                continue
            position = text.index(f"{step}.{key} (")
            assert "[default:" in text[position : position + 400], key
            assert (field.description or "?")[:30] in text[position : position + 400]
            settings += 1
    assert settings > 25
    assert text.count("top-1") == text.count("(top-1, mIoU, mAP)")  # steps are of all tasks


@pytest.mark.parametrize(
    ("name", "source", "code"),
    [
        ("absent.py", None, "no-pipeline-file"),
        ("empty.py", "x = 1\n", "no-pipeline-in-file"),
        ("broken.py", "import nothing_of_that_name\n", "pipeline-not-importable"),
        ("text.md", "# Text\n", "pipeline-not-python"),
    ],
)
def test_files_that_are_no_pipeline(tmp_path: Path, name: str, source: str | None, code: str) -> None:
    if source is not None:
        (tmp_path / name).write_text(source)
    with refuses(code):
        load_pipeline(tmp_path / name)


def test_inputs_of_a_pipeline_of_ones_own_get_the_type_they_declare(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_PIPELINE)
    file = load_pipeline(tmp_path / "own.py")
    flags = {"number": "5", "share": "1", "yes": "true", "numbers": "[1, 2]"}
    values = resolve_arguments(file, config_file=None, flags=flags, assignments=[])
    assert values == {"number": 5, "share": 1.0, "text": "a", "yes": True, "numbers": [1, 2]}
    assert type(values["share"]) is float
    with refuses("invalid-input", "number"):
        resolve_arguments(file, config_file=None, flags={"number": "five"}, assignments=[])


RANKING = "num_ranking_images"  # a setting of export


def test_an_input_named_as_a_setting_of_one_step_is_that_setting_if_the_step_gets_it(tmp_path: Path) -> None:
    source = (ROOT / "pipelines/quantize.py").read_text()
    added = '    latency_budget: str = "",\n    num_ranking_images: int = 64,\n'
    source = source.replace('    latency_budget: str = "",\n', added)
    (tmp_path / "own.py").write_text(source.replace("settings=export,", f"settings={{{RANKING!r}: {RANKING}}},"))
    (tmp_path / "other.py").write_text(source)
    file, other = (load_pipeline(tmp_path / f"{name}.py") for name in ("own", "other"))
    assert file.owners(RANKING) == ["export"]
    assert pipeline().owners(RANKING) == []
    flags = {"data": "a", "model": "b"}
    with refuses("invalid-setting", f"export.{RANKING}"):
        resolve_arguments(file, config_file=None, flags={**flags, RANKING: "-1"}, assignments=[])
    found = resolve_arguments(
        other, config_file=None, flags={**flags, RANKING: "-1"}, assignments=[f"export.{RANKING}=3"]
    )
    assert (found[RANKING], found["export"]) == (-1, {RANKING: 3})


def test_the_file_comes_first() -> None:
    """The options are known only from the file."""
    result = enginery("run", "--in-containers", "pipelines/resnet50.py")
    assert result.exit_code == 2
    assert "PIPELINE comes first, before --in-containers: enginery run PIPELINE --in-containers" in result.output


def test_a_pipeline_is_of_one_task() -> None:
    file = pipeline("segmentation")
    options = {"config_file": None, "flags": {"data": "d"}, "assignments": []}
    assert resolve_arguments(file, **options)["architecture"] == "segmentation/deeplabv3_resnet50"
    with refuses("other-task", "--architecture", says="`enginery run resnet50`"):
        resolve_arguments(file, **{**options, "flags": {"data": "d", "architecture": "resnet18"}})
    with refuses("other-task", "--architecture"):
        network = {"data": "d", "architecture": "segmentation/fpn_small"}
        resolve_arguments(pipeline("resnet50"), **{**options, "flags": network})
    with refuses("other-task", "preprocess.task"):
        resolve_arguments(file, **{**options, "assignments": ["preprocess.task=detection"]})


def test_a_pipeline_has_a_recipe_of_its_own_which_others_change_key_by_key(tmp_path: Path) -> None:
    file, config = pipeline("detection"), tmp_path / "own.yaml"
    config.write_text("learning_rate: 0.001\ntrain: {label_smoothing: 0.1}\n")
    found = resolve_arguments(
        file, config_file=config, flags={"data": "d"}, assignments=["train.weight_decay=0.01", "train.momentum=0.8"]
    )
    recipe = file.recipe("train")
    assert (found["learning_rate"], found["global_batch_size"]) == (0.001, 32)
    assert recipe["optimizer"] == "adamw"
    assert found["train"].items() >= {
        "optimizer": "adamw", "resize_ratio": 1.0, "label_smoothing": 0.1, "weight_decay": 0.01, "momentum": 0.8
    }.items()  # fmt: skip
    assert file.recipe("train") == recipe
    shown = dict(settings_help(file))["train"]
    assert any(key.startswith("train.optimizer") and text.endswith("[default: adamw]") for key, text in shown)
