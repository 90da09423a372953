"""Attacks on the way from the registry to the server, each against the real parts: none of them gets through."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from components.common.contracts.digests import canonical_json, digest_bytes
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import MANIFEST, seal_of
from components.common.contracts.records import FileEntry
from components.common.registry.model_registry import Registry
from enginery.release.fetch import fetch
from enginery.serving import repository as repository_module
from tests.pipelines.servers import free_port
from tests.unit.release.test_server import serving

from .chains import make_and_promote
from .test_deploy import checkout, exported, git, pins
from .test_registry_commands import enginery, register_forged

__all__ = ["checkout"]  # a fixture


@pytest.fixture(scope="module", params=["sqlite", pytest.param("server", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[str]:
    """MLflow's URI, of its files or of a real server, with version 1 of m as it was promoted."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(empty_store, folder / "mlflow.db")
    uri = f"sqlite:///{folder}/mlflow.db"
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if request.param == "server":
            port = free_port()
            place = ["--backend-store-uri", uri, "--artifacts-destination", str(folder / "kept")]
            uri = f"http://127.0.0.1:{port}"
            stack.enter_context(serving(uri, "/health", "server", "--port", str(port), "--workers", "1", *place))
        before = mlflow.get_tracking_uri()
        stack.callback(mlflow.set_tracking_uri, before)
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        make_and_promote(uri, folder, "a-050")
        yield uri


@pytest.fixture
def writer(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """What a registry write token opens: all of MLflow's own API."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path))
    mlflow.set_tracking_uri(store)
    return Registry(MlflowClient(tracking_uri=store, registry_uri=store))


def test_a_forged_chain_without_an_entry_in_the_log(writer: Registry, checkout: Path, tmp_path: Path) -> None:
    """A bundle with report and verdict that fit each other, uploaded and tagged as `promote` does, made champion."""
    number = register_forged(writer, tmp_path / "forged")
    writer.client.set_registered_model_alias("m", "champion", number)
    assert enginery("audit", "m").exit_code == 1
    repository = exported("m/1")
    with pytest.raises(EngineryError, match="is not in the audit log"):
        enginery("deploy", "--env", "prod", "m@champion", "--repository", repository)
    for words in ("is not in the audit log", "has no tag of enginery's|its tag bundle_digest says nothing"):
        for command in (
            ("serve", "export", f"m/{number}", str(tmp_path / "out")),
            ("release", str(tmp_path / "out"), f"m/{number}"),
            ("deploy", "--env", "prod", f"m/{number}", "--repository", repository),
            ("promote", "m", number, "--to", "staging", "--why", "x", "--force"),
        ):
            with pytest.raises(EngineryError, match=f"m version {number} .*({words})"):
                enginery(*command)
        assert writer.aliases("m")["champion"] == "1", "which the next command puts right"
        for name in writer.version("m", number).tags:  # which was enough to be taken for somebody else's model
            writer.client.delete_model_version_tag("m", number, name)
    assert not (tmp_path / "out").exists()
    assert not pins("prod").is_deployed


def test_tags_deleted_from_a_version_that_was_promoted(writer: Registry, tmp_path: Path) -> None:
    version = writer.version("m", "1")
    for name in version.tags:
        writer.client.delete_model_version_tag("m", "1", name)
    for command in (("serve", "export", "m/1", str(tmp_path / "out")), ("release", str(tmp_path / "out"), "m/1")):
        with pytest.raises(EngineryError, match=r"was registered with: .*says nothing"):
            enginery(*command)
    for name, value in version.tags.items():
        writer.client.set_model_version_tag("m", "1", name, value)


def reseal(folder: Path, file: str, data: bytes) -> str:
    """Replace a file of an artifact as who knows the format does: manifest and seal fit. Returns the new digest."""
    (folder / file).write_bytes(data)
    record = json.loads((folder / MANIFEST).read_bytes())
    record["files"][file] = FileEntry(size_bytes=len(data), digest=digest_bytes(data)).model_dump()
    record["seal"] = seal_of(record)
    (folder / MANIFEST).write_bytes(canonical_json(record))
    return digest_bytes(canonical_json(record))


def test_a_foreign_model_in_a_repository_that_names_the_right_bundle(
    writer: Registry, checkout: Path, tmp_path: Path
) -> None:
    enginery("deploy", "--env", "prod", "m/1", "--repository", exported("m/1"))
    forged = shutil.copytree(exported("m/1"), tmp_path / "store")
    other = reseal(forged, "m_labels/1/model.py", b"import os\n")
    assert json.loads((forged / MANIFEST).read_bytes())["inputs"]["bundle"] == pins("prod").digest
    for digest in (pins("prod").digest, pins("prod").repository_digest):  # whatever the chart asks for
        with pytest.raises(EngineryError, match=rf"holds the repository {other}, and {digest} is asked for"):
            fetch(str(forged), tmp_path / "pod", digest)
    with pytest.raises(EngineryError, match=r"`enginery serve export` writes .*: m_labels/1/model.py differ"):
        enginery("deploy", "--env", "staging", "m/1", "--repository", str(forged))
    assert not pins("staging").is_deployed
    assert git("log", "--format=%s").splitlines()[0] == "Deploy m version 1 to prod"


def test_a_file_swapped_between_check_and_copy(three: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link in the store is turned to another file once the checks are over."""
    with Registry(MlflowClient()).files(Registry(MlflowClient()).version("m", "3"), "bundle", "int8.onnx") as model:
        original = model.rename(tmp_path / "original")
        (tmp_path / "other").write_bytes(original.read_bytes()[::-1])
        shutil.copy(original, model.with_name("copy"))
        model.symlink_to("copy")

        def late(*arguments: object) -> None:
            model.unlink()
            model.symlink_to(tmp_path / "other")

        monkeypatch.setattr(repository_module, "check_new", late)
        try:
            with pytest.raises(EngineryError, match=r"int8.onnx of .* was changed while it was copied"):
                enginery("serve", "export", "m/3", str(tmp_path / "out"))
        finally:
            model.unlink()
            model.with_name("copy").unlink()
            original.rename(model)
    assert not (tmp_path / "out").exists()
