"""fetch: an artifact comes complete, as its digest says, or not at all."""

from collections.abc import Callable
from pathlib import Path

import pytest

from components.common.contracts.digests import digest_bytes
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import MANIFEST, BundleManifest, load
from enginery.release.fetch import fetch
from tests.unit.registered import enginery, files, flip, make_chain, refuses, reseal

OTHER = "sha256:" + "0" * 64


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_chain(tmp_path / "store-090", 90)["bundle"]


def digest_of(folder: Path) -> str:
    return load(folder, BundleManifest).digest


def test_what_is_listed_comes_and_nothing_else(bundle: Path, tmp_path: Path) -> None:
    (bundle / "model.py").write_text("import os")
    target = tmp_path / "models/repository"
    done = enginery("fetch", bundle, target, "--digest", digest_of(bundle))
    assert "1 files, all as sealed" in done.output
    assert files(target).keys() == {"int8.onnx", MANIFEST}
    assert digest_of(target) == digest_of(bundle)
    assert [path.name for path in target.parent.iterdir()] == ["repository"]
    fetch(str(bundle), target, digest_of(bundle))  # a pod that is started again
    flip(target / "int8.onnx")
    with refuses("file-damaged"):
        fetch(str(bundle), target, digest_of(bundle))


def test_through_mlflows_clients(bundle: Path, tmp_path: Path) -> None:
    before = files(bundle)
    fetch(bundle.as_uri(), tmp_path / "copy", digest_of(bundle))
    assert files(tmp_path / "copy") == files(bundle) == before, "the original stays"
    with refuses("download-failed"):
        fetch((tmp_path / "lost").as_uri(), tmp_path / "none", OTHER)
    assert not (tmp_path / "none").exists()


def edit(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], str]:
    def edited(bundle: Path) -> str:
        (bundle / file).write_bytes(change((bundle / file).read_bytes()))
        return digest_bytes((bundle / MANIFEST).read_bytes())

    return edited


def lead_out(bundle: Path) -> str:
    (bundle.parent / "secret").write_text("x")
    entry = {"size_bytes": 1, "digest": digest_bytes(b"x")}
    return reseal(bundle, lambda record: record.update(files={"../secret": entry}))


def rename(bundle: Path) -> str:
    """Anybody can seal a manifest that names the right bundle."""
    digest = digest_of(bundle)
    reseal(bundle, lambda record: record.update(architecture="resnet50", inputs={"bundle": digest}))
    return digest


@pytest.mark.parametrize(
    ("attack", "code"),
    [
        (edit("int8.onnx", lambda data: data[::-1]), "file-damaged"),
        (edit("int8.onnx", lambda data: data[:-1]), "file-damaged"),
        (lambda bundle: [digest_of(bundle), (bundle / "int8.onnx").unlink()][0], "file-damaged"),
        (edit(MANIFEST, lambda data: data.replace(b"resnet18", b"resnet50")), None),
        (edit(MANIFEST, lambda data: b'{"kind": "bundle"}'), "manifest-damaged"),
        (rename, "other-digest"),
        (lead_out, "file-outside"),
        (lambda bundle: [(bundle / MANIFEST).unlink(), OTHER][1], "no-artifact"),
    ],
)
def test_tampered_artifacts_are_not_fetched(
    bundle: Path, tmp_path: Path, attack: Callable[[Path], str], code: str | None
) -> None:
    digest = attack(bundle)
    with pytest.raises(EngineryError) as caught:
        fetch(str(bundle), tmp_path / "target", digest)
    assert caught.value.code == code or (code is None and "was edited after it was sealed" in str(caught.value))
    assert not (tmp_path / "target").exists()


def test_a_target_that_is_something_else(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/notes.txt").write_text("mine")
    with refuses("no-artifact"):
        fetch(str(bundle), tmp_path / "target", digest_of(bundle))
    assert (tmp_path / "target/notes.txt").read_text() == "mine"


def test_a_digest_is_asked_for_in_full(bundle: Path, tmp_path: Path) -> None:
    assert enginery("fetch", bundle, tmp_path / "x", "--digest", "sha256:3b3b").exit_code == 2
    with refuses("no-digest", "--digest"):
        enginery("fetch", bundle, tmp_path / "x")
