"""The exported model repository: what it holds, where it comes from, and what is refused."""

import contextlib
import dataclasses
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

import components
from components.common.contracts.digests import digest_file
from components.common.contracts.errors import EngineryError
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import Artifact, RepositoryManifest, VerdictManifest, load
from components.common.contracts.records import AccuracyRow, EngineEntry, FileEntry
from components.serve.repository_check import open_from, open_repository
from enginery.pins import tensorrt_of_images
from enginery.serving.installation import find_triton
from enginery.serving.repository import RepositoryConfig, gpu_server_options, write_repository
from enginery.serving.sources import ModelSource, find_source
from tests.unit.measurements import engine_entry, updated
from tests.unit.registered import enginery, files, flip, promote_chain, refuses

from .conftest import NAME


def built_as(source: ModelSource, **changes: object) -> ModelSource:
    """The source with other fields of its plans."""
    engines = tuple(entry.model_copy(update=changes) for entry in source.bundle.manifest.engines)
    manifest = source.bundle.manifest.model_copy(update={"engines": engines})
    return dataclasses.replace(source, bundle=dataclasses.replace(source.bundle, manifest=manifest))


def config(file: Path) -> ModelConfig:
    return text_format.Parse(file.read_text(), ModelConfig())


def plan(precision: str, capability: str) -> EngineEntry:
    file, source = f"{precision}-{capability}.plan", f"{precision}.onnx"
    return engine_entry(
        precision, file=file, source_onnx=source, tensorrt_version="10.16.0", compute_capability=capability
    )


@pytest.fixture
def on_gpu(source, tmp_path: Path) -> ModelSource:
    """The source as if plans had been built, and one of INT8 measured: two files that no TensorRT would take."""
    folder = tmp_path / "bundle"
    shutil.copytree(source.bundle.path, folder)
    engines = (plan("int8", "9.0"), plan("fp16", "9.0"), plan("int8", "8.0"))
    listed = dict(source.bundle.manifest.files)
    for entry in engines:
        (folder / entry.file).write_bytes(entry.file.encode())
        listed[entry.file] = FileEntry(size_bytes=len(entry.file), digest=digest_file(folder / entry.file))
    bundle = source.bundle.manifest.model_copy(update={"engines": engines, "files": listed})
    measured = AccuracyRow(precision="int8", runtime="tensorrt", file="int8-9.0.plan")
    rows = (*source.report.manifest.accuracy.rows, measured)
    report = updated(source.report.manifest, "accuracy", rows=rows)
    return dataclasses.replace(
        source,
        bundle=dataclasses.replace(source.bundle, path=folder, manifest=bundle),
        report=dataclasses.replace(source.report, manifest=report),
    )


# --- what it holds


def test_a_repository_for_cpus(exported, source) -> None:
    assert files(exported.path).keys() == {
        *("manifest.json", "baseline_int8.json", "digits/config.pbtxt", "digits/1/README"),
        *("digits_labels/config.pbtxt", "digits_labels/1/model.py"),
        *("digits_model/config.pbtxt", "digits_model/labels.txt"),
        *("digits_model/1/int8_cpu.onnx", "digits_model/1/int8_cpu_7bit.onnx", "digits_model/1/model.py"),
        *("digits_preprocess/config.pbtxt", "digits_preprocess/1/model.py"),
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
    models = {path.name for path in (network / "1").iterdir()}
    assert models == {"int8-9.0.plan", "int8_cpu.onnx", "int8_cpu_7bit.onnx", "model.py"}
    gpu, cpu = config(network / "config.pbtxt"), config(network / "configs/cpu.pbtxt")
    assert (gpu.backend, cpu.backend) == ("tensorrt", "python")
    assert dict(gpu.cc_model_filenames) == {"9.0": "int8-9.0.plan"}
    for file, runtime, num_decoders in (("config.pbtxt", "tensorrt", 4), ("configs/cpu.pbtxt", "openvino", 1)):
        assert config(repository.path / "digits" / file).parameters["runtime"].string_value == runtime
        assert config(repository.path / "digits_preprocess" / file).instance_group[0].count == num_decoders
    assert [entry.file for entry in repository.manifest.engines] == ["digits_model/1/int8-9.0.plan"]
    alone = write_repository(dataclasses.replace(on_gpu, report=None), tmp_path / "alone", RepositoryConfig())
    assert alone.manifest.engines == (), "of a bundle alone none is measured"
    assert list(alone.path.rglob("*.plan")) == []


def test_plans_that_are_stripped_or_version_compatible(on_gpu, tmp_path: Path, monkeypatch) -> None:
    """Nothing loads the weights of the first; Triton takes the others with an option."""
    with refuses("stripped-plan", "export.engine_options"):
        write_repository(built_as(on_gpu, flags=("STRIP_PLAN",)), tmp_path / "models", RepositoryConfig())
    assert not (tmp_path / "models").exists()
    assert gpu_server_options(write_repository(on_gpu, tmp_path / "plain", RepositoryConfig()).manifest) == ()
    source = contextlib.nullcontext(built_as(on_gpu, flags=("INT8", "VERSION_COMPATIBLE")))
    monkeypatch.setattr("enginery.serving.sources.find_source", lambda *_: source)
    said = enginery("serve", "export", "digits@champion", tmp_path / "models").output
    assert "  on GPUs  tritonserver needs --backend-config=tensorrt,version-compatible=true: " in said


def test_plans_of_another_tensorrt_are_refused_where_the_image_says_which_it_has(on_gpu, tmp_path, monkeypatch) -> None:
    repository = write_repository(on_gpu, tmp_path / "models", RepositoryConfig())
    for name in ("TRT_VERSION", "TENSORRT_VERSION"):
        monkeypatch.delenv(name, raising=False)
    open_from(repository.path / "digits_preprocess")
    monkeypatch.setenv("TRT_VERSION", "10.16.0.72+cuda13.1")
    open_from(repository.path / "digits_preprocess")
    for other in ("11.2.0.1", "10.16.1.11"):  # of the same minor version, too
        monkeypatch.setenv("TRT_VERSION", other)
        with refuses("other-tensorrt") as refused:
            open_from(repository.path / "digits_preprocess")
        assert f"(compute capability 9.0), TensorRT 10.16.0, and this image has TensorRT {other}" in str(refused.value)
    source = built_as(on_gpu, flags=("VERSION_COMPATIBLE",))
    compatible = write_repository(source, tmp_path / "compatible", RepositoryConfig())
    open_from(compatible.path / "digits_preprocess")


@pytest.mark.parametrize(
    ("version", "said"), [("10.16.0.72", " can't load the plans; "), (tensorrt_of_images(), " serves ")]
)
def test_the_export_says_what_plans_need_and_serves(on_gpu, tmp_path, monkeypatch, version: str, said: str) -> None:
    source = contextlib.nullcontext(built_as(on_gpu, tensorrt_version=version))
    monkeypatch.setattr("enginery.serving.sources.find_source", lambda *_: source)
    output = enginery("serve", "export", "digits@champion", tmp_path / "models").output
    assert f"  runs on  NVIDIA H200 (compute capability 9.0), TensorRT {version}; CPUs (OpenVINO)\n" in output
    assert f"  image    ghcr.io/enginery/serve:0.2.0 (TensorRT {tensorrt_of_images()}){said}" in output


# --- where it comes from


def test_from_the_registry_a_release_and_a_bundle(promoted, proved, exported, tmp_path: Path) -> None:
    options = ("--top-k", "3", "--name", "other", "--precision", "int8")
    output = enginery("serve", "export", f"{NAME}@candidate", tmp_path / "models", *options).output
    assert f"wrote {tmp_path / 'models'}\n  model    other version 1, INT8, bundle sha256:" in output
    repository = load(tmp_path / "models", RepositoryManifest)
    assert (repository.manifest.version, repository.manifest.top_k) == ("1", 3)
    assert repository.manifest.inputs == exported.manifest.inputs
    assert config(tmp_path / "models/other/config.pbtxt").output[0].dims == [3]
    enginery("release", tmp_path / "release", f"{NAME}@candidate")
    served = load(proved.parts["verdict"], VerdictManifest).manifest.served_precision
    for reference, precision in ((f"{NAME}/1", None), (str(tmp_path / "release"), "int8")):
        with find_source(reference, precision) as source:
            assert (source.name, source.version, source.precision) == (NAME, "1", precision or served)
            assert source.digests == exported.manifest.inputs
    with refuses("not-validated"):
        find_source(f"{NAME}/1", "fp16").__enter__()
    (tmp_path / "release/bundle/int8.onnx").write_bytes(b"another")
    with refuses("release-refused"):
        find_source(str(tmp_path / "release"), None).__enter__()
    output = enginery("serve", "export", proved.parts["bundle"], tmp_path / "fp32", "--precision", "fp32").output
    assert "no speed of FP32 by openvino was measured" in output
    repository = load(tmp_path / "fp32", RepositoryManifest)
    assert (repository.manifest.version, repository.manifest.precision) == ("", "fp32")
    assert repository.manifest.cpu_model.endswith("_model/1/fp32.onnx")


# --- what is refused


def test_what_did_not_pass_its_gate(store, refused, tmp_path: Path) -> None:
    with refuses("gate-failed"):
        promote_chain(store, {**refused.parts, "dataset": refused.dataset.path}, tmp_path / "promotion", NAME)
    with pytest.raises(EngineryError):
        enginery("serve", "export", f"{NAME}/1", tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_mistakes(promoted, proved, tmp_path: Path) -> None:
    for reference, options, code in (
        ("nothing", (), "nothing-to-serve"),
        (f"{NAME}@nobody", (), "no-alias"),
        (f"{NAME}/7", (), "no-version"),
        (f"{NAME}@candidate", ("--name", "a/b"), "invalid-model-name"),
        (f"{NAME}@candidate", ("--name", "manifest.json"), "invalid-model-name"),
        (f"{NAME}@candidate", ("--name", "a" * 250), "invalid-model-name"),
        (f"{NAME}@candidate", ("--top-k", "0"), "invalid-setting"),
        (f"{NAME}@candidate", ("--max-wait", "0"), "invalid-setting"),
    ):
        with refuses(code):
            enginery("serve", "export", reference, tmp_path / "models", *options)
        assert list(tmp_path.glob("*models*")) == []
    (tmp_path / "models").mkdir()
    unusable = (("models", "output-exists"), ("no/models", "no-parent-folder"), ("/sys/models", "permission-denied"))
    for target, code in unusable:
        with refuses(code):
            enginery("serve", "export", proved.parts["bundle"], tmp_path / target)


def test_a_full_disk_leaves_nothing(source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("enginery.serving.repository.shutil.copyfile", full)
    with pytest.raises(OSError, match="No space"):
        write_repository(source, tmp_path / "models", RepositoryConfig())
    assert list(tmp_path.iterdir()) == []


# --- a corrupted repository


def replace(file: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda root: (root / file).write_text((root / file).read_text().replace(old, new))


def add_bytecode(root: Path) -> None:
    """Python would run it in the place of model.py."""
    (root / "digits_labels/1/__pycache__").mkdir()
    (root / "digits_labels/1/__pycache__/model.cpython-311.pyc").write_bytes(b"code")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "int8_cpu.onnx": lambda root: flip(root / "digits_model/1/int8_cpu.onnx"),
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
    if DAMAGES[message] is add_bytecode:  # which is no corruption where the server runs
        open_from(tmp_path / "models/digits_preprocess")


def test_triton_itself_refuses_it_too(triton, exported: Artifact[RepositoryManifest], tmp_path: Path) -> None:
    """As in a container, where Triton is started on the repository without our command."""
    shutil.copytree(exported.path, tmp_path / "models")
    flip(tmp_path / "models/digits_model/1/int8_cpu.onnx")
    found = find_triton()
    command = [found.binary, f"--model-repository={tmp_path / 'models'}", f"--backend-directory={found.backends}"]
    command += [f"--allow-{service}=false" for service in ("http", "grpc", "metrics")]
    command += ["--model-control-mode=explicit", "--load-model=digits_preprocess"]  # the first that would read it
    environment = found.environment(Path(components.__file__).parents[1])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "failed to load 'digits_preprocess' version 1: Internal: EngineryError: " in done.stderr
    assert "int8_cpu.onnx" in done.stderr
