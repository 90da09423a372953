"""fetch: an artifact comes complete, as its digest says, or not at all."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from components.common.contracts.digests import canonical_json, digest_bytes
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import MANIFEST, BundleManifest, load, seal_of
from enginery.cli.commands import cli
from enginery.release.fetch import fetch
from tests.unit.promoting.chains import make_chain

OTHER = "sha256:" + "0" * 64


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_chain(tmp_path / "store-090", 90)["bundle"]


def digest_of(folder: Path) -> str:
    return load(folder, BundleManifest).digest


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_is_listed_comes_and_nothing_else(bundle: Path, tmp_path: Path) -> None:
    (bundle / "model.py").write_text("import os")
    target = tmp_path / "models/repository"
    done = CliRunner().invoke(cli, ["fetch", str(bundle), str(target), "--digest", digest_of(bundle)])
    assert done.exit_code == 0, done.output
    assert "1 files, all as sealed" in done.output
    assert files(target) == {"int8.onnx", MANIFEST}
    assert digest_of(target) == digest_of(bundle)
    assert [path.name for path in target.parent.iterdir()] == ["repository"]
    fetch(str(bundle), target, digest_of(bundle))  # a pod that is started again


def test_what_an_artifact_says_of_its_bundle_is_no_identity(bundle: Path, tmp_path: Path) -> None:
    """Anybody can seal a manifest that names the right bundle."""
    report = bundle.parent / "report"
    with pytest.raises(EngineryError, match=f"holds the report sha256:.*, and {digest_of(bundle)} is asked for"):
        fetch(str(report), tmp_path / "one", digest_of(bundle))
    assert not (tmp_path / "one").exists()


def test_through_mlflows_clients(bundle: Path, tmp_path: Path) -> None:
    found = fetch(bundle.as_uri(), tmp_path / "copy", digest_of(bundle))
    assert files(tmp_path / "copy") == {*found.files, MANIFEST}
    assert files(bundle) == {*found.files, MANIFEST}, "the original stays"
    with pytest.raises(EngineryError, match=r"can't download file:.*Is the artifact there"):
        fetch((tmp_path / "lost").as_uri(), tmp_path / "none", OTHER)
    assert not (tmp_path / "none").exists()


def reseal(folder: Path, **changed: object) -> str:
    """What somebody writes who knows how manifests are made."""
    record = {**json.loads((folder / MANIFEST).read_bytes()), **changed}
    record["seal"] = seal_of(record)
    (folder / MANIFEST).write_bytes(canonical_json(record))
    return digest_bytes(canonical_json(record))


def test_tampered_artifacts_stay_outside(bundle: Path, tmp_path: Path) -> None:
    digest = digest_of(bundle)
    original, model = (bundle / MANIFEST).read_bytes(), (bundle / "int8.onnx").read_bytes()

    def refused(words: str, asked: str = digest) -> None:
        with pytest.raises(EngineryError, match=words):
            fetch(str(bundle), tmp_path / "target", asked)
        assert not (tmp_path / "target").exists()

    (bundle / "int8.onnx").write_bytes(model[::-1])
    refused("is not what was sealed")
    (bundle / "int8.onnx").write_bytes(model[:-1])
    refused("has .* bytes, its manifest says")
    (bundle / "int8.onnx").unlink()
    refused("int8.onnx is missing")
    (bundle / "int8.onnx").write_bytes(model)
    (bundle / MANIFEST).write_bytes(original.replace(b"resnet18", b"resnet50"))
    refused("was edited after it was sealed", asked=digest_bytes((bundle / MANIFEST).read_bytes()))
    reseal(bundle, architecture="resnet50")
    refused("is asked for")
    (tmp_path / "store-090/secret").write_text("x")
    entry = {"size_bytes": 1, "digest": digest_bytes(b"x")}
    refused("names a file outside the artifact", asked=reseal(bundle, files={"../secret": entry}))
    (bundle / MANIFEST).write_bytes(b'{"kind": "bundle"}')
    refused("is no manifest of enginery")
    (bundle / MANIFEST).unlink()
    refused("has no manifest.json")


def test_a_target_that_is_something_else(bundle: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        fetch(str(bundle), target, digest_of(bundle))
    fetch(str(bundle), tmp_path / "right", digest_of(bundle))
    with (tmp_path / "right/int8.onnx").open("ab") as file:
        file.write(b"x")
    with pytest.raises(EngineryError, match="is not what was sealed"):
        fetch(str(bundle), tmp_path / "right", digest_of(bundle))


def test_a_digest_is_asked_for_in_full(bundle: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["fetch", str(bundle), str(tmp_path / "x"), "--digest", "sha256:3b3b"])
    assert done.exit_code == 2
    assert "64 hexadecimal digits" in done.output
    done = CliRunner().invoke(cli, ["fetch", str(bundle), str(tmp_path / "x")])
    assert isinstance(done.exception, UserError)
    assert "--digest sha256:" in str(done.exception)
