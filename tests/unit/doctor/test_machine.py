"""The doctor of a machine: every check answers, each one not ok says how to fix it, and none takes the others down."""

import importlib
import json
import resource
import sqlite3
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from components.common.contracts.manifests import BundleManifest
from components.common.contracts.records import CpuModel
from enginery.doctor import machine
from enginery.doctor.checks import Diagnosis, Planned, absent, missing, ok
from enginery.doctor.gpu import GpuChecks, NvidiaGpu, Nvml, driver_number, supported
from enginery.doctor.probes import ProbeError, Probes
from enginery.pins import required, tensorrt_of_images
from tests.processes import run_python
from tests.serving import Served, serving
from tests.unit.measurements import engine_entry
from tests.unit.registered import make_chain

GPU = NvidiaGpu("NVIDIA H100", 80 * 10**9, (9, 0))
PINNED = tensorrt_of_images()
EARLIER = f"{PINNED.partition('.')[0]}.0"  # of the same major version
H100 = Nvml((GPU,), "580.95.05", "")
NO_GPU = Nvml((), "", "NVML Shared Library Not Found")


class Answers(Probes):
    """Probes that have answered already."""

    def __init__(self, **answers: dict[str, object]) -> None:
        self._answers = {name: (values, "ended by SIGILL") for name, values in answers.items()}
        self._processes = {}


def gpu_checks(nvml: Nvml = H100, pci: Path = Path("/nonexistent"), **answers: object) -> GpuChecks:
    checks = GpuChecks(Answers(torch=answers, dali=answers), pci)
    checks.__dict__["nvml"] = nvml  # the driver's answers
    return checks


@pytest.fixture(autouse=True)
def _visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("doctor")
    state, bundle = folder / "state", make_chain(folder, 90, planned=("int8.plan",))["bundle"]
    command = ("-m", "enginery.cli.main", "doctor", "--json", "--bundle", bundle)
    done = run_python(*command, ENGINERY_HOME=str(state), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert not state.exists()  # a check leaves nothing behind
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_has_every_check_and_a_fix_for_each_one_not_ok(report: dict[str, Any]) -> None:
    expected = [one.name for one in machine.all_checks(Answers())]
    assert [check["name"] for check in report["checks"]] == [*expected, "INT8 files", "plans"]
    assert all(check["fix"] for check in report["checks"] if check["status"] in ("warning", "missing"))
    assert not any("could not check" in check["found"] for check in report["checks"])
    found = {check["name"]: check["status"] for check in report["checks"]}
    (video,) = (check["found"] for check in report["checks"] if check["name"] == "video")
    assert video.endswith("decodes H.264, HEVC, VP9, AV1 on the CPU")
    working = ("PyTorch", "DALI", "OpenVINO", "MLflow tracking", "state directory")
    assert {found[name] for name in working} <= {"ok", "warning"}  # a machine may give reason for a warning
    assert "FP32 and INT8 on the CPU. No TensorRT engines, because" in report["conclusion"]
    needs = "they need NVIDIA H200 (compute capability 9.0), TensorRT 8.6.0; "
    assert report["checks"][-1]["found"].startswith(needs)


def test_the_table_ends_with_what_runs_and_has_one_line_on_no_gpu(report: dict[str, Any], monkeypatch) -> None:
    command = importlib.import_module("enginery.cli.doctor")
    checks = Diagnosis.model_validate(report).checks
    gpu = gpu_checks(NO_GPU)
    of_gpu = [planned for planned in machine.all_checks(Answers()) if planned.group == "GPU"]
    found = [Planned(one.group, one.name, lambda: absent("needs an NVIDIA GPU")).run() for one in of_gpu[1:]]
    checks = (*(one for one in checks if one.group != "GPU"), Planned("GPU", "GPU", gpu.gpus).run(), *found)
    monkeypatch.setattr(command, "diagnose", lambda bundle: machine.conclude(checks))
    done = CliRunner(env={"COLUMNS": "80"}).invoke(command.doctor)
    assert max(len(line) for line in done.output.splitlines()) <= 80
    text = " ".join(done.output.partition("\nGPU")[2].split())
    assert text.count("not here") == 1
    assert "not checked driver, PyTorch on GPU, compute capability, DALI on GPU, TensorRT: needs an NVIDIA GPU" in text
    assert "because there is no NVIDIA GPU." in text
    broken = checks[0].model_copy(update={"status": "missing", "fix": "get it", "required": True})
    monkeypatch.setattr(command, "diagnose", lambda bundle: machine.conclude((broken, *checks[1:])))
    done = CliRunner().invoke(command.doctor)
    assert (done.exit_code, "Nothing runs here before this is fixed: system." in done.output) == (1, True)
    assert "fix: get it" in done.output


def test_a_check_that_raises_is_a_line_of_its_own() -> None:
    def broken() -> Any:
        raise ZeroDivisionError("by\nzero")

    check = Planned("machine", "broken", broken, required=True).run()
    assert (check.status, check.found) == ("warning", "could not check: ZeroDivisionError: by zero")
    assert check.fix


def test_a_library_that_crashes_or_hangs_takes_only_its_probe_down(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    (tmp_path / "openvino.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("enginery.doctor.probes._LIMIT_S", 3.0)
    probes = Probes(("torch", "openvino"))
    with pytest.raises(ProbeError, match="SIGILL"):
        probes.ask("torch", "available")
    assert machine.probed(machine.torch, probes).found == "does not work: ended by SIGILL"
    assert machine.probed(machine.openvino, probes).found == "does not work: gave no answer in 3 s"


@pytest.mark.parametrize(
    ("files", "cpus", "limit_bytes"),
    [
        ({}, None, None),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ({"pods/one/cpu.max": "150000 100000", "pods/memory.max": "2000000000"}, 1.5, 2_000_000_000),
        ({"cpu/pods/one/cpu.cfs_quota_us": "-1", "cpu/pods/one/cpu.cfs_period_us": "100000"}, None, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5, None),
        ({"memory/pods/one/memory.limit_in_bytes": "9223372036854771712"}, None, None),
    ],
)
def test_limits_of_control_groups(tmp_path, files: dict[str, str], cpus: float | None, limit_bytes: int | None) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("4:memory:/pods/one\n2:cpu,cpuacct:/pods/one\n1:name=systemd:/\n0::/pods/one\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    assert machine.cpu_quota(own, root) == cpus
    assert machine.memory_limit(own, root) == limit_bytes


def test_limits_of_a_machine_are_warnings_with_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 16)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 2.0)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: type("Usage", (), {"total": 64 << 20})())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        files = machine.open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    shared = machine.shared_memory(tmp_path)
    for finding, words in ((machine.cores(), "taskset -c 0-1 "), (shared, "--shm-size"), (files, "ulimit -n")):
        assert (finding.status, words in finding.fix) == ("warning", True)


def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, file in (("AVX2", "int8_cpu_7bit.onnx"), ("", "int8_cpu")):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        finding = machine.instruction_sets()
        assert (finding.status, file in finding.found) == ("ok", True)
    eight = CpuModel(file="int8_cpu.onnx", weight_bits=8, activations="unsigned", saturates_on=("AVX2",))
    seven = CpuModel(file="int8_cpu_7bit.onnx", weight_bits=7, activations="unsigned", saturates_on=())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    bundles = (BundleManifest.model_construct(cpu_models=files) for files in ([eight, seven], [eight]))
    both, alone = map(machine.int8_files, bundles)
    assert "int8_cpu.onnx (8-bit weights, unsigned activations) saturates on AVX2; " in both.found
    assert both.found.endswith("activations) saturates on no CPU. This CPU runs int8_cpu_7bit.onnx")
    assert (both.status, alone.status, "Export the model again" in alone.fix) == ("ok", "warning", True)


def test_versions_of_a_checkout_and_of_an_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text("# pins\nclick==1.0  # via enginery\nnumpy==0 ; python_version < '3'\n")
    assert machine.versions(["click>=8", "pytest>=1; extra == 'dev'"], tmp_path / "none").found.startswith("1 package")
    assert "(pin 1.0)" in machine.versions(["click>=8", "numpy>=1"], pins).found
    assert machine.versions(["click==0.1"], tmp_path / "none").status == "warning"
    wrong = machine.versions(["click<2", "no-such-package>=1"], pins)
    assert wrong.status == "missing"
    assert "needed is <2" in wrong.found
    assert "no-such-package is not installed" in wrong.found

    other, none = tmp_path / "other.toml", tmp_path / "none.toml"
    other.write_text('[project]\nname = "another"\ndependencies = ["click"]\n')
    monkeypatch.setattr(metadata, "requires", lambda name: [f"of-{name}"])
    assert required(none) == required(other) == ["of-enginery"]
    of_checkout = required()
    assert {"torch", "kfp", "mlflow", "tensorrt-cu13"} <= {Requirement(text).name for text in of_checkout}

    def not_installed(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    assert required() == of_checkout
    finding = machine.versions(required(none))
    assert (finding.status, "make install" in finding.fix) == ("warning", True)


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_90", "sm_100"], False),
        ((7, 5), ["compute_80"], False),
    ],
)
def test_compute_capability(capability: tuple[int, int], architectures: list[str], expected: bool) -> None:
    assert supported(capability, architectures) is expected


def test_gpus_and_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_number("580.65.06") < driver_number("580.95")
    assert gpu_checks(cuda="13.2").driver().status == "ok"
    old = gpu_checks(Nvml((GPU,), "535.183.01", ""), cuda="13.2").driver()
    assert (old.status, "needs 580.65.06 or newer" in old.found, "R580" in old.fix) == ("missing", True, True)
    assert gpu_checks(NO_GPU, tmp_path).gpus().status == "absent"
    assert gpu_checks(NO_GPU, tmp_path).driver() == absent("needs an NVIDIA GPU")
    (card := tmp_path / "0000:01:00.0").mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    for finding in (gpu_checks(NO_GPU, tmp_path).gpus(), gpu_checks(NO_GPU, tmp_path).driver()):
        assert (finding.status, "docker run --gpus all" in finding.fix) == ("missing", True)
    broken = gpu_checks(cuda="13.2", version="2.15.0", available=False, why_not="driver too old")
    assert "can't use the GPU: driver too old" in broken.torch_sees_cuda().found
    assert "failed: ended by SIGILL" in broken.dali_decodes().found
    reason = "the Python package tensorrt is not installed: run `pip install 'enginery[tensorrt]'`"
    finding = gpu_checks(no_tensorrt=reason).tensorrt()
    assert finding == missing("the Python package tensorrt is not installed", "run `pip install 'enginery[tensorrt]'`")
    assert gpu_checks(no_tensorrt=None, tensorrt=PINNED).tensorrt().status == "ok"
    newer = gpu_checks(no_tensorrt=None, tensorrt="11.4.0.106").tensorrt()
    assert (newer.status, f"has {PINNED}" in newer.found) == ("warning", True)
    assert "make install-tensorrt" in newer.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = gpu_checks()
    assert hidden.gpus().fix == "unset CUDA_VISIBLE_DEVICES"
    expected = absent("needs a GPU that CUDA_VISIBLE_DEVICES does not hide")
    assert hidden.guard(hidden.torch_sees_cuda) == expected


def bundle_with(**plan: object) -> BundleManifest:
    """A bundle with the plan of an H200, or one without."""
    engines = (engine_entry(**plan),) if plan else ()
    return BundleManifest.model_construct(engines=engines, engines_missing="no GPU")


@pytest.mark.parametrize(
    ("nvml", "plan", "status", "said"),
    [
        (NO_GPU, {"tensorrt_version": "8.6.0.12"}, "warning", "TensorRT 8.6.0.12; not here, without an NVIDIA GPU; "),
        (H100, {"tensorrt_version": PINNED}, "ok", "; not here (GPU NVIDIA H200 there, NVIDIA H100 here); "),
        (H100, {"tensorrt_version": PINNED, "flags": ("AMPERE_PLUS",)}, "ok", f"8.0 or newer, TensorRT {PINNED}; "),
        (H100, {"tensorrt_version": EARLIER, "flags": ("VERSION_COMPATIBLE",)}, "ok", "or a later one of that major"),
        (H100, {"tensorrt_version": f"{PINNED}9"}, "warning", f"serve:0.2.0 (TensorRT {PINNED}) can't load the plans"),
        (H100, {}, "absent", "none: no GPU"),
    ],
)
def test_what_the_plans_of_a_bundle_need(nvml: Nvml, plan: dict[str, object], status: str, said: str) -> None:
    finding = gpu_checks(nvml, tensorrt=PINNED).plans(bundle_with(**plan))
    assert (finding.status, said in finding.found) == (status, True), finding.found
    assert ("enginery engines BUNDLE" in finding.fix) == (status != "ok")


@pytest.mark.parametrize(
    ("health", "others", "expected", "found", "fix"),
    [
        (200, 500, "ok", "", ""),
        (401, 500, "missing", "", "MLFLOW_TRACKING_USERNAME"),
        (200, 403, "missing", "answers 403", "--allowed-hosts"),  # it does not know this name of its host
    ],
)
def test_tracking_server(monkeypatch, health: int, others: int, expected: str, found: str, fix: str) -> None:
    with serving(Served(answers=lambda method, path, body: (health if path == "/health" else others, {}))) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.endpoint.replace("://", "://user:secret@"))
        finding = machine.tracking()
        assert (finding.status, "secret" in finding.found) == (expected, False)
        assert (found in finding.found, fix in finding.fix) == (True, True)
    gone = machine.tracking()
    assert (gone.status, "can't be reached" in gone.found) == ("missing", True)


def test_a_tracking_server_that_leads_to_an_inner_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Served()) as inner, serving(Served()) as server:
        server.answers = lambda *_: (302, {}, {"Location": f"{inner.endpoint}/latest/meta-data"})
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.endpoint)
        finding = machine.tracking()
        assert (finding.status, "is no public address" in finding.found, inner.requests) == ("missing", True, [])


def test_tracking_in_sqlite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "_LIMIT_S", 0.2)
    file = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE runs (id)")
        connection.commit()
        assert machine.tracking().status == "ok"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}?timeout=30")
        connection.execute("BEGIN IMMEDIATE")
        assert "locked" in machine.tracking().found
    file.write_bytes(b"no database at all " * 100)
    assert f"mv {file}" in machine.tracking().fix


def test_state_directory_that_can_not_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file/state", "python3-state"):
        monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / name))
        finding = machine.state_directory()
        assert (finding.status, "set ENGINERY_HOME" in finding.fix) == ("missing", True)


def test_conclusion() -> None:
    names = ("OpenVINO", "GPU", "driver", "PyTorch on GPU", "compute capability", "TensorRT")
    everything = [Planned("", name, lambda: ok("fine")).run() for name in names]
    lacking = Planned("", "TensorRT", lambda: missing("not there", "get it")).run()
    assert "INT8 as TensorRT engines" in machine.conclude(everything).conclusion
    without = machine.conclude([*everything[:-1], lacking])
    assert (without.exit_code, without.conclusion.endswith("because not there.")) == (0, True)
