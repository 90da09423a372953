"""The chart as Helm renders it: Helm 4's own engine, in a wheel."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "helm/enginery"
CASES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.yaml"))
NOTES = "enginery/templates/NOTES.txt"
RELEASE, NAMESPACE = "demo", "team-vision"


def case(name: str) -> dict[str, Any]:
    """Values of a case of the matrix."""
    values = yaml.safe_load((Path(__file__).parent / f"cases/{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(values, dict)
    return values


def objects(text: str) -> Iterator[Any]:
    """The documents of a text, by libyaml: Python's own parser takes most of the time of these tests."""
    found: Iterator[Any] = yaml.load_all(text, Loader=yaml.CSafeLoader)
    return found


def render_files(values: Mapping[str, Any]) -> dict[str, str]:
    """Text by template, of those that gave something. Values are held against the schema first, as `helm` does."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(dict(values))
        files = chart.render(dict(values), name=RELEASE, namespace=NAMESPACE)
    return {name: text for name, text in sorted(files.items()) if name == NOTES or any(objects(text))}


@functools.cache
def _rendered(name: str) -> dict[str, str]:
    return render_files(case(name))


def rendered_case(name: str) -> dict[str, str]:
    """The same of a case, rendered once."""
    return dict(_rendered(name))


def resources(files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every Kubernetes object of rendered files."""
    return [found for name, text in files.items() if name != NOTES for found in objects(text) if found]


def named(files: Mapping[str, str], kind: str, name: str = "") -> dict[str, Any]:
    """The one object of a kind, or of a kind whose name ends so."""
    found = [entry for entry in resources(files) if entry["kind"] == kind and entry["metadata"]["name"].endswith(name)]
    assert len(found) == 1, [entry["metadata"]["name"] for entry in found]
    return found[0]


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and spec of every pod that an object makes."""
    for entry in objects:
        kind, spec = entry["kind"], entry.get("spec", {})
        label = f"{kind} {entry['metadata']['name']}"
        if kind == "Pod":
            yield label, spec
        elif kind in ("Deployment", "StatefulSet", "Job", "Rollout"):
            yield label, spec["template"]["spec"]
        elif kind == "CronJob":
            yield label, spec["jobTemplate"]["spec"]["template"]["spec"]
        elif kind == "InferenceService":
            yield label, spec["predictor"]


def containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of a pod, the init containers first."""
    return [*pod.get("initContainers", ()), *pod["containers"]]
