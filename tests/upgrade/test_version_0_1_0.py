"""Files of version 0.1.0 still open: artifacts, a state folder, an MLflow database, chart values, a signed release.

0.1.0.tar.xz holds what that version's own commands wrote: a state folder ($ENGINERY_HOME) after a run of `quantize` on
120 digits, whose MLflow database has version 1 of the model `digits`; a checkpoint; the values of an environment after
`deploy`; and, by the commit before releases were signed with ECDSA, a release signed with Ed25519.
"""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import mlflow
import numpy as np
import pytest
import yaml

from components.common.contracts.manifests import (
    ALL_FILES,
    BundleManifest,
    CheckpointManifest,
    DatasetManifest,
    PromotionManifest,
    ReportManifest,
    VerdictManifest,
    load,
)
from components.common.data.loader import Loader
from components.common.registry.model_registry import Registry
from components.common.runtimes.selection import select_runtime
from enginery.release.deploy import pins_of
from enginery.release.verify import public_key, verify
from tests.helm.rendering import named, render_files
from tests.unit.registered import enginery, make_and_promote

HOME = "/srv/enginery/home"  # where that state folder was


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files, with the state folder as $ENGINERY_HOME: its database names the folder where it is now."""
    shutil.unpack_archive(Path(__file__).parent / "0.1.0.tar.xz", tmp_path)
    home = tmp_path / "0.1.0/home"
    with closing(sqlite3.connect(home / "mlflow.db")) as database, database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for column in [row[1] for row in database.execute(f"PRAGMA table_info({table})")]:
                where = f'WHERE "{column}" LIKE ?'
                values = (HOME, str(home), f"%{HOME}%")
                database.execute(f'UPDATE "{table}" SET "{column}" = replace("{column}", ?, ?) {where}', values)
    monkeypatch.setenv("ENGINERY_HOME", str(home))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home / 'mlflow.db'}")
    mlflow.set_tracking_uri(f"sqlite:///{home / 'mlflow.db'}")
    yield tmp_path / "0.1.0"
    mlflow.set_tracking_uri(None)  # it would keep this one for every test of the process


def artifact(old: Path, step: str) -> Path:
    (folder,) = old.glob(f"home/runs/*/artifacts/*/{step}/*/manifest.json")
    return folder.parent


def test_the_chain_of_artifacts(old: Path) -> None:
    dataset = load(artifact(old, "preprocess"), DatasetManifest, verify=ALL_FILES)
    checkpoint = load(old / "checkpoint", CheckpointManifest, verify=ALL_FILES)
    bundle = load(artifact(old, "export-own"), BundleManifest, verify=ALL_FILES)
    report = load(artifact(old, "validate"), ReportManifest, verify=ALL_FILES)
    verdict = load(artifact(old, "gate"), VerdictManifest, verify=ALL_FILES)
    promotion = load(artifact(old, "promote"), PromotionManifest, verify=ALL_FILES)
    assert checkpoint.manifest.inputs["dataset"] == bundle.manifest.inputs["dataset"] == dataset.digest
    assert report.manifest.inputs["bundle"] == promotion.manifest.bundle_digest == bundle.digest
    assert verdict.manifest.inputs["report"] == report.digest
    assert [epoch.val_score_pct for epoch in checkpoint.manifest.history] == [40.0, 60.0]

    loader = Loader(dataset, "val", bundle.manifest.transform, batch_size=10, num_threads=1)
    assert sum(len(batch.labels) for batch in loader) == dataset.manifest.splits["val"].num_images == 20
    runner = select_runtime(bundle, "int8", "auto").runner
    assert runner.infer(np.zeros((2, 3, 32, 32), np.float32)).shape == (2, 10)


def test_a_state_folder_with_a_run(old: Path) -> None:
    (run,) = json.loads(enginery("runs", "--json").output)
    assert (run["status"], run["registered"]) == ("done", "digits/1")
    found = json.loads(enginery("compare", run["run"], "digits/1", "--json").output)
    first, second = (entry["rows"]["int8"] for entry in found["runs"])
    assert (first["score_pct"], first["verdict"]) == (second["score_pct"], second["verdict"])
    assert not [warning for warning in found["warnings"] if "images" in warning], "both were measured on the same ones"


def test_an_mlflow_database_with_a_promoted_version(old: Path, tmp_path: Path) -> None:
    (row,) = json.loads(enginery("models", "--json").output)
    assert (row["model"], row["version"], sorted(row["aliases"])) == ("digits", "1", ["candidate", "champion"])
    done = enginery("audit", "digits", "--files")
    assert done.exit_code == 0, done.output
    enginery("serve", "export", "digits@champion", tmp_path / "repository")
    uri = mlflow.get_tracking_uri()
    make_and_promote(uri, tmp_path, "b-060", "digits", allow_other_model=True)
    assert Registry.open(uri).aliases("digits") == {"candidate": "2", "champion": "1"}
    enginery("release", tmp_path / "release", "digits@champion")


def test_chart_values(old: Path) -> None:
    text = (old / "values.yaml").read_text()
    pins = pins_of(text, "values.yaml")
    assert (pins.label, pins.is_deployed) == ("digits version 1", True)
    served = named(render_files(yaml.safe_load(text)), "Deployment", "serve")
    assert pins.repository_digest in json.dumps(served)


def test_a_release_signed_with_ed25519(old: Path) -> None:
    key = public_key(old / "release.pub")
    checked = verify(old / "release", key)
    assert checked.problems == ()
    assert checked.signature.startswith("valid, by the key sha256:")
    assert "as it was released" in enginery("verify", old / "release").output
    shutil.copy(old / "release/SHA256SUMS", old / "sums")
    (old / "release/SHA256SUMS").write_bytes((old / "sums").read_bytes()[66 + 20 :])
    assert any("SHA256SUMS.sig" in problem for problem in verify(old / "release", key).problems)
