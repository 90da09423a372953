"""fetch: an artifact comes complete, as its digest says, or not at all."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.digests import digest_bytes
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import MANIFEST, BundleManifest, load
from components.common.registry import model_registry, trust
from components.common.registry.model_registry import download
from enginery.release import fetch as fetching
from enginery.release.fetch import fetch, read_identity
from tests.serving import Served, serving
from tests.unit.registered import Machine, enginery, files, flip, make_chain, refuses, reseal

OTHER = "sha256:" + "0" * 64


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_chain(tmp_path / "store-090", 90)["bundle"]


def digest_of(folder: Path) -> str:
    return load(folder, BundleManifest).digest


def test_what_is_listed_comes_and_nothing_else(bundle: Path, tmp_path: Path) -> None:
    before = files(bundle)
    fetch(bundle.as_uri(), tmp_path / "copy", digest_of(bundle))  # through MLflow's clients
    assert files(tmp_path / "copy") == files(bundle) == before, "the original stays"
    with refuses("file-damaged"):
        fetch((tmp_path / "lost").as_uri(), tmp_path / "none", OTHER)
    assert not (tmp_path / "none").exists()
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
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with refuses("no-artifact"):
        fetch(str(bundle), tmp_path / "mine", digest_of(bundle))
    assert files(tmp_path / "mine") == {"notes.txt": b"mine"}
    assert enginery("fetch", bundle, tmp_path / "x", "--digest", "sha256:3b3b").exit_code == 2  # not in full
    with refuses("no-digest", "--digest"):
        enginery("fetch", bundle, tmp_path / "x")


def test_two_fetch_into_one_folder(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, left = tmp_path / "copy", tmp_path / ".copy.01234567.tmp"
    left.mkdir()
    os.utime(left, (0, 0))
    check = fetching._checked

    def then_another(folder: Path, *arguments: str) -> Any:
        monkeypatch.setattr(fetching, "_checked", check)
        fetch(str(bundle), target, digest_of(bundle))
        return check(folder, *arguments)

    monkeypatch.setattr(fetching, "_checked", then_another)
    assert fetch(str(bundle), target, digest_of(bundle)).digest == digest_of(target)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("grown", ["int8.onnx", MANIFEST, "model.sig", "more.dsse.json", "more.bin"])
def test_a_store_that_holds_more_than_its_manifest_says(bundle: Path, tmp_path: Path, monkeypatch, grown: str) -> None:
    """Files that nobody asked for, and files that grew to a terabyte, are not brought: they would fill the disk."""
    digest, brought = digest_of(bundle), []
    with (bundle / grown).open("ab") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(model_registry, "download", lambda uri, file: [brought.append(uri), download(uri, file)])
    if grown == "more.bin":
        fetch(bundle.as_uri(), tmp_path / "copy", digest)
        assert files(tmp_path / "copy").keys() == {"int8.onnx", MANIFEST}
    else:
        with refuses("statements-too-large" if "dsse" in grown else "file-damaged"):
            fetch(bundle.as_uri(), tmp_path / "copy", digest)
        assert not (tmp_path / "copy").exists()
    assert not [uri for uri in brought if uri.endswith(grown)]


def test_a_server_that_leads_into_an_inner_network(tmp_path: Path) -> None:
    """MLflow's client would follow it to wherever this machine can go."""

    def lead(method: str, path: str, body: Any) -> tuple[Any, ...]:
        listing = {"files": [{"path": "manifest.json", "is_dir": False, "file_size": 5}]}
        is_file = not path.endswith(("/artifacts", "/inner"))
        return (307, listing, {"Location": f"{state.endpoint}/inner"}) if is_file else (200, listing)

    with serving(Served(answers=lead)) as state, refuses("manifest-damaged"):  # what came with the redirect
        fetch(f"{state.endpoint}/api/2.0/mlflow-artifacts/artifacts/m", tmp_path / "pod", OTHER)
    asked = {path.rpartition("/")[2] for _, path, _ in state.requests}
    assert asked == {"artifacts", "manifest.json"}


def test_credentials_go_to_the_tracking_server_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = {"answers": lambda *_: (200, {"files": []})}
    with serving(Served(**empty)) as tracking, serving(Served(**empty)) as other:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.endpoint)
        path = "api/2.0/mlflow-artifacts/artifacts/m"
        fetched = partial(fetch, target=tmp_path / "pod", digest=OTHER)
        with refuses("file-damaged"):
            fetched(f"{other.endpoint}/{path}")
        assert other.tokens == {None}
        other.requests.clear()
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "of-the-tracking-server")
        for source in (f"{other.endpoint}/{path}", other.endpoint.replace("http:", "mlflow-artifacts:") + "/m"):
            with refuses("other-server", "MLFLOW_TRACKING_URI"):
                fetched(source)
        assert other.requests == []
        for source in (f"{tracking.endpoint}/{path}", "mlflow-artifacts:/m"):
            with refuses("file-damaged"):
                fetched(source)
        assert tracking.tokens == {"Bearer of-the-tracking-server"}


def test_an_artifact_of_no_bundle_where_an_approval_is_demanded(machine: Machine, tmp_path: Path) -> None:
    """Signed by who may sign models; nobody can have approved it."""
    dataset = make_chain(tmp_path / "a-050", 50)["dataset"]
    trust.sign_folder(dataset, machine.key("ci"))
    digest = read_identity(dataset).digest
    machine.policy(environment="prod")
    with refuses("no-bundle"):
        fetch(str(dataset), tmp_path / "pod", digest)
    machine.policy()
    fetch(str(dataset), tmp_path / "pod", digest)


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


def test_no_step_is_named_that_there_is_not(bundle: Path, tmp_path: Path) -> None:
    """The kind of a manifest is what anybody wrote there."""
    for attack in (
        edit(MANIFEST, lambda data: data.replace(b'"kind":"bundle"', b'"kind":"report2"')),
        edit(MANIFEST, lambda data: data + bytes(100 << 20)),
    ):
        digest = attack(bundle)
        with pytest.raises(EngineryError, match=r"again$"):
            fetch(str(bundle), tmp_path / "got", digest)


@pytest.mark.parametrize(
    ("attack", "code"),
    [
        (edit("int8.onnx", lambda data: data[::-1]), "file-damaged"),
        (edit("int8.onnx", lambda data: data[:-1]), "file-damaged"),
        (lambda bundle: [digest_of(bundle), (bundle / "int8.onnx").unlink()][0], "file-damaged"),
        (edit(MANIFEST, lambda data: data.replace(b"resnet18", b"resnet50")), "broken-seal"),
        (edit(MANIFEST, lambda data: b'{"kind": "bundle"}'), "manifest-damaged"),
        (edit(MANIFEST, lambda data: b"[" * 100_000), "manifest-damaged"),
        (lambda bundle: reseal(bundle, lambda record: record.update(kind="\x1b[2Jbundle")), "manifest-damaged"),
        (lambda bundle: reseal(bundle, lambda record: record.update(kind=["bundle"])), "manifest-damaged"),
        (rename, "other-digest"),
        (lead_out, "file-outside"),
        (lambda bundle: [(bundle / MANIFEST).unlink(), OTHER][1], "no-artifact"),
    ],
)
def test_tampered_artifacts_are_not_fetched(bundle: Path, tmp_path: Path, attack: Any, code: str) -> None:
    digest = attack(bundle)
    with refuses(code):
        fetch(str(bundle), tmp_path / "target", digest)
    assert not (tmp_path / "target").exists()
