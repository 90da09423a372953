"""Packages that enginery requires, the TensorRT that its images hold, and whether they serve a bundle's plans."""

import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from components.common.contracts.container_images import REGISTRY, TAG, reference
from components.common.contracts.records import EngineEntry

_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
IN_CONTAINERS = "`enginery engines BUNDLE --data DIR --in-containers`"


def required(project: Path = _PROJECT) -> list[str]:
    """Packages that enginery asks for: by the project file of a checkout, else by the metadata of the installation.

    The file comes first, as the metadata of an editable installation stays what it was when a checkout moves on. Those
    of extras have a marker.
    """
    if project.is_file():
        declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if declared.get("name") == "enginery":
            extras = declared["optional-dependencies"].items()
            return [*declared["dependencies"], *(f'{text}; extra == "{extra}"' for extra, of in extras for text in of)]
    try:
        return metadata.requires("enginery") or []
    except metadata.PackageNotFoundError:
        return []


def tensorrt_of_images() -> str:
    """The version of TensorRT in the images `export` and `serve`; "" where enginery is not installed."""
    pins = [str(found.specifier) for found in map(Requirement, required()) if found.name == "tensorrt-cu13"]
    return pins[0].removeprefix("==") if pins else ""


def plan_needs(engines: Sequence[EngineEntry]) -> str:
    """The needs of plans, such as "NVIDIA H200 (compute capability 9.0), TensorRT 11.2.1.2"; "" without plans."""
    return "; ".join(dict.fromkeys(engine.needs for engine in engines))


def plan_server(engines: Sequence[EngineEntry]) -> tuple[str, str]:
    """The image for plans, whether it serves them, and what to do where it does not; "" where it does."""
    image, own = reference("serve", REGISTRY, TAG), tensorrt_of_images()
    if all(engine.fits_tensorrt(own) for engine in engines):
        return f"{image} (TensorRT {own}) serves the plans", ""
    fix = f"build plans with {IN_CONTAINERS}, or that image with a BASE_IMAGE of Triton that has their TensorRT"
    return f"{image} (TensorRT {own}) can't load the plans", fix
