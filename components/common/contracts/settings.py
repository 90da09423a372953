"""Step configuration: one frozen pydantic model per step, merged from layers, with errors a person can act on."""

import difflib
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from components.common.contracts.errors import UserError, shortened, without_secrets
from components.common.contracts.foreign import BoundedLoader

Config = TypeVar("Config", bound=BaseModel)
# Of a field that decides how long a step takes, and nothing about its result.
SPEED_ONLY: JsonDict = {"speed_only": True}


def refuse_bools(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Refuse true and false, alone or in a list, for a field that is none: pydantic would take 1 and 0."""
    values = value if isinstance(value, list | tuple) else (value,)
    if cls.model_fields[info.field_name or ""].annotation is not bool and any(isinstance(one, bool) for one in values):
        raise ValueError("can't be true or false")
    return value


class StepConfig(BaseModel):
    """Base of every step's config: immutable, no unknown keys, no infinities, no secrets, valid defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    _bools = field_validator("*", mode="before")(refuse_bools)

    @field_validator("*")
    @classmethod
    def _no_secrets(cls, value: Any) -> Any:
        _check_secrets(value)
        return value


def _check_secrets(value: Any) -> None:
    """Raise ValueError if a string of a value, however deep, holds a secret."""
    if isinstance(value, str):
        without_secrets(value)
    elif isinstance(value, BaseModel):
        _check_secrets(dict(value))
    elif isinstance(value, Mapping):
        _check_secrets([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        for entry in value:
            _check_secrets(entry)


def fingerprinted(config: BaseModel) -> dict[str, Any]:
    """The settings that a result depends on, as JSON: all but those of SPEED_ONLY."""
    extras = {name: field.json_schema_extra for name, field in type(config).model_fields.items()}
    return config.model_dump(mode="json", exclude={name for name, extra in extras.items() if extra == SPEED_ONLY})


def resolve(config: type[Config], step: str, *layers: Mapping[str, Any]) -> Config:
    """Merge `layers` (later ones win) into a validated config.

    Raises:
        UserError: an unknown key (with the nearest valid one) or a value out of range, all of them in one message.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    try:
        return config.model_validate(merged)
    except ValidationError as error:
        problems = format_errors(error, config, step)
        text = "\n".join(message for _, message in problems)
        raise UserError(text, code="invalid-setting", setting=problems[0][0]) from None


def format_errors(error: ValidationError, config: type[BaseModel], prefix: str = "") -> list[tuple[str, str]]:
    """The setting at fault in each problem, as the user writes it, and a message on it."""
    return [_format_error(problem, config, prefix) for problem in error.errors()]


def _format_error(problem: ErrorDetails, config: type[BaseModel], prefix: str) -> tuple[str, str]:
    location = [part for part in problem["loc"] if part != "[key]"]
    owner, field = _locate(config, location)
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    name = f"{prefix}{''.join(parts)}".removeprefix(".")
    message = re.sub(r"^(Value error, |(Input|String|Dictionary|Keys) should )", "", problem["msg"])
    if problem["type"] == "extra_forbidden":
        return name, f"unknown setting {name}; {_nearest(name, owner)}"
    meaning = field.description if field is not None else None
    if problem["type"] == "missing":
        return name, f"{name} is required: {meaning or 'give it a value'}"
    if problem["type"] == "value_error":
        return name, f"{name}: {message}" if name else message
    if problem["type"] == "tuple_type":
        message = "be a list, written as [A, B]"
    default = "" if field is None or field.is_required() else f" (default {show_value(field.get_default())})"
    got = shortened(repr(problem["input"]))
    return name, f"{name}: got {got}, must {message}{default}{'. ' if meaning else ''}{meaning or ''}"


def _locate(config: type[BaseModel], location: Sequence[int | str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The model that holds what a path of keys leads to, and its field; None for one that it lacks."""
    field = None
    for part in location:
        if isinstance(part, int):
            continue  # an entry of the field
        config = (field and inner_model(field.annotation)) or config
        field = next((entry for key, entry in config.model_fields.items() if (entry.alias or key) == part), None)
        if field is None:
            break
    return config, field


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model`, `Model | None`, `tuple[Model, ...]`; None where there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = get_args(annotation) if get_origin(annotation) is not dict else ()
    return next(filter(None, map(inner_model, parts)), None)


def _nearest(name: str, owner: type[BaseModel]) -> str:
    """The nearest valid key to one that `owner` lacks, or all of them."""
    prefix, _, key = name.rpartition(".")
    valid = [field.alias or name for name, field in owner.model_fields.items()]
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    outer = prefix.rpartition(".")[2]
    if prefix == key:  # a pipeline's file, whose settings of train are below "train"
        return f"these are the settings of {key} alone: write its keys themselves, as in --help"
    if prefix == f"{outer}.{outer}" and close:  # "train.seed" among the settings of train
        return f"these are the settings of {outer} already: write {close[0]}"
    if outer in owner.model_fields and inner_model(
        owner.model_fields[outer].annotation
    ):  # "augmentation.min_area" as one key
        return f"{prefix} is a mapping, set as a whole: --set '{prefix}={{{key}: VALUE}}'"
    return f"did you mean {'.'.join(filter(None, (prefix, *close)))}?" if close else f"valid keys: {', '.join(valid)}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def how_to_set(step: str, setting: str, value: str) -> str:
    """Return how to change a setting, in a pipeline and where a step is run alone."""
    return f"--set {step}.{setting}={value} (python -m components.{step}: --{setting.replace('_', '-')} {value})"


def show_value(value: Any) -> str:
    """A setting's value as a person would type it."""
    if isinstance(value, BaseModel):
        return ", ".join(f"{name}: {show_value(entry)}" for name, entry in value.model_dump().items())
    if isinstance(value, tuple):
        return f"[{', '.join(show_value(entry) for entry in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value) or "empty"


_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # no text, or no date; deeper than Python goes


class _UniqueKeyLoader(BoundedLoader):
    """Refuses a mapping with a key twice, of which YAML's own reader keeps the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
            seen.add(key.value)
        return node


def parse_value(text: str) -> Any:
    """A value typed on a command line. Lists and mappings are YAML; the config's types convert everything else."""
    if text.startswith(("[", "{")):
        try:
            return yaml.load(text, _UniqueKeyLoader)  # noqa: S506  # of a SafeLoader
        except _NOT_YAML as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"can't read the value {text!r} as YAML: {reason}. Write lists as [1, 2] and mappings as "
                "{key: value}, in single quotes for the shell",
                code="invalid-yaml",
            ) from None
    return text


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        UserError: no such file, not YAML, or not a mapping.
    """
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)  # noqa: S506  # of a SafeLoader
    except OSError as error:
        raise UserError(
            f"can't read the config file {path}: {error.strerror}; name a YAML file with lines of KEY: VALUE",
            code="no-config-file",
        ) from None
    except _NOT_YAML as error:
        raise UserError(
            f"{path} is not valid YAML: {' '.join(str(error).split())}. Write lines of KEY: VALUE", code="invalid-yaml"
        ) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        message = f"{path} must hold a mapping of settings, found a {type(value).__name__}; write lines of KEY: VALUE"
        raise UserError(message, code="invalid-yaml")
    return value


def type_label(field: FieldInfo) -> str:
    """The field's type as a help text names it: "integer", "float", "a|b", ..."""
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return "|".join(getattr(part, "__name__", str(part)) for part in get_args(annotation))
    return {int: "integer", float: "float", str: "text", bool: "true|false", Path: "path"}.get(annotation, "yaml")  # type: ignore[arg-type]
