"""Step configuration: one frozen pydantic model per step, merged from layers, with errors a person can act on."""

import difflib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from components.common.errors import UserError

Config = TypeVar("Config", bound=BaseModel)


class StepConfig(BaseModel):
    """What every step's config has in common: immutable, no unknown keys, no infinities, defaults validated too."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


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
        raise UserError(_explain(error, config, step)) from None


def _explain(error: ValidationError, config: type[BaseModel], step: str) -> str:
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        name = f"{step}.{where}" if where else step
        if problem["type"] == "extra_forbidden":
            close = difflib.get_close_matches(where, config.model_fields, n=1, cutoff=0.5)
            fix = f"did you mean {step}.{close[0]}?" if close else f"valid keys: {', '.join(config.model_fields)}"
            lines.append(f"unknown setting {name}; {fix}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            seen = "" if problem["type"] == "value_error" else f" (got {problem['input']!r})"
            lines.append(f"{name}: {message[0].lower()}{message[1:]}{seen}")
    return "\n".join(lines)


def parse_value(text: str) -> Any:
    """A value typed on a command line. Lists and mappings are YAML; the config's types convert everything else."""
    if text[:1] in "[{":
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"can't read the value {text!r} as YAML: {error}") from None
    return text


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        UserError: no such file, not YAML, or not a mapping.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"can't read the config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a mapping of settings, found a {type(value).__name__}")
    return value


def type_label(field: FieldInfo) -> str:
    """The field's type as a help text names it: "integer", "float", "a|b", ..."""
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return "|".join(getattr(part, "__name__", str(part)) for part in get_args(annotation))
    return {int: "integer", float: "float", str: "text", bool: "true|false", Path: "path"}.get(annotation, "yaml")  # type: ignore[arg-type]
