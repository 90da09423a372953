"""Shared by tests of registered models: small artifacts of any top-1, promotions, keys and a trust policy, git.

    python -m tests.unit.registered URI FOLDER MODEL NAME ...

makes one chain of artifacts for each NAME in FOLDER (its digits are the top-1: "a-070") and promotes them in turn.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from mlflow import MlflowClient
from mlflow.tracking._tracking_service import utils
from onnx import helper

from components.common.contracts.digests import canonical_json, digest_bytes
from components.common.contracts.manifests import (
    MANIFEST,
    BundleManifest,
    DatasetManifest,
    ReportManifest,
    VerdictManifest,
    load,
    seal,
    seal_of,
)
from components.common.contracts.records import (
    AccuracyRow,
    BenchmarkReport,
    CalibrationEntry,
    CpuModel,
    DatasetStatistics,
    Split,
)
from components.common.contracts.settings import StepConfig
from components.common.contracts.transforms import ShapeSpec, transform_for
from components.common.contracts.verdict import run_checks
from components.common.process.steplog import StepLog
from components.common.registry import trust
from components.common.registry.audit_log import Proposal, change_aliases
from components.common.registry.keys import KEY_VARIABLE
from components.common.registry.model_registry import Registry
from components.common.registry.tracking import step_run
from components.common.registry.version_evaluation import load_evaluation
from components.gate.config import GateConfig
from components.gate.run import run as gate
from components.promote.config import PromoteConfig
from components.promote.run import run as promote
from components.validate.config import ValidateConfig
from enginery.cli.commands import cli
from enginery.release.deploy import Pins, environments
from tests.conftest import Dataset, Shared
from tests.processes import ROOT
from tests.unit.measurements import accuracy_report, benchmark_row, engine_entry
from tests.unit.refusals import refuses as refuses

PARTS = ("bundle", "report", "verdict")
NAME = "digits"  # under which the fixture `promoted` has a real network
NUM_IMAGES = 100
SIDE = 16  # of the constant model's images
CHANGED = "was changed after it was sealed"
FUTURE, PAST = "2999-01-01", "2001-01-01"


def enginery(*arguments: object, stdin: bytes | None = None, columns: int = 200) -> Result:
    """The command's result; raises what the process would end with."""
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, [str(word) for word in arguments], input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- artifacts


def make_dataset(path: Path, split: str = "one") -> Path:
    """A dataset without shards, whose validation split has the digest "val-SPLIT"."""
    path.mkdir(parents=True)
    statistics = DatasetStatistics(mean=(0, 0, 0), std=(1, 1, 1), min_side=32, median_side=32, max_side=32)
    splits = {
        name: Split(num_images=NUM_IMAGES, shards=(), class_counts=(50, 50), digest=f"{name}-{split}")
        for name in ("train", "val")
    }
    fields = {"classes": ("a", "b"), "splits": splits, "statistics": statistics, "num_rejected": 0}
    seal(path, DatasetManifest, inputs={}, config=StepConfig(), **fields)
    return path


def constant_model(favourite: int, num_classes: int) -> bytes:
    """An ONNX model that sees nothing: it always says one class."""
    from tests.unit.networks import onnx_model  # imports torch, which a process that only promotes does without

    logits = np.zeros((1, num_classes), np.float32)
    logits[0, favourite] = 1.0
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["mean"], axes=[1, 2, 3], keepdims=0),  # [B]
        helper.make_node("Unsqueeze", ["mean", "last"], ["column"]),  # [B, 1]
        helper.make_node("Mul", ["column", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "logits_of_one"], ["logits"]),  # [B, classes]
    ]
    constants = {"last": np.array([1]), "zero": np.zeros((1, num_classes), np.float32), "logits_of_one": logits}
    shapes = {"images": ["batch", 3, SIDE, SIDE]}, {"logits": ["batch", num_classes]}
    content: bytes = onnx_model(nodes, *shapes, constants).SerializeToString()
    return content


def make_chain(
    folder: Path,
    score_pct: float,
    *,
    split: str = "",
    passed: bool = True,
    data: Dataset | None = None,
    favourite: int | None = None,
    planned: tuple[str, ...] = (),
    measured: Mapping[str, str] | None = None,
    **model: Any,
) -> dict[str, Path]:
    """A bundle, its report, the verdict on it and the dataset: the inputs of promote.

    Args:
        folder: that they are written into.
        score_pct: of INT8, in the report.
        split: of the report; that of the data where it is empty.
        passed: the verdict.
        data: real images; without, a dataset of no shards is made.
        favourite: the class that a real model always says; without, the model is no network.
        planned: files of plans in the bundle.
        measured: runtime by file, of the report's rows of INT8.
        model: fields of the bundle; `digest` is that of what was exported.
    """
    paths = {name: folder / name for name in PARTS}
    if data is None:
        data = load(make_dataset(folder / "dataset", split or "one"), DatasetManifest)
    for path in paths.values():
        path.mkdir(parents=True)
    classes = model.pop("classes", data.manifest.classes)
    if favourite is None:
        (paths["bundle"] / "int8.onnx").write_bytes(f"the model of {folder.name}".encode())
    else:
        (paths["bundle"] / "int8.onnx").write_bytes(constant_model(favourite, len(classes)))
    for file in planned:
        (paths["bundle"] / file).write_bytes(b"a plan")
    side = 32 if favourite is None else SIDE
    bundle = seal(
        paths["bundle"],
        BundleManifest,
        inputs={"model": model.pop("digest", "sha256:" + "c" * 64), "dataset": data.digest},
        config=StepConfig(),
        architecture=model.pop("architecture", "resnet18"),
        classes=classes,
        transform=transform_for(side, resize_ratio=1.0),
        shapes=ShapeSpec(height=side, width=side),
        models={"fp32": "int8.onnx", "int8": "int8.onnx"},
        cpu_models=(CpuModel(file="int8.onnx", weight_bits=8, activations="signed", saturates_on=()),),
        engines=tuple(engine_entry(file=file) for file in planned),
        calibration=CalibrationEntry(method="max", num_images=1, split="train", seconds=0),
        num_quantized_layers=1,
        num_quantizable_layers=1,
        **model,
    )
    num_images = data.manifest.splits["val"].num_images
    if favourite is None:
        labels = np.zeros(num_images, np.int32)
        top = np.ones((num_images, 2), np.int16)
        top[: int(score_pct)] = 0  # correct
    else:
        labels = np.repeat(np.arange(len(classes)), num_images // len(classes)).astype(np.int32)
        top = np.full((num_images, 5), favourite, np.int16)
    np.savez_compressed(paths["report"] / "predictions.npz", int8=top, labels=labels)
    (paths["report"] / "report.html").write_text("<p>the report</p>")
    facts: dict[str, Any] = {"device": "a CPU", "num_images": num_images}
    own = {"score_pct": score_pct, "delta_points": score_pct - 90.0, **facts}
    runtimes = {"int8.onnx": "openvino"} if measured is None else measured
    int8 = [AccuracyRow(precision="int8", runtime=name, file=file, **own) for file, name in runtimes.items()]
    fp32 = AccuracyRow(precision="fp32", runtime="openvino", score_pct=90.0, delta_points=0.0, **facts)
    speed = benchmark_row("int8", 9, runtime="openvino", p99_ms=3)
    digests = {"dataset_digest": data.digest, "bundle_digest": bundle.digest}
    split_digest = f"val-{split}" if split else data.manifest.splits["val"].digest
    # The right thresholds for any chain, so that the verdict follows from the report, as everybody checks.
    thresholds = GateConfig(
        confident=False,
        max_drop_points=100,
        min_relative_score_pct=0,
        require_above_chance=False,
        min_score_pct=0 if passed else 100,
    )
    report = seal(
        paths["report"],
        ReportManifest,
        inputs={"bundle": bundle.digest, "dataset": data.digest},
        config=ValidateConfig(gate=thresholds),
        accuracy=accuracy_report(fp32, *int8, split_digest=split_digest, **digests),
        benchmark=BenchmarkReport(bundle_digest=bundle.digest, rows=(speed,)),
    )
    checks = run_checks(thresholds, report.manifest.accuracy, report.manifest.benchmark) if int8 else []
    seal(
        paths["verdict"],
        VerdictManifest,
        inputs={"report": report.digest, "bundle": bundle.digest},
        config=thresholds,
        passed=all(check.verdict == "pass" for check in checks),
        precision="int8",
        checks=tuple(checks),
    )
    return {**paths, "dataset": data.path}


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """Edit a manifest as a forger would, with a seal that fits. Returns the new digest."""
    record = json.loads((folder / MANIFEST).read_bytes())
    change(record)
    if "seal" in record:
        record["seal"] = seal_of(record)
    (folder / MANIFEST).write_bytes(canonical_json(record))
    return digest_bytes(canonical_json(record))


def replace_file(folder: Path, file: str, data: bytes) -> str:
    """Replace a file of an artifact as who knows the format does: manifest and seal fit. Returns the new digest."""
    (folder / file).write_bytes(data)
    entry = {"size_bytes": len(data), "digest": digest_bytes(data)}
    return reseal(folder, lambda record: record["files"].update({file: entry}))


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


# --- promotions


def promote_chain(uri: str, paths: dict[str, Path], output: Path, model: str = "m", **settings: Any) -> str:
    """The step itself, tracked at a URI. Returns its closing line."""
    os.environ["MLFLOW_TRACKING_URI"] = uri
    mlflow.set_tracking_uri(uri)
    config = PromoteConfig(registered_model=model, **settings)
    with step_run("promote") as tracked:
        return promote(config, StepLog("promote", tracked), output=output, **paths)


def make_and_promote(uri: str, folder: Path, name: str, model: str = "m", *, split: str = "", **settings: Any) -> str:
    """A chain called "a-070" gets a top-1 of 70 %."""
    paths = make_chain(folder / name, int(name.rpartition("-")[2]), split=split)
    return promote_chain(uri, paths, folder / name / "promotion", model, **settings)


def upload_forged(registry: Registry, paths: Mapping[str, Path]) -> tuple[str, dict[str, str]]:
    """A version that no `promote` registered, by the API of MLflow. Returns its number, and what it was made from."""
    folder = paths["bundle"].parent
    place = (folder / "uploaded").as_uri() if registry.uri.startswith("sqlite") else None
    run = registry.client.create_run(registry.client.create_experiment(f"of {folder.name}", place))
    for part in PARTS:
        registry.client.log_artifacts(run.info.run_id, str(paths[part]), f"model/{part}")
    evaluation = load_evaluation(paths["report"], paths["verdict"])
    return registry.create_version("m", run.info.run_id, evaluation.tags), evaluation.digests


def register_forged(registry: Registry, paths: Mapping[str, Path], alias: str = "forged") -> str:
    """The same with an entry in the log: who can write there can make one up."""
    number, digests = upload_forged(registry, paths)
    entry = Proposal(kind="promote", aliases={alias: number}, why="x", digests=digests)
    change_aliases(registry, "m", lambda situation: entry)
    return number


def register_failed(registry: Registry, folder: Path) -> str:
    """A version of 99 % whose gate did not pass."""
    return register_forged(registry, make_chain(folder, 99, passed=False))


@pytest.fixture
def registry(store: str) -> Registry:
    return Registry(MlflowClient(tracking_uri=store, registry_uri=store))


@pytest.fixture(scope="session")
def made_once(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store has champions 1 and 3 of m, and 2, which is worse.

    Each process has its own: attacks change its files for a while.
    """
    folder = tmp_path_factory.mktemp("made_once")
    shutil.copy(empty_store, folder / "mlflow.db")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        for name in ("a-050", "b-040", "c-060"):
            make_and_promote(uri, folder, name)
    return folder


# Where MLflow keeps addresses of files.
_ADDRESSES = (
    ("experiments", "artifact_location"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
    ("runs", "artifact_uri"),
)


def copy_store(made: Path, folder: Path) -> None:
    """A store and all that lies beside it, as if it had been made in another folder: each test's own to attack."""
    shutil.copytree(made, folder, dirs_exist_ok=True)
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        for table, column in _ADDRESSES:
            change = f"UPDATE {table} SET {column} = replace({column}, ?, ?)"
            database.execute(change, (made.as_uri(), folder.as_uri()))
        database.commit()
    utils._artifact_repos_cache.clear()  # by numbers of runs and models, which the copies share


@pytest.fixture
def three(made_once: Path, store: str) -> str:
    """A copy of that store; the files that it knows are the same."""
    shutil.copy(made_once / "mlflow.db", store.removeprefix("sqlite:///"))
    return store


# --- keys and policies


def write_keys(stem: Path, passphrase: bytes = b"") -> tuple[Path, Path]:
    """A private and a public key."""
    key = generate_private_key(SECP256R1())
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    private, public = stem.with_suffix(".key"), stem.with_suffix(".pub")
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


class Machine:
    """A machine with a policy, and the people who have keys; those that are in the folder already stay."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        names = ("ci", "board", "stranger")
        self.keys = {name: (folder / f"{name}.key", folder / f"{name}.pub") for name in names}
        for name in names:
            if not self.key(name).exists():
                write_keys(folder / name)
        self.policy()

    def policy(self, *, environment: str = "", expires: str = FUTURE, newest: bool = False, **keys: Any) -> None:
        """Write it as the operator does. `keys`: rights of a name, in place of the usual ones."""
        usual: dict[str, Any] = {"ci": {"signs": ["verdict", "model"]}, "board": {"approves": ["prod", "staging"]}}
        named = {
            name: {"public_key": self.keys[name][1].read_text(), "expires": expires, **rights}
            for name, rights in {**usual, **keys}.items()
        }
        newest_file = str(self.folder / "newest.json") if newest else ""
        text = {"environment": environment, "keys": named, "newest_approvals": newest_file}
        (self.folder / "trust.yaml").write_text(yaml.safe_dump(text))
        self.monkeypatch.setenv(trust.POLICY_VARIABLE, str(self.folder / "trust.yaml"))

    def without_policy(self) -> None:
        self.monkeypatch.delenv(trust.POLICY_VARIABLE)

    def key(self, name: str) -> Path:
        return self.keys[name][0]

    def judged(self, name: str, signer: str = "ci") -> dict[str, Path]:
        """A chain whose verdict the real gate wrote, with somebody's key."""
        paths = make_chain(self.folder / name, int(name.rpartition("-")[2]))
        thresholds = json.loads((paths["verdict"] / MANIFEST).read_bytes())["config"]
        shutil.rmtree(paths["verdict"])
        with pytest.MonkeyPatch.context() as patch:
            if signer:
                patch.setenv(KEY_VARIABLE, self.key(signer).read_text())  # as from a Secret
            config = GateConfig.model_validate(thresholds)
            gate(config, StepLog("gate"), report=paths["report"], output=paths["verdict"])
        return paths

    def promote(self, uri: str, name: str) -> str:
        """The chain as a version of m."""
        return promote_chain(uri, self.judged(name), self.folder / name / "promotion")

    def approve(self, reference: str, environment: str, signer: str = "board") -> None:
        enginery("approve", reference, "--env", environment, "--key", self.key(signer))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (tmp_path / "machine").mkdir()
    return Machine(tmp_path / "machine", monkeypatch)


@pytest.fixture(scope="session")
def signed_once(empty_store: Path, shared: Shared) -> Path:
    """A store whose version 1 of m has a signed verdict, with the machine of its keys."""

    def build(folder: Path) -> None:
        (folder / "machine").mkdir()
        shutil.copy(empty_store, folder / "mlflow.db")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", "")
            Machine(folder / "machine", patch).promote(f"sqlite:///{folder / 'mlflow.db'}", "a-050")

    return shared("signed", build)


@pytest.fixture
def trusted(signed_once: Path, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose policy trusts version 1 of m."""
    copy_store(signed_once, tmp_path)
    return Machine(tmp_path / "machine", monkeypatch)


# --- deployments


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the environments of ours, as the current directory."""
    root = tmp_path / "gitops"
    for file in (ROOT / "helm/environments").rglob("values.yaml"):
        copy = root / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        copy.write_bytes(file.read_bytes())
    monkeypatch.chdir(root)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "t")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "t@e.x")
    git("init", "--quiet", "--initial-branch=main")
    git("add", "--all")
    git("commit", "--quiet", "--message", "Environments")
    return root


def pins(name: str) -> Pins:
    """Return the version that an environment of the current directory runs."""
    return environments(Path("helm/environments"))[name].read()


def exported(reference: str, *options: object) -> Path:
    """A model repository of a version, as `--repository` takes it, beside the current directory."""
    folder = Path("..", f"repository-{reference.replace('/', '-').replace('@', '-')}").resolve()
    if not folder.exists():
        enginery("serve", "export", reference, folder, *options)
    return folder


def deploy(env: str, reference: str, *more: object) -> Result:
    return enginery("deploy", "--env", env, reference, "--repository", exported(reference), *more)


if __name__ == "__main__":
    _uri, _folder, _model, *_names = sys.argv[1:]
    for _name in _names:
        print(make_and_promote(_uri, Path(_folder), _name, _model), flush=True)
