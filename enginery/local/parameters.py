"""Pipeline files, their inputs as command-line options, and the values that reach them: flag > file > default."""

import difflib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from kfp.dsl.graph_component import GraphComponent
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from components.common.contracts.errors import UserError, without_secrets
from components.common.contracts.records import RENAMED
from components.common.contracts.settings import (
    StepConfig,
    flatten,
    load_yaml,
    parse_value,
    resolve,
    show_value,
    type_label,
)
from components.common.tasks import TASKS, TaskName, task_of
from components.export.config import WEIGHT_SUFFIXES, ExportConfig
from components.gate.config import GateConfig
from components.preprocess.config import PreprocessConfig
from components.promote.config import PromoteConfig
from components.train.config import TrainConfig
from components.validate.config import ValidateConfig

STEP_CONFIGS: dict[str, type[StepConfig]] = {
    "preprocess": PreprocessConfig,
    "train": TrainConfig,
    "export": ExportConfig,
    "validate": ValidateConfig,
    "gate": GateConfig,
    "promote": PromoteConfig,
}

STEP_ORDER = ("preprocess", "merge", *(step for step in STEP_CONFIGS if step != "preprocess"))

_PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"  # enginery's own pipeline files
_CONFIGS = _PIPELINES / "configs"
_SHARED = ("architecture", "image_size", "seed")  # settings of one name and meaning in several steps
_DESCRIPTIONS = {
    "model": "Your classifier: .onnx, weights (.safetensors, .pt, .pth) of --architecture, a Checkpoint directory, or "
    "a Bundle directory, of which only engines are built.",
    "num_parts": "Parts that the images are packed in, each on a machine of its own where the cluster has as many.",
    "seed": "Seed of the split, the weights, shuffling, augmentation and the choice of calibration images.",
}
_PATHS = ("data", "model")
# The gate's thresholds are also the budget of INT8 and the verdict in the report: a pipeline passes them on.
_FROM_GATE = (("export", "gate"), ("validate", "gate"))
_OF_FILE = ("preprocess", "task")  # which a pipeline file decides
# KFP's names of the types of inputs that no step's config knows.
_TYPES: dict[str, tuple[type, str]] = {
    "String": (str, "text"),
    "Integer": (int, "an integer"),
    "Float": (float, "a number"),
    "Boolean": (bool, "true or false"),
    "List": (list, "a list such as [1, 2]"),
    "Dict": (dict, "a mapping such as {key: value}"),
}


@dataclass(frozen=True, kw_only=True)
class PipelineFile:
    """A KFP pipeline and where it was read from."""

    path: Path
    pipeline: GraphComponent

    @property
    def name(self) -> str:
        """The pipeline's name in KFP and MLflow."""
        return str(self.pipeline.name)

    @property
    def inputs(self) -> Mapping[str, Any]:
        """KFP's input specs by name."""
        return dict(self.pipeline.component_spec.inputs or {})

    @property
    def steps(self) -> list[str]:
        """The steps whose settings this pipeline takes, in the order of the chain."""
        return [step for step in STEP_CONFIGS if step in self.inputs]

    @property
    def task(self) -> TaskName:
        """The task for which its images are labelled: that of its default network."""
        spec = self.inputs.get("architecture")
        return task_of(str(spec.default or "") if spec else "")

    def recipe(self, step: str) -> Mapping[str, Any]:
        """The settings that the pipeline gives a step where the user gives no others."""
        return self.inputs[step].default or {}

    def owners(self, parameter: str) -> list[str]:
        """The steps of this pipeline that have a plain input as a setting, and get it."""
        if parameter not in self.plain_inputs():
            return []
        steps = [step for step in self.steps if parameter in STEP_CONFIGS[step].model_fields]
        if parameter in _SHARED:
            return steps
        return steps if len(steps) == 1 and steps[0] in self._takers(parameter) else []

    def _takers(self, parameter: str) -> set[str]:
        """The steps whose tasks get an input of the pipeline, also those in a loop."""
        spec = self.pipeline.pipeline_spec
        names = (parameter, f"pipelinechannel--{parameter}")
        return {
            step_of(name)
            for part in (spec.root, *spec.components.values())
            for name, task in part.dag.tasks.items()
            if any(value.component_input_parameter in names for value in task.inputs.parameters.values())
        }

    def field(self, parameter: str) -> FieldInfo | None:
        """The config field that a plain input sets, of the first of its steps."""
        owners = self.owners(parameter)
        return STEP_CONFIGS[owners[0]].model_fields.get(parameter) if owners else None

    def plain_inputs(self) -> list[str]:
        """Inputs that are a single value, and become options of their own."""
        return [name for name in self.inputs if name not in STEP_CONFIGS]


def step_of(task: str) -> str:
    """The step that a KFP task runs: "export-own" is export."""
    return task.split("-")[0]


def _or_own(path: Path, folder: Path, suffix: str) -> Path:
    """The path; enginery's own file where the path is a bare name that is no file here."""
    own = folder / f"{path}{suffix}"
    return own if path.name == str(path) and not path.is_file() and own.is_file() else path


def own_config(path: Path) -> Path:
    """The path of a config file; that of enginery's own where the path is a bare name that is no file here."""
    return _or_own(path, _CONFIGS, ".yaml")


def load_pipeline(path: Path) -> PipelineFile:
    """Import a pipeline file, or one of enginery's own by its name, such as "resnet50".

    Raises:
        UserError: no such file, it can't be imported, or it defines no pipeline.
    """
    path = _or_own(path, _PIPELINES, ".py")
    if not path.is_file():
        own = ", ".join(sorted(file.stem for file in _PIPELINES.glob("*.py") if file.stem not in ("__init__", "graph")))
        raise UserError(f"there is no pipeline file {path}; enginery's own are named {own}", code="no-pipeline-file")
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path.absolute())
    if spec is None or spec.loader is None:
        text = f"{path} is not a Python file; name one that ends in .py, such as pipelines/resnet50.py"
        raise UserError(text, code="pipeline-not-python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code: whatever it raises
        message = f"{path} can't be imported: {type(error).__name__}: {error}. `python {path} --help` shows where"
        raise UserError(message, code="pipeline-not-importable") from error
    found = [value for value in vars(module).values() if isinstance(value, GraphComponent)]
    if not found:
        text = f"{path} defines no pipeline; decorate its function with @kfp.dsl.pipeline"
        raise UserError(text, code="no-pipeline-in-file")
    named = [value for value in found if value.name == path.stem.replace("_", "-")]
    return PipelineFile(path=path, pipeline=(named or found)[-1])


def options_of(file: PipelineFile) -> list[click.Option]:
    """A command-line option for every plain input, explained by the config field that it sets."""
    options = []
    for name in file.plain_inputs():
        spec, field = file.inputs[name], file.field(name)
        label = type_label(field) if field else str(spec.type).lower()
        default = f"[default: {spec.default}]" if spec.optional and spec.default != "" else ""
        required = "" if spec.optional else "[required]"
        options.append(
            click.Option(
                [f"--{name.replace('_', '-')}", name],
                metavar=f"[{label}]" if "|" in label else label.upper(),
                help=" ".join(filter(None, (_description(file, name), default, required))),
            )
        )
    return options


def _description(file: PipelineFile, name: str) -> str:
    """The meaning of a plain input: ours, or that of the config field that it sets."""
    if name == "data" and file.owners(name):
        return TASKS[file.task].data
    field = file.field(name)
    return _DESCRIPTIONS.get(name) or (field.description if field else None) or "Input of the pipeline."


def settings_help(file: PipelineFile) -> list[tuple[str, list[tuple[str, str]]]]:
    """The settings of each step that have no option of their own: (step, [(key and type, explanation)])."""
    sections = []
    for step in file.steps:
        rows = [
            (f"{step}.{name} ({type_label(field)})", f"{field.description}  [default: {show_value(default)}]")
            for name, field in STEP_CONFIGS[step].model_fields.items()
            for default in [file.recipe(step).get(name, field.default)]
            if step not in file.owners(name) and (step, name) not in (*_FROM_GATE, _OF_FILE)
        ]
        sections.append((step, rows))
    return sections


def resolve_arguments(
    file: PipelineFile,
    *,
    config_file: Path | None,
    flags: Mapping[str, str],
    assignments: Sequence[str],
    local: bool = True,
) -> dict[str, Any]:
    """The pipeline's arguments, each step's config checked before anything runs.

    Args:
        file: the pipeline.
        config_file: YAML with plain inputs at the top and a mapping per step.
        flags: plain inputs as typed.
        assignments: "STEP.KEY=VALUE" as typed.
        local: paths are this machine's and become absolute; a cluster's stay as they are.

    Raises:
        UserError: an unknown input, step or key, or a value that its config refuses.
    """
    plain: dict[str, Any] = {}
    steps: dict[str, dict[str, Any]] = {step: dict(file.recipe(step)) for step in file.steps}
    content = _load_config(file, config_file) if config_file else {}
    for key, value in content.items():
        _assign(file, plain, steps, key, value, source=str(config_file))
    for text in assignments:
        key, separator, value = text.partition("=")
        step, dot, name = key.partition(".")
        if not separator or not dot:
            message = f"--set takes STEP.KEY=VALUE, such as --set train.weight_decay=1e-4; got {text!r}"
            raise UserError(message, code="set-not-key-value", setting="--set")
        _assign(file, plain, steps, step, {name: parse_value(value)}, source="--set")
    plain.update(flags)
    for name in file.plain_inputs():
        spec = file.inputs[name]
        if not spec.optional and plain.get(name, "") == "":
            option, verb = f"--{name.replace('_', '-')}", "run" if local else "submit"
            named = file.path.stem if file.path.absolute().parent == _PIPELINES else file.path
            raise UserError(
                f"{option} is required: {_description(file, name)} `enginery {verb} {named} --help` lists all options",
                code="missing-input",
                setting=option,
            )
        plain.setdefault(name, spec.default)
    for name in _PATHS if local else ():  # steps run with another working directory than the user's
        value = plain.get(name)
        if value and isinstance(value, str) and "://" not in value and not value.lower().startswith("file:/"):
            plain[name] = str(Path(value).expanduser().absolute())
    try:
        arguments = _checked(file, plain, steps)
    except UserError as error:
        setting = error.setting.partition("[")[0]
        parts = setting.split(".")  # "train.epochs" is also the input "epochs"
        typed = {*flags, *(text.partition("=")[0].rpartition(".")[2] for text in assignments)}
        if {setting, parts[-1]} & flatten(content).keys() and typed.isdisjoint(parts):
            raise UserError(f"{config_file}: {error}", code=error.code, setting=error.setting) from None
        raise
    model, architecture = (str(arguments.get(name) or "") for name in ("model", "architecture"))
    if architecture and (task := file.task) != (found := task_of(architecture)):
        raise UserError(
            f"{architecture} is a network for {found}, and the pipeline {file.name} is of {task}; name another one, "
            f"such as {file.inputs['architecture'].default or 'resnet50'}, or take "
            f"`enginery run {TASKS[found].pipeline}`",
            code="other-task",
            setting="--architecture",
        )
    if not local and model.lower().endswith(WEIGHT_SUFFIXES) and not architecture:  # `check_model` reads those here
        text = f"{model} holds weights only: name their architecture, such as --architecture resnet50"
        raise UserError(text, code="weights-without-architecture", setting="--architecture")
    return arguments


def _load_config(file: PipelineFile, path: Path) -> dict[str, Any]:
    """The content of a config file, or of one of enginery's own by its name.

    Raises:
        UserError: it can't be read, or it is enginery's own for another task.
    """
    found = own_config(path)
    if path.name == str(path) and not found.exists():
        own = f", or one of enginery's: {', '.join(names)}" if (names := _configs_for(file)) else ""
        text = f"there is no config file {path}; name a YAML file with lines of KEY: VALUE{own}"
        raise UserError(text, code="no-config-file", setting="--config")
    content = load_yaml(found)
    task = task_of(str(content.get("architecture") or ""))
    if task != file.task and found.resolve().parent == _CONFIGS:  # one of the user's may leave the network out
        raise UserError(
            f"--config {path} is for {task}, and the pipeline {file.name} is of {file.task}; take one for it "
            f"({', '.join(_configs_for(file))}), or take `enginery run {TASKS[task].pipeline}`",
            code="other-task",
            setting="--config",
        )
    return content


def _configs_for(file: PipelineFile) -> list[str]:
    """Names of enginery's own config files for a pipeline."""
    own = {each.stem: load_yaml(each) for each in sorted(_CONFIGS.glob("*.yaml"))}
    of_task = {name: each for name, each in own.items() if task_of(str(each.get("architecture") or "")) == file.task}
    return [name for name, each in of_task.items() if each.keys() <= file.inputs.keys()]


def _assign(
    file: PipelineFile, plain: dict[str, Any], steps: dict[str, dict[str, Any]], key: str, value: Any, *, source: str
) -> None:
    """Sort one entry of a config file or --set into the plain inputs and the steps' settings."""
    key = str(RENAMED.get(key, key))  # YAML has numbers as keys, too
    if key in steps:
        if not isinstance(value, Mapping):
            text = f"{source}: {key} must be a mapping of settings, got {value!r}"
            raise UserError(text, code="not-a-mapping", setting=key)
        for given, entry in value.items():
            name = str(RENAMED.get(given, given))
            if (key, name) in _FROM_GATE:
                text = f"{source}: {key} takes its thresholds from the gate; set gate.KEY instead"
                raise UserError(text, code="set-the-gate", setting=f"{key}.{name}")
            if (key, name) == _OF_FILE:
                text = f"{source}: the pipeline {file.name} is of one task; take one of the other task instead"
                raise UserError(text, code="other-task", setting="preprocess.task")
            if key in file.owners(name):
                plain[name] = entry  # the same thing under its longer name
            else:
                steps[key][name] = entry
    elif key in file.plain_inputs():
        plain[key] = value
    else:
        valid = [*file.plain_inputs(), *steps]
        close = difflib.get_close_matches(key, valid, n=1)
        hint = f"did you mean {close[0]}?" if close else f"valid: {', '.join(valid)}"
        text = f"{source}: the pipeline {file.name} has no input {key!r}; {hint}"
        raise UserError(text, code="unknown-input", setting=key)


def _checked(file: PipelineFile, plain: dict[str, Any], steps: dict[str, dict[str, Any]]) -> dict[str, Any]:
    for name in file.plain_inputs():
        if not file.owners(name):
            plain[name] = _converted(name, plain[name], str(file.inputs[name].type))
    mistakes = []
    for step in file.steps:
        own = {name: value for name, value in plain.items() if step in file.owners(name)}
        try:
            config = resolve(STEP_CONFIGS[step], step, steps[step], own)
        except UserError as error:
            mistakes.append(error)
            continue
        plain.update({name: getattr(config, name) for name in own})  # "5" as typed becomes 5
        steps[step] = config.model_dump(mode="json", include=set(steps[step]))
    if mistakes:
        raise UserError("\n".join(map(str, mistakes)), code=mistakes[0].code, setting=mistakes[0].setting)
    return {**plain, **steps}


def _converted(name: str, value: Any, type_name: str) -> Any:
    """An input that no step's config checks: KFP wants the type that the pipeline declares."""
    try:
        without_secrets(str(value))
    except ValueError as error:
        raise UserError(f"{name}: {error}", code="secret-in-value", setting=name) from None
    if type_name not in _TYPES:
        return value
    wanted, words = _TYPES[type_name]
    if isinstance(value, str) and wanted in (list, dict):
        value = parse_value(value)
    try:
        return TypeAdapter(wanted).validate_python(value)
    except ValidationError:
        text = f"{name}: got {value!r}, needs {words}"
        raise UserError(text, code="invalid-input", setting=name) from None
