"""The doctor: every check answers, each one not ok says how to mend it, and none takes the others down."""

import contextlib
import http.server
import importlib
import json
import os
import resource
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from components.common.contracts.errors import EXIT_FAILURE
from enginery.doctor import machine
from enginery.doctor.checks import Check, Planned, absent, missing, ok, run_check, warning
from enginery.doctor.gpu import GpuChecks, NvidiaGpu, Nvml, driver_number, supported
from enginery.doctor.probes import ProbeError, Probes
from enginery.doctor.report import Diagnosis, all_checks, conclude

REPOSITORY = Path(__file__).resolve().parents[2]
GPU = NvidiaGpu("NVIDIA H100", 80 * 10**9, (9, 0))
H100 = Nvml((GPU,), "580.95.05", "")


class Answers(Probes):
    """Probes that have answered already."""

    def __init__(self, **answers: dict[str, object]) -> None:
        self._answers = {name: (values, "ended by SIGILL") for name, values in answers.items()}
        self._processes = {}


def gpu_checks(nvml: Nvml = H100, pci: Path = Path("/nonexistent"), **answers: object) -> GpuChecks:
    checks = GpuChecks(Answers(torch=answers, dali=answers), pci)
    checks.__dict__["nvml"] = nvml  # what the driver would say
    return checks


@pytest.fixture(autouse=True)
def _visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def doctor(directory: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "enginery.cli.main", "doctor", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "ENGINERY_HOME": str(directory), "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> "subprocess.CompletedProcess[str]":
    done = doctor(state := tmp_path_factory.mktemp("doctor") / "state", "--json")
    assert not state.exists()  # looking leaves nothing behind
    return done


def test_json_has_every_check_and_a_fix_for_each_one_not_ok(told: "subprocess.CompletedProcess[str]") -> None:
    report = json.loads(told.stdout)
    assert [check["name"] for check in report["checks"]] == [planned.name for planned in all_checks(Answers())]
    assert all(check["fix"] for check in report["checks"] if check["status"] in ("warning", "missing"))
    assert not any("could not check" in check["found"] for check in report["checks"])
    found = {check["name"]: check["status"] for check in report["checks"]}
    working = ("PyTorch", "DALI", "OpenVINO", "MLflow tracking", "state directory")
    assert {found[name] for name in working} <= {"ok", "warning"}  # a machine may give reason for a warning
    assert "FP32 and INT8 on the CPU. No TensorRT engines, because" in report["conclusion"]
    assert (told.returncode, report["exit_code"]) == (0, 0)


def test_table_ends_with_what_runs_here_and_exit_code_1_when_nothing_does(tmp_path: Path) -> None:
    done = doctor(tmp_path / "python3-state", COLUMNS="80")
    assert done.returncode == EXIT_FAILURE
    assert done.stdout.rstrip().endswith("Nothing runs here before this is mended: state directory.")
    assert "fix: set ENGINERY_HOME to a directory without it" in " ".join(done.stdout.split())
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_a_check_that_raises_is_a_line_of_its_own() -> None:
    def broken() -> None:
        raise ZeroDivisionError("by\nzero")

    check = run_check(Planned("machine", "broken", broken, required=True))  # type: ignore[arg-type]
    assert (check.status, check.found) == ("warning", "could not check: ZeroDivisionError: by zero")
    assert check.fix


def test_a_library_that_crashes_or_hangs_takes_only_its_probe_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    (tmp_path / "openvino.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("enginery.doctor.probes._LIMIT_S", 3.0)
    probes = Probes(("torch", "openvino"))
    assert machine.torch(probes).found == "does not import: ended by SIGILL"
    assert machine.openvino(probes).found == "does not work: gave no answer in 3 s"
    with pytest.raises(ProbeError, match="SIGILL"):
        probes.ask("torch", "available")


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
def test_limits_of_control_groups_of_both_versions(
    tmp_path: Path, files: dict[str, str], cpus: float | None, limit_bytes: int | None
) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("4:memory:/pods/one\n2:cpu,cpuacct:/pods/one\n1:name=systemd:/\n0::/pods/one\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    assert machine.cpu_quota(own, root) == cpus
    assert machine.memory_limit(own, root) == limit_bytes


def test_quota_below_the_cores_names_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 16)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 2.0)
    finding = machine.cores()
    assert (finding.status, "taskset -c 0-1 " in finding.fix) == ("warning", True)


@pytest.mark.parametrize(("limit", "file"), [("AVX2", "int8_cpu_7bit.onnx"), ("", "int8_cpu")])
def test_instruction_sets(monkeypatch: pytest.MonkeyPatch, limit: str, file: str) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    finding = machine.instruction_sets()
    assert finding.status == "ok"
    assert file in finding.found


def test_small_shared_memory_names_docker_and_kubernetes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: type("Usage", (), {"total": 64 << 20})())
    finding = machine.shared_memory(tmp_path)
    assert finding.status == "warning"
    assert "--shm-size" in finding.fix
    assert "emptyDir" in finding.fix


def test_few_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        finding = machine.open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (finding.status, "ulimit -n" in finding.fix) == ("warning", True)


def test_versions(tmp_path: Path) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text("# pins\nclick==1.0  # via enginery\nnumpy==0 ; python_version < '3'\n")
    assert machine.versions(["click>=8", "pytest>=1; extra == 'dev'"], tmp_path / "none").found.startswith("1 package")
    assert "(pin 1.0)" in machine.versions(["click>=8", "numpy>=1"], pins).found
    wrong = machine.versions(["click<2", "no-such-package>=1"], pins)
    assert wrong.status == "missing"
    assert "needed is <2" in wrong.found
    assert "no-such-package is not installed" in wrong.found


def test_versions_come_from_the_checkout_then_from_the_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other, none = tmp_path / "other.toml", tmp_path / "none.toml"
    other.write_text('[project]\nname = "another"\ndependencies = ["click"]\n')
    monkeypatch.setattr(metadata, "requires", lambda name: [f"of-{name}"])
    assert machine.required(none) == machine.required(other) == ["of-enginery"]
    of_checkout = machine.required()
    assert {"torch", "kfp", "mlflow"} <= {Requirement(text).name for text in of_checkout}

    def not_installed(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    assert machine.required() == of_checkout
    assert machine.versions().status != "missing"
    finding = machine.versions(machine.required(none))
    assert (finding.status, "make install" in finding.fix) == ("warning", True)


def test_without_a_gpu_there_is_one_line_on_all_of_it(
    told: "subprocess.CompletedProcess[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    command = importlib.import_module("enginery.cli.doctor")
    monkeypatch.setattr(command, "diagnose", lambda: Diagnosis.model_validate_json(told.stdout))
    done = CliRunner(env={"COLUMNS": "200"}).invoke(command.doctor)
    of_gpu = done.output.partition("\nGPU")[2].splitlines()
    text = " ".join(of_gpu)
    assert "missing" not in text
    if "NVML Shared Library Not Found" in text:
        assert len([line for line in of_gpu if line.startswith("not here")]) == 1
    assert "driver, " in text or "PyTorch on GPU, " in text
    assert "TensorRT: needs a" in text
    assert "because there is no NVIDIA GPU." in text or "because the GPU is hidden by" in text


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


def test_driver_too_old_and_new_enough() -> None:
    assert driver_number("580.65.06") < driver_number("580.95")
    assert gpu_checks(cuda="13.2").driver().status == "ok"
    old = gpu_checks(Nvml((GPU,), "535.183.01", ""), cuda="13.2").driver()
    assert (old.status, "needs 580.65.06 or newer" in old.found, "R580" in old.fix) == ("missing", True, True)


def test_card_without_a_driver_is_told_from_no_card(tmp_path: Path) -> None:
    nothing = Nvml((), "", "NVML Shared Library Not Found")
    without = gpu_checks(nothing, tmp_path).gpus()
    assert (without.status, "INT8 and its verdict work on the CPU" in without.found) == ("absent", True)
    assert gpu_checks(nothing, tmp_path).driver() == absent("needs an NVIDIA GPU")
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    found = gpu_checks(nothing, tmp_path).gpus()
    assert "NVIDIA cards on the PCI bus: 1, but no driver" in found.found
    assert "docker run --gpus all" in found.fix
    assert "docker run --gpus all" in gpu_checks(nothing, tmp_path).driver().fix


def test_hidden_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_checks().gpus().fix == "unset CUDA_VISIBLE_DEVICES"
    assert gpu_checks().torch_sees_cuda() == absent("needs a GPU that CUDA_VISIBLE_DEVICES does not hide")


def test_gpu_that_torch_or_dali_can_not_use() -> None:
    checks = gpu_checks(cuda="13.2", version="2.15.0", available=False, why_not="driver too old")
    assert "can't use the GPU: driver too old" in checks.torch_sees_cuda().found
    assert "failed: ended by SIGILL" in checks.dali_decodes().found


def test_tensorrt_reason_and_fix() -> None:
    reason = "the Python package tensorrt is not installed: run `pip install 'enginery[tensorrt]'`"
    finding = gpu_checks(no_tensorrt=reason).tensorrt()
    assert finding == missing("the Python package tensorrt is not installed", "run `pip install 'enginery[tensorrt]'`")
    assert gpu_checks(no_tensorrt=None, tensorrt="11.4").tensorrt() == ok("TensorRT 11.4")


@contextlib.contextmanager
def server(status: int) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 500)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://user:secret@127.0.0.1:{listening.server_port}"
        listening.shutdown()


@pytest.mark.parametrize(("status", "expected", "fix"), [(200, "ok", ""), (401, "missing", "MLFLOW_TRACKING_USERNAME")])
def test_tracking_server(monkeypatch: pytest.MonkeyPatch, status: int, expected: str, fix: str) -> None:
    with server(status) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        finding = machine.tracking()
        assert (finding.status, fix in finding.fix, "secret" in finding.found) == (expected, True, False)
    gone = machine.tracking()
    assert (gone.status, "can't be reached" in gone.found) == ("missing", True)


def test_tracking_in_sqlite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "_LIMIT_S", 0.2)
    file = tmp_path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE runs (id)")
        connection.commit()
        assert machine.tracking().status == "ok"
        connection.execute("BEGIN IMMEDIATE")
        assert "locked" in machine.tracking().found
    file.write_bytes(b"no database at all " * 100)
    assert f"mv {file}" in machine.tracking().fix


def test_state_directory_that_can_not_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "file" / "state"))
    finding = machine.state_directory()
    assert (finding.status, "ENGINERY_HOME" in finding.fix) == ("missing", True)


def check(name: str, status: str, *, required: bool = False) -> Check:
    finding = {"ok": ok("fine"), "missing": missing("not there", "get it"), "warning": warning("so so", "mend it")}
    found = finding[status]
    return Check(group="", name=name, status=found.status, found=found.found, fix=found.fix, required=required)


def test_conclusion() -> None:
    names = ("OpenVINO", "GPU", "driver", "PyTorch on GPU", "compute capability", "TensorRT")
    everything = [check(name, "ok") for name in names]
    assert "INT8 as TensorRT engines" in conclude(everything).conclusion
    without = conclude([*everything[:-1], check("TensorRT", "missing")])
    assert (without.exit_code, without.conclusion.endswith("because not there.")) == (0, True)
    blocked = conclude([*everything, check("DALI", "missing", required=True)])
    assert (blocked.exit_code, blocked.conclusion.endswith("DALI.")) == (1, True)
