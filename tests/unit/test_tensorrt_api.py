"""Every name of TensorRT's API that our code uses exists in the real bindings of TensorRT 10 and 11.

The bindings come from PyPI without NVIDIA's libraries; three stub libraries let them load on any machine. Nothing of
TensorRT runs, but a misspelt or dropped method, enum or flag is found here and not on a GPU.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    ROOT / "components/common/runtimes/dynamic_plan.py",
    ROOT / "components/common/runtimes/tensorrt.py",
    ROOT / "components/export/engines.py",
    ROOT / "components/export/inspection.py",
    ROOT / "benchmarks/engines.py",
    ROOT / "benchmarks/nms.py",
]

PACKAGE = "tensorrt-cu13-bindings"
BINDINGS = {
    "10": f"{PACKAGE}==10.16.1.11",
    "11": next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith(f"{PACKAGE}==")),
}

# Names that the code looks for with hasattr, and the versions that have them. 8.6 is in no index that CI reaches.
OPTIONAL = {
    "Builder": {"10", "11"},  # an empty folder called tensorrt has none
    "BuilderFlag.FP16": {"10"},
    "BuilderFlag.INT8": {"10"},
    "BuilderFlag.STRIP_PLAN": {"10", "11"},
    "BuilderFlag.TF32": {"10", "11"},
    "BuilderFlag.VERSION_COMPATIBLE": {"10", "11"},
    "HardwareCompatibilityLevel": {"10", "11"},
    "ICudaEngine.create_execution_context_without_device_memory": {"10"},
    "ICudaEngine.device_memory_size": {"10"},
    "NetworkDefinitionCreationFlag.EXPLICIT_BATCH": {"10"},
    "NetworkDefinitionCreationFlag.STRONGLY_TYPED": {"10", "11"},
    "PreviewFeature.PROFILE_SHARING_0806": {"10"},
    "TacticSource.CUBLAS": {"10"},
    "TacticSource.CUBLAS_LT": {"10"},
    "TacticSource.CUDNN": {"10"},
}

# TensorRT class of each variable (and attribute `_variable`) in our code, and of what these methods return.
VARIABLES = {
    "builder": "Builder",
    "cache": "ITimingCache",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "inspector": "EngineInspector",
    "io_tensor": "ITensor",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "profile": "IOptimizationProfile",
    "refitter": "Refitter",
    "runtime": "Runtime",
    "severities": "ILogger.Severity",
}
RETURNED = {"get_input": "ITensor", "get_output": "ITensor"}

# What the stubs export: all that the bindings look up while they load.
SYMBOLS = {
    "nvinfer": [
        "createInferBuilder_INTERNAL",
        "createInferRefitter_INTERNAL",
        "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry",
        "getPluginRegistry",
    ],
    "nvinfer_plugin": ["initLibNvInferPlugins"],
    "nvonnxparser": ["createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion"],
}

CHECK = """
import functools, json, sys
import tensorrt_bindings as trt
def exists(name):
    try:
        functools.reduce(getattr, name.split("."), trt)
    except AttributeError:
        return False
    return True
print(json.dumps({"version": trt.__version__, "names": {name: exists(name) for name in json.load(sys.stdin)}}))
"""


@dataclass
class Uses:
    """Dotted names below `tensorrt` that a source uses."""

    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)


def dotted(node: ast.expr) -> str:
    """`trt.A.B` and `trt.A().B` as "A.B", `config.x` as "IBuilderConfig.x", `network.get_input(0).x` as "ITensor.x".

    "" for others.
    """
    if isinstance(node, ast.Name):
        return VARIABLES.get(node.id, "")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        made = isinstance(node.func.value, ast.Name) and node.func.value.id == "trt"
        return node.func.attr if made else RETURNED.get(node.func.attr, "")
    if not isinstance(node, ast.Attribute):
        return ""
    if isinstance(node.value, ast.Name) and node.value.id == "trt":
        return node.attr
    if isinstance(node.value, ast.Name) and node.value.id == "self":
        return VARIABLES.get(node.attr.removeprefix("_"), "") if node.attr.startswith("_") else ""
    owner = dotted(node.value)
    return f"{owner}.{node.attr}" if owner else ""


def uses(source: str) -> Uses:
    found = Uses()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found.variables |= {node.id} & set(VARIABLES)
        if isinstance(node, ast.Attribute) and (name := dotted(node)) and name not in VARIABLES.values():
            found.required.add(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            owner, member = node.args
            name = ast.literal_eval(member)
            if isinstance(owner, ast.Name) and owner.id == "trt":
                found.optional.add(name)
            elif dotted(owner):
                found.optional.add(f"{dotted(owner)}.{name}")
    return found


@pytest.fixture(scope="module")
def used() -> Uses:
    parts = [uses(source.read_text()) for source in SOURCES]
    optional = set().union(*(part.optional for part in parts))
    required = set().union(*(part.required for part in parts)) - optional
    return Uses(required, optional, set().union(*(part.variables for part in parts)))


def names_in(bindings: Path, libraries: Path, names: set[str]) -> tuple[str, dict[str, bool]]:
    environment = os.environ | {"PYTHONPATH": str(bindings), "LD_LIBRARY_PATH": str(libraries)}
    command = [sys.executable, "-c", CHECK]
    done = subprocess.run(
        command, input=json.dumps(sorted(names)), env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["version"], answer["names"]


def build_stubs(folder: Path, major: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "no C compiler (cc or gcc) on the PATH: install one, for instance `apt-get install gcc`"
    folder.mkdir()
    for library, symbols in SYMBOLS.items():
        source = folder / f"{library}.c"
        source.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in symbols))
        name = f"lib{library}.so.{major}"
        soname = f"-Wl,-soname,{name}"
        subprocess.run([compiler, "-shared", "-fPIC", soname, str(source), "-o", str(folder / name)], check=True)
    return folder


@pytest.fixture(scope="module", params=sorted(BINDINGS))
def present(request, tmp_path_factory, used) -> tuple[str, dict[str, bool]]:
    """The major version, and for each name that we use whether that version has it."""
    folder = tmp_path_factory.mktemp(f"tensorrt{request.param}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    pip += ["--root-user-action=ignore", "--only-binary=:all:", "--target", str(folder / "site")]
    done = subprocess.run([*pip, BINDINGS[request.param]], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"pip can't install {BINDINGS[request.param]}:\n{done.stderr}"
    stubs = build_stubs(folder / "stubs", request.param)
    version, names = names_in(folder / "site", stubs, used.required | used.optional)
    assert version.split(".")[0] == request.param
    return request.param, names


def test_what_we_use_exists(present, used):
    major, names = present
    missing = sorted(name for name in used.required if not names[name])
    assert not missing, f"TensorRT {major} lacks {missing}; guard with hasattr what only some versions have"


def test_guarded_names_are_where_we_believe_them_to_be(present):
    major, names = present
    assert {name: names[name] for name in OPTIONAL} == {name: major in where for name, where in OPTIONAL.items()}


def test_guarded_names_are_listed(used):
    assert used.optional == set(OPTIONAL)


def test_the_source_is_really_read(used):
    """A renamed variable must not silently take its calls out of this test."""
    assert used.variables == set(VARIABLES)
    assert {
        "Builder.build_serialized_network",
        "IBuilderConfig.builder_optimization_level",
        "ICudaEngine.get_tensor_profile_shape",
        "IExecutionContext.execute_async_v3",
        "ILogger.Severity.WARNING",
        "INetworkDefinition.num_inputs",
        "IOptimizationProfile.set_shape",
        "ITensor.name",
        "ITimingCache.serialize",
        "MemoryPoolType.WORKSPACE",
        "OnnxParser.get_error",
        "OnnxParserRefitter.refit_from_file",
        "Runtime.deserialize_cuda_engine",
        "__version__",
        "nptype",
    } <= used.required


def test_every_file_that_calls_tensorrt_is_read():
    calls = re.compile(r"\btrt\.[A-Za-z]|\bload_engine\(|\.create_execution_context\(")
    files = [file for folder in ("components", "enginery", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    assert {file for file in files if calls.search(file.read_text())} == set(SOURCES)


def test_no_version_is_compared():
    for source in SOURCES:
        assert not re.search(r"__version__\s*(\.|[<>=!]=|[<>])", source.read_text()), f"{source}: branch with hasattr"


def test_a_name_that_does_not_exist_is_found():
    source = "def f(trt, config):\n    config.set_speed(trt.BuilderFlag.FAST)\n    hasattr(trt.BuilderFlag, 'TF32')\n"
    found = uses(source)
    assert {"IBuilderConfig.set_speed", "BuilderFlag.FAST"} <= found.required
    assert found.optional == {"BuilderFlag.TF32"}
