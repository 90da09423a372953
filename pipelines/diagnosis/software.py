"""Checks of what is installed: versions, DALI, OpenVINO, PyTorch."""

import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipelines.diagnosis.checks import Finding, missing, ok, warning
from pipelines.diagnosis.probes import ProbeError, Probes

_CHECKOUT = Path(__file__).resolve().parents[2]
_CONSTRAINTS = _CHECKOUT / "constraints.txt"  # only in a checkout
_REINSTALL = "run: make install (without make: pip install -c constraints.txt -e .)"


def versions(requirements: Iterable[str] | None = None, constraints: Path = _CONSTRAINTS) -> Finding:
    """What enginery requires, and what constraints.txt pins for it."""
    requirements = requirements if requirements is not None else required()
    if not requirements:
        return warning("not known: enginery is not installed, and its pyproject.toml is not beside it", _REINSTALL)
    wanted = list(_applicable(requirements))
    wrong, names = [], {}
    for requirement in wanted:
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        names[canonicalize_name(requirement.name)] = installed
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} is {installed}, needed is {requirement.specifier}")
    if wrong:
        return missing("; ".join(wrong), _REINSTALL)
    pins = _pins(constraints)
    other = [f"{name} {have} (pin {pins[name]})" for name, have in names.items() if have != pins.get(name, have)]
    if other:
        return warning(f"all as required, but not what was tested: {', '.join(other)}", _REINSTALL)
    return ok(f"{len(names)} packages as required" + (", as pinned in constraints.txt" if pins else ""))


def required(project: Path = _CHECKOUT / "pyproject.toml") -> list[str]:
    """What enginery asks for: by the project file of a checkout, else by the metadata of the installation.

    The file comes first, as the metadata of an editable installation stays what it was when a checkout moves on.
    """
    if project.is_file():
        declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if declared.get("name") == "enginery":
            return list(declared["dependencies"])
    try:
        return metadata.requires("enginery") or []
    except metadata.PackageNotFoundError:
        return []


def _applicable(requirements: Iterable[str]) -> Iterator[Requirement]:
    """Those that hold here: extras are optional, but the extras a requirement asks for itself are not."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        yield requirement
        for extra in sorted(requirement.extras):
            try:
                of_package = metadata.requires(requirement.name) or []
            except metadata.PackageNotFoundError:
                continue  # told already
            for inner in map(Requirement, of_package):
                marker = inner.marker
                if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
                    yield inner


def _pins(constraints: Path) -> dict[str, str]:
    if not constraints.is_file():
        return {}
    pins: dict[str, str] = {}
    for line in constraints.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            pins[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return pins


def torch(probes: Probes) -> Finding:
    """Whether PyTorch imports."""
    try:
        version, cuda = probes.ask("torch", "version"), probes.ask("torch", "cuda")
    except ProbeError as error:
        return missing(f"does not import: {error}", _REINSTALL)
    return ok(f"{version}, built for CUDA {cuda}" if cuda else f"{version}, built without CUDA")


def dali(probes: Probes) -> Finding:
    """Whether DALI imports and decodes on the CPU."""
    try:
        version, decodes = probes.ask("dali", "version"), probes.ask("dali", "cpu_decodes")
    except ProbeError as error:
        return missing(f"does not work: {error}", _REINSTALL)
    if not decodes:
        return missing(f"{version} decodes a JPEG to a wrong shape", _REINSTALL)
    return ok(f"{version}; a JPEG decoded on the CPU")


def openvino(probes: Probes) -> Finding:
    """What runs models on the CPU."""
    try:
        version, devices = probes.ask("openvino", "version"), probes.ask("openvino", "devices")
    except ProbeError as error:
        return missing(f"does not work: {error}", _REINSTALL)
    if "CPU" not in devices:
        return missing(f"{version} finds no CPU device (it finds {', '.join(devices) or 'nothing'})", _REINSTALL)
    return ok(f"{version} on the CPU, INT8 in integer arithmetic")
