"""Modules and their imports: compiling needs no engine room, and dependencies point one way."""

import ast
import functools
import graphlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.processes import run_python

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = ("preprocess", "merge", "train", "export", "validate", "gate", "promote", "analyze")
FLOORS = ("pipelines", "enginery", "components")  # imports only lead to the right, and into the same one
LIGHT = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
    for pattern in (
        "components/*/config.py",
        "components/*/component.py",
        "components/*/__main__.py",
        "components/common/contracts/*.py",
        "components/common/registry/store.py",
        "components/common/registry/promotions.py",
        "enginery/__init__.py",
        "enginery/c*/*.py",  # cli, cluster
        "enginery/local/*.py",
        "pipelines/*.py",
    )
    for path in sorted(REPOSITORY.glob(pattern))
]
REGISTRY = ("promote", "audit", "models", "rollback", "serve", "release", "compare")  # commands that ask it
HEAVY = ("torch", "torchvision", "tensorrt", "nvidia.dali", "mlflow", "onnx", "onnxruntime", "openvino")
IMPORT_BLOCKED = """
import importlib, sys

heavy = {heavy!r}

class Block:
    def find_spec(self, name, path=None, target=None):
        if any(name == module or name.startswith(module + ".") for module in heavy):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
for name in heavy:
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    sys.exit(name + " was not blocked")
for name in {light!r}:
    importlib.import_module(name)
print("imported", len({light!r}))
"""


def sources(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    assert len(files) > 5
    return files


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Dotted names that a file imports, inside functions too, by import statement or importlib's function."""
    return tuple(_imports(path))


def _imports(path: Path, *, for_types: bool = True) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if not for_types else ():
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec") and node.args:
                argument = node.args[0]
                if isinstance(argument, ast.Constant):
                    yield str(argument.value)


def import_without(blocked: Iterable[str], modules: list[str], before: str = "") -> None:
    """Import modules in a process where libraries are blocked."""
    script = before + IMPORT_BLOCKED.format(heavy=tuple(blocked), light=modules)
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"imported {len(modules)}"


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize(
    ("blocked", "modules"),
    [
        (HEAVY, LIGHT),
        (set(HEAVY) - {"mlflow"}, ["components.promote.run", "components.gate.run"]),  # whose image is slim
        # The command line's image has neither an image decoder nor NumPy.
        ((*HEAVY, "numpy", "PIL"), [f"enginery.cli.{verb}" for verb in ("submit", "fetch")]),
        # Their help is there before MLflow is imported, and none of them runs a pipeline.
        (("mlflow", "kfp"), [*(f"enginery.cli.{verb}" for verb in REGISTRY), "enginery.serving.repository"]),
        (
            ("torch", "mlflow", "openvino", "tritonclient", "kfp", "PIL", "enginery.serving.server"),
            ["enginery.serving.client.client", "enginery.cli.predict", "enginery.serving.loadtest.generator"],
        ),
    ],
    ids=["compiling", "promote and gate", "submitting", "registry", "client of a server"],
)
def test_what_needs_no_engine_room(blocked: Iterable[str], modules: list[str]) -> None:
    import_without(blocked, modules)


def test_benchmarks_import_what_there_is() -> None:
    import_without((), [f"benchmarks.{path.stem}" for path in sorted((REPOSITORY / "benchmarks").glob("*.py"))])


def test_model_repositories_of_0_1_0_find_their_modules() -> None:
    """Their model.py imports components.common.triton; importing it needs Triton's own module, finding it does not."""
    spec = importlib.util.find_spec("components.common.triton.preprocess")
    assert Path(spec.origin or "").samefile(REPOSITORY / "components" / "serve" / "preprocess.py")


def test_the_server_needs_what_its_image_has() -> None:
    """containers/serve/requirements.in names it; Triton gives its models the module triton_python_backend_utils."""
    has = ("nvidia.dali", "openvino")
    heavy = (*(name for name in HEAVY if name not in has), "scipy", "kfp", "click", "aiohttp", "securesystemslib")
    light = [f"components.serve.{path.stem}" for path in sources("components/serve") if path.stem != "__init__"]
    import_without(
        heavy, light, "import sys, types\nsys.modules['triton_python_backend_utils'] = types.ModuleType('x')\n"
    )


def test_addresses_are_asked_by_one_client() -> None:
    """components.common.data.web, which limits them; only the Triton of this machine is asked without it."""
    clients = ("requests", "httpx", "http.client", "urllib.request", "urllib3.PoolManager", "urllib3.request")
    ask_nobody = ("urllib.request.getproxies", "urllib.request.url2pathname")
    local = ("enginery/serving/server.py", "components/serve/admission_control.py")
    tracking = "components/common/registry/tracking.py"  # the errors of MLflow's own requests
    found = [
        (path.relative_to(REPOSITORY).as_posix(), name)
        for path in sources(*FLOORS)
        for name in imports(path)
        if any(is_of(name, client) for client in clients) and name not in ask_nobody
    ]
    assert [entry for entry in found if entry[0] not in local] == [(tracking, "requests")]


@pytest.mark.parametrize("step", [*STEPS, "serve"])
def test_a_step_imports_no_other_step_and_no_pipeline(step: str) -> None:
    others = [f"components.{other}" for other in STEPS if other != step]
    others += ["pipelines", "enginery", "tests", "benchmarks", *(["components.serve"] if step in STEPS else [])]
    files = sorted((REPOSITORY / "components" / step).rglob("*.py"))
    contract = {"__init__.py", "__main__.py", "config.py", "run.py", "component.py"} if step in STEPS else set()
    assert contract <= {path.name for path in files}
    found = [(path.name, name) for path in files for name in imports(path) if any(is_of(name, o) for o in others)]
    assert found == []


@pytest.mark.parametrize("floor", [*FLOORS, "components/common"])
def test_no_floor_imports_one_above(floor: str) -> None:
    above = [*FLOORS[: FLOORS.index(floor.split("/")[0])], "tests", "benchmarks"]
    above += [f"components.{step}" for step in (*STEPS, "serve")] if floor == "components/common" else []
    found = [
        (path.name, name) for path in sources(floor) for name in imports(path) if any(is_of(name, o) for o in above)
    ]
    assert found == []


def test_imports_go_round_nowhere() -> None:
    """Not by imports inside of functions either, but for those of types alone."""
    modules = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources(*FLOORS)
    }
    graph = {
        module: {name if name in modules else name.rpartition(".")[0] for name in _imports(path, for_types=False)}
        for module, path in modules.items()
    }
    graphlib.TopologicalSorter({module: names - {module} for module, names in graph.items()}).prepare()


def test_every_folder_of_components_is_a_step_or_common() -> None:
    folders = {path.name for path in (REPOSITORY / "components").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == {*STEPS, "serve", "common"}


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        (
            "mlflow",
            {
                "components/common/registry/tracking.py",
                "components/common/registry/model_registry.py",
                "components/common/registry/audit_log.py",
                "components/promote/packaging.py",
            },
        ),
        ("tensorrt", {"components/common/runtimes/tensorrt.py"}),
    ],
)
def test_a_library_has_few_homes(library: str, homes: set[str]) -> None:
    users = {
        path.relative_to(REPOSITORY).as_posix()
        for path in sources(*FLOORS)
        if any(is_of(name, library) for name in imports(path))
    }
    assert users == homes


def test_nothing_is_called_utils() -> None:
    assert [path for path in sources(*FLOORS, "tests", "benchmarks") if "util" in path.stem] == []


def test_the_folder_mlflow_does_not_shadow_the_library() -> None:
    assert list((REPOSITORY / "mlflow").rglob("*.py")) == []


def test_onnx_runtime_keeps_and_sends_nothing_of_its_own(tmp_path: Path) -> None:
    """It would write an identifier and a queue, and look up its maker's address, as soon as it is imported."""
    home, scratch = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    scratch.mkdir()
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(scratch)}
    code = "import components.common.runtimes.onnxruntime"
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)
    left = [path.name for path in (*home.rglob("*"), *scratch.rglob("*")) if path.is_file()]
    assert not {".ses", "deviceid", "onnxruntime.db"} & set(left)


@pytest.mark.parametrize("file", sorted((REPOSITORY / "tests" / "gpu").glob("test_*.py")), ids=lambda file: file.stem)
def test_what_needs_a_gpu_can_be_collected_without_one(file: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"collected_{file.stem}", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
