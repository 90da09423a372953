"""The exported model repository: what it holds, where it comes from, and what is refused."""

import contextlib
import dataclasses
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

import components
from components.common.contracts.digests import digest_file
from components.common.contracts.errors import EngineryError, GateFailed, UserError
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import Artifact, RepositoryManifest, VerdictManifest, load
from components.common.contracts.records import AccuracyRow, EngineEntry, FileEntry
from components.serve.repository_check import open_from, open_repository
from enginery.cli.commands import cli
from enginery.serving.installation import find_triton
from enginery.serving.repository import RepositoryConfig, gpu_server_options, write_repository
from enginery.serving.sources import ModelSource, find_source

from .conftest import NAME


def built_as(source: ModelSource, *flags: str) -> ModelSource:
    """The source with other flags of its plans."""
    engines = tuple(entry.model_copy(update={"flags": flags}) for entry in source.bundle.manifest.engines)
    manifest = source.bundle.manifest.model_copy(update={"engines": engines})
    return dataclasses.replace(source, bundle=dataclasses.replace(source.bundle, manifest=manifest))


def run(*arguments: str | Path):
    return CliRunner().invoke(cli, ["serve", *map(str, arguments)])


def config(file: Path) -> ModelConfig:
    return text_format.Parse(file.read_text(), ModelConfig())


def plan(precision: str, capability: str) -> EngineEntry:
    return EngineEntry(
        file=f"{precision}-{capability}.plan",
        precision=precision,
        source_onnx=f"{precision}.onnx",
        tensorrt_version="10.16.0",
        gpu_name="NVIDIA H200",
        compute_capability=capability,
        driver_version="580.65",
        build_seconds=1.0,
    )


@pytest.fixture
def on_gpu(source, tmp_path: Path) -> ModelSource:
    """The source as if plans had been built, and one of INT8 measured: two files that no TensorRT would take."""
    folder = tmp_path / "bundle"
    shutil.copytree(source.bundle.path, folder)
    engines = (plan("int8", "9.0"), plan("fp16", "9.0"), plan("int8", "8.0"))
    for entry in engines:
        (folder / entry.file).write_bytes(entry.file.encode())
    files = {
        entry.file: FileEntry(size_bytes=len(entry.file), digest=digest_file(folder / entry.file)) for entry in engines
    }
    files |= source.bundle.manifest.files
    bundle = source.bundle.manifest.model_copy(update={"engines": engines, "files": files})
    accuracy = source.report.manifest.accuracy
    measured = AccuracyRow(precision="int8", runtime="tensorrt", file="int8-9.0.plan")
    accuracy = accuracy.model_copy(update={"rows": (*accuracy.rows, measured)})
    report = source.report.manifest.model_copy(update={"accuracy": accuracy})
    return dataclasses.replace(
        source,
        bundle=dataclasses.replace(source.bundle, path=folder, manifest=bundle),
        report=dataclasses.replace(source.report, manifest=report),
    )


# --- what it holds


def test_a_repository_for_cpus(exported, source) -> None:
    files = {path.relative_to(exported.path).as_posix() for path in exported.path.rglob("*") if path.is_file()}
    assert files == {
        "manifest.json",
        "digits/config.pbtxt",
        "digits/1/README",
        "digits_labels/config.pbtxt",
        "digits_labels/1/model.py",
        "digits_model/config.pbtxt",
        "digits_model/labels.txt",
        "digits_model/1/int8_cpu.onnx",
        "digits_model/1/int8_cpu_7bit.onnx",
        "digits_model/1/model.py",
        "digits_preprocess/config.pbtxt",
        "digits_preprocess/1/model.py",
    }
    for model, own in zip(exported.manifest.cpu_models, source.bundle.manifest.cpu_models, strict=True):
        assert model.saturates_on == own.saturates_on
        assert digest_file(exported.file(model.file)) == source.bundle.manifest.files[own.file].digest
    assert exported.manifest.measured_on == (instruction_set(),)
    assert (exported.path / "digits_model/labels.txt").read_text().split("\n") == [*"0123456789", ""]
    assert exported.manifest.inputs == source.digests
    for name in ("digits", "digits_labels", "digits_model", "digits_preprocess"):
        assert config(exported.path / name / "config.pbtxt").name == name


def test_a_repository_for_gpus_and_cpus_holds_the_measured_plans_alone(on_gpu, tmp_path: Path) -> None:
    repository = write_repository(on_gpu, tmp_path / "models", RepositoryConfig())
    network = repository.path / "digits_model"
    assert sorted(path.name for path in (network / "1").iterdir()) == [
        "int8-9.0.plan",
        "int8_cpu.onnx",
        "int8_cpu_7bit.onnx",
        "model.py",
    ]
    gpu, cpu = config(network / "config.pbtxt"), config(network / "configs/cpu.pbtxt")
    assert (gpu.backend, cpu.backend) == ("tensorrt", "python")
    assert dict(gpu.cc_model_filenames) == {"9.0": "int8-9.0.plan"}
    runtimes = [
        config(repository.path / "digits" / file).parameters["runtime"].string_value
        for file in ("config.pbtxt", "configs/cpu.pbtxt")
    ]
    assert runtimes == ["tensorrt", "openvino"]
    decoders = [
        config(repository.path / "digits_preprocess" / file).instance_group[0].count
        for file in ("config.pbtxt", "configs/cpu.pbtxt")
    ]
    assert decoders == [4, 1]
    assert [entry.file for entry in repository.manifest.engines] == ["digits_model/1/int8-9.0.plan"]


def test_a_plan_without_weights_is_refused(on_gpu, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        write_repository(built_as(on_gpu, "STRIP_PLAN"), tmp_path / "models", RepositoryConfig())
    assert (refused.value.code, refused.value.setting) == ("stripped-plan", "export.engine_options")
    assert not (tmp_path / "models").exists()


def test_what_a_version_compatible_plan_needs_of_triton_is_told(on_gpu, tmp_path: Path, monkeypatch) -> None:
    assert gpu_server_options(write_repository(on_gpu, tmp_path / "plain", RepositoryConfig()).manifest) == ()
    source = contextlib.nullcontext(built_as(on_gpu, "INT8", "VERSION_COMPATIBLE"))
    monkeypatch.setattr("enginery.serving.sources.find_source", lambda *_: source)
    said = run("export", "digits@champion", tmp_path / "models").output
    assert "  on GPUs  tritonserver needs --backend-config=tensorrt,version-compatible=true: " in said


def test_plans_of_another_tensorrt_are_refused_where_the_image_says_which_it_has(
    on_gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = write_repository(on_gpu, tmp_path / "models", RepositoryConfig())
    for name in ("TRT_VERSION", "TENSORRT_VERSION"):
        monkeypatch.delenv(name, raising=False)
    open_from(repository.path / "digits_preprocess")
    monkeypatch.setenv("TRT_VERSION", "10.16.0.72+cuda13.1")
    open_from(repository.path / "digits_preprocess")
    monkeypatch.setenv("TRT_VERSION", "11.2.0.1")
    with pytest.raises(EngineryError) as refused:
        open_from(repository.path / "digits_preprocess")
    assert refused.value.code == "other-tensorrt"


def test_a_bundle_alone_has_no_measured_plans(on_gpu, tmp_path: Path) -> None:
    repository = write_repository(dataclasses.replace(on_gpu, report=None), tmp_path / "models", RepositoryConfig())
    assert repository.manifest.engines == ()
    assert list(repository.path.rglob("*.plan")) == []


# --- where it comes from


def test_from_the_registry(promoted, proved, exported, tmp_path: Path) -> None:
    options = ("--top-k", "3", "--name", "other", "--precision", "int8")
    result = run("export", f"{NAME}@candidate", tmp_path / "models", *options)
    assert result.exit_code == 0, result.exception
    assert f"wrote {tmp_path / 'models'}\n  model    other version 1, INT8, bundle sha256:" in result.output
    repository = load(tmp_path / "models", RepositoryManifest)
    assert (repository.manifest.version, repository.manifest.top_k) == ("1", 3)
    assert repository.manifest.inputs == exported.manifest.inputs
    assert config(tmp_path / "models/other/config.pbtxt").output[0].dims == [3]
    with find_source(f"{NAME}/1", None) as source:
        verdict = load(proved.parts["verdict"], VerdictManifest).manifest
        assert (source.name, source.precision) == (NAME, verdict.served_precision)


def test_from_a_release(promoted, exported, tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["release", str(tmp_path / "release"), f"{NAME}@candidate"]).exit_code == 0
    with find_source(str(tmp_path / "release"), "int8") as source:
        assert (source.name, source.version, source.precision) == (NAME, "1", "int8")
        assert source.digests == exported.manifest.inputs
    (tmp_path / "release/bundle/int8.onnx").write_bytes(b"another")
    with pytest.raises(EngineryError, match=r"the release .* is refused: bundle/int8\.onnx"):
        find_source(str(tmp_path / "release"), None).__enter__()


def test_from_a_bundle(proved, tmp_path: Path) -> None:
    result = run("export", proved.parts["bundle"], tmp_path / "models", "--precision", "fp32")
    assert result.exit_code == 0, result.exception
    assert "no speed of FP32 by openvino was measured" in result.output
    repository = load(tmp_path / "models", RepositoryManifest)
    assert (repository.manifest.version, repository.manifest.precision) == ("", "fp32")
    assert repository.manifest.cpu_model.endswith("_model/1/fp32.onnx")


# --- what is refused


def test_what_did_not_pass_its_gate(store, refused, tmp_path: Path) -> None:
    from tests.unit.registered import promote_chain

    with pytest.raises(GateFailed):
        promote_chain(store, {**refused.parts, "dataset": refused.dataset.path}, tmp_path / "promotion", NAME)
    result = run("export", f"{NAME}/1", tmp_path / "models")
    assert isinstance(result.exception, (GateFailed, UserError))
    assert not (tmp_path / "models").exists()


MISTAKES = [
    (["nothing"], "nothing-to-serve"),
    ([f"{NAME}@nobody"], ""),
    ([f"{NAME}/7"], ""),
    ([f"{NAME}@candidate", "--name", "a/b"], "invalid-model-name"),
    ([f"{NAME}@candidate", "--name", "manifest.json"], "invalid-model-name"),
    ([f"{NAME}@candidate", "--name", "a" * 250], "invalid-model-name"),
    ([f"{NAME}@candidate", "--top-k", "0"], "invalid-setting"),
    ([f"{NAME}@candidate", "--max-wait", "0"], "invalid-setting"),
]


def test_mistakes(promoted, tmp_path: Path) -> None:
    for arguments, code in MISTAKES:
        result = run("export", arguments[0], tmp_path / "models", *arguments[1:])
        assert isinstance(result.exception, UserError), result.output
        assert result.exception.code.startswith(code)
        assert list(tmp_path.glob("*models*")) == []


def test_nothing_is_overwritten(proved, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    result = run("export", proved.parts["bundle"], tmp_path / "models")
    assert "exists already, and a model repository is never overwritten" in str(result.exception)
    result = run("export", proved.parts["bundle"], tmp_path / "no" / "models")
    assert f"there is no folder {tmp_path / 'no'}" in str(result.exception)


def test_a_full_disk_leaves_nothing(source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("enginery.serving.repository.shutil.copyfile", full)
    with pytest.raises(OSError, match="No space"):
        write_repository(source, tmp_path / "models", RepositoryConfig())
    assert list(tmp_path.iterdir()) == []


def test_an_exported_repository_is_what_it_is(exported) -> None:
    for options in (["--top-k", "5"], ["--precision", "fp32", "--name", "other", "--max-wait", "1"]):
        result = run(exported.path, *options)
        assert isinstance(result.exception, UserError)
        assert result.exception.code == "already-exported"
        assert all(option in str(result.exception) for option in options[::2])


# --- a corrupted repository


def damage_network(root: Path) -> None:
    file = root / "digits_model/1/int8_cpu.onnx"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)


def replace(file: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda root: (root / file).write_text((root / file).read_text().replace(old, new))


def add_bytecode(root: Path) -> None:
    """Python would run it in the place of model.py."""
    (root / "digits_labels/1/__pycache__").mkdir()
    (root / "digits_labels/1/__pycache__/model.cpython-311.pyc").write_bytes(b"code")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "int8_cpu.onnx": damage_network,
    "labels.txt": lambda root: (root / "digits_model/labels.txt").unlink(),
    "config.pbtxt": replace("digits_model/config.pbtxt", "max_batch_size: ", "max_batch_size: 9"),
    "manifest.json was edited": replace("manifest.json", '"precision":"int8"', '"precision":"fp32"'),
    "is not named in": lambda root: shutil.copytree(root / "digits_labels", root / "more"),
    "folder is not named in": lambda root: (root / "folder").mkdir(),
    "link is not named in": lambda root: (root / "link").symlink_to(root / "digits_labels"),
    "__pycache__ is not named in": add_bytecode,
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_corrupted_repository_is_refused(message: str, exported, tmp_path: Path) -> None:
    shutil.copytree(exported.path, tmp_path / "models")
    DAMAGES[message](tmp_path / "models")
    with pytest.raises(EngineryError, match=message):
        open_repository(tmp_path / "models")


def test_bytecode_of_a_server_that_runs_is_no_corruption(exported, tmp_path: Path) -> None:
    shutil.copytree(exported.path, tmp_path / "models")
    add_bytecode(tmp_path / "models")
    open_from(tmp_path / "models/digits_preprocess")


def test_triton_itself_refuses_it_too(triton, exported: Artifact[RepositoryManifest], tmp_path: Path) -> None:
    """As in a container, where Triton is started on the repository without our command."""
    shutil.copytree(exported.path, tmp_path / "models")
    damage_network(tmp_path / "models")
    found = find_triton()
    done = subprocess.run(
        [
            found.binary,
            f"--model-repository={tmp_path / 'models'}",
            f"--backend-directory={found.backends}",
            *(f"--allow-{service}=false" for service in ("http", "grpc", "metrics")),
        ],
        env=found.environment(Path(components.__file__).parents[1]),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    assert "failed to load 'digits_preprocess' version 1: Internal: EngineryError: " in done.stderr
    assert "int8_cpu.onnx" in done.stderr
