"""An OCI registry: what comes back is what was pushed and signed, whoever else writes there."""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.digests import digest_file
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import BundleManifest, load
from components.common.registry import trust
from enginery.release.fetch import fetch
from enginery.release.oci import read_address
from enginery.release.writing import write_release
from tests.oci_registry import BASIC, PASSWORD, TOKEN, Registry, digest_of, oci_registry
from tests.pipelines.servers import free_port

from .test_registry_commands import enginery
from .test_trust import Machine, machine

__all__ = ["machine"]  # a fixture
_TITLE = "org.opencontainers.image.title"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with oci_registry() as found:
        yield found


@dataclass(kw_only=True)
class Pushed:
    folder: Path
    digest: str  # of manifest.json
    address: str  # with that of the registry's manifest

    @property
    def oci_digest(self) -> str:
        return self.address.partition("@")[2]


def signed(machine: Machine, name: str = "a-090") -> Path:
    """A bundle as the gate and a release's key sign it."""
    paths = machine.judged(name)
    for file, statement in trust.read_statements(paths["verdict"]).items():
        (paths["bundle"] / file).write_bytes(statement)
    trust.sign_folder(paths["bundle"], machine.key("ci"))
    return paths["bundle"]


def pushed(machine: Machine, registry: str, name: str = "a-090") -> Pushed:
    folder = signed(machine, name)
    output = enginery("push", str(folder), f"oci://{registry}/team/m", "--key", str(machine.key("ci"))).output
    digest = load(folder, BundleManifest).digest
    assert f"pushed to oci://{registry}/team/m:{digest[7:]}@sha256:" in output
    return Pushed(folder=folder, digest=digest, address=output.split("enginery fetch ")[1].split()[0])


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def manifest_of(registry: Registry, digest: str) -> Any:
    return json.loads(registry.manifests[f"team/m/{digest}"])


def refused(words: str, source: str, target: Path, digest: str = "") -> str:
    with pytest.raises(EngineryError, match=words) as caught:
        fetch(source, target, digest)
    assert not target.exists()
    assert not list(target.parent.glob(".fetching-*"))
    return str(caught.value)


def test_there_and_back(machine: Machine, registry: Registry, tmp_path: Path) -> None:
    made = pushed(machine, registry.address)
    for number, (source, digest) in enumerate(
        [
            (made.address, ""),
            (f"oci://{registry.address}/team/m", made.digest),  # by its tag, as the chart does
            (f"oci://{registry.address}/team/m:{made.digest[7:]}", made.digest),
        ]
    ):
        fetch(source, tmp_path / f"pod{number}", digest)
        assert files(tmp_path / f"pod{number}") == files(made.folder)
    fetch(f"oci://{registry.address}/team/m", tmp_path / "pod0", made.digest)  # a pod that is started again
    with pytest.raises(UserError, match="exists already"):
        fetch(made.address, tmp_path / "pod0")


def test_the_same_files_have_the_same_digest(machine: Machine, registry: Registry) -> None:
    made = pushed(machine, registry.address)
    again = enginery(
        "push", str(made.folder), f"oci://{registry.address}/other:v1", "--key", str(machine.key("ci"))
    ).output
    assert made.oci_digest in again
    assert {key for key in registry.manifests if key.startswith("other/")} >= {"other/v1", f"other/{made.oci_digest}"}


def test_a_release_comes_back_verified(machine: Machine, registry: Registry, proved, tmp_path: Path) -> None:
    machine.monkeypatch.delenv(trust.POLICY_VARIABLE)
    folder = tmp_path / "release"
    write_release(proved.parts, folder, name="digits", key=machine.key("ci"))
    output = enginery("push", str(folder), f"oci://{registry.address}/r", "--key", str(machine.key("ci"))).output
    found = fetch(f"oci://{registry.address}/r", tmp_path / "copy", digest_file(folder / "SHA256SUMS"))
    assert found.kind == "release"
    assert files(tmp_path / "copy") == files(folder)
    fetch(str(folder), tmp_path / "local", found.digest)  # folders, too
    with pytest.raises(EngineryError, match="is asked for"):
        fetch(str(folder), tmp_path / "other", "sha256:" + "0" * 64)
    address = output.split("enginery fetch ")[1].split()[0]
    machine.policy()
    refused("the gate signed no verdict", address, tmp_path / "untrusted")


def test_what_is_not_signed_by_the_key_is_not_pushed(machine: Machine, registry: Registry) -> None:
    folder = signed(machine)
    for change, key, words in (
        (lambda: None, "stranger", "does not match the provided public key"),
        (lambda: (folder / "model.py").write_text("x"), "ci", "does not cover model.py"),
        (lambda: (folder / "model.py").unlink(), "ci", ""),
        (lambda: (folder / "link").symlink_to("/etc/passwd"), "ci", "link"),
        (lambda: (folder / "link").unlink(), "ci", ""),
        (lambda: (folder / "int8.onnx").write_bytes(b"other"), "ci", "does not fit int8.onnx"),
        (lambda: (folder / "model.sig").unlink(), "ci", "is not signed"),
    ):
        change()
        if words:
            before = dict(registry.blobs)
            with pytest.raises(EngineryError, match=words):
                enginery("push", str(folder), f"oci://{registry.address}/m", "--key", str(machine.key(key)))
            assert registry.blobs == before
    assert registry.manifests == {}


@pytest.mark.parametrize(
    "address",
    [
        "oci://registry",
        "oci://registry/UPPER",
        "oci://registry/../x",
        "oci://registry/a/../b",
        "oci://registry/m@sha256:12",
        "oci://registry/m:a/b",
        "oci://registry/m?x=1",
        "oci://registry/m#x",
        "oci://registry/m\n",
        "oci://regis try/m",
    ],
)
def test_addresses(address: str) -> None:
    with pytest.raises(UserError, match="is no address in an OCI registry"):
        read_address(address)


def test_an_address_with_a_password_is_not_repeated() -> None:
    with pytest.raises(UserError, match="holds a user, a password") as caught:
        read_address("oci://robot:hunter2@registry/m")
    assert "hunter2" not in str(caught.value)


def test_a_tag_alone_says_nothing(machine: Machine, registry: Registry, tmp_path: Path) -> None:
    made = pushed(machine, registry.address)
    source = f"oci://{registry.address}/team/m:{made.digest[7:]}"
    with pytest.raises(UserError, match="say what is asked for with --digest"):
        fetch(source, tmp_path / "pod")


def test_a_tag_that_is_moved_to_an_older_signed_version(machine: Machine, registry: Registry, tmp_path: Path) -> None:
    older, newer = (pushed(machine, registry.address, name) for name in ("a-080", "b-090"))
    registry.tag("team/m", newer.digest[7:], older.oci_digest)
    refused(f"{newer.digest} is asked for", f"oci://{registry.address}/team/m", tmp_path / "pod", newer.digest)


def test_a_registry_that_serves_something_else(machine: Machine, registry: Registry, tmp_path: Path) -> None:
    older, made = (pushed(machine, registry.address, name) for name in ("a-080", "b-090"))
    registry.served[made.oci_digest] = registry.manifests[f"team/m/{older.oci_digest}"]
    refused("the registry has another manifest", made.address, tmp_path / "pod")
    registry.served.clear()
    manifest = manifest_of(registry, made.oci_digest)
    layers = {layer["annotations"][_TITLE]: layer["digest"] for layer in manifest["layers"]}
    model = registry.blobs[layers["int8.onnx"]]
    for data in (model[::-1], model + b"x" * 9_000_000, model[:-1], b""):
        registry.served[layers["int8.onnx"]] = data
        refused("int8.onnx of .* is not what its manifest says", made.address, tmp_path / "pod")


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("../evil", "names a file outside"),
        ("/etc/evil", "names a file outside"),
        ("a/../../evil", "names a file outside"),
        ("a//b", "names a file outside"),
        ("./a", "names a file outside"),
        ("..\\evil", "names a file outside"),
        ("evil\x1b[2J", "names a file outside"),
        ("", "names a file outside"),
        ("a/" * 10_000, "more than 1,024 characters"),  # its parents would take gigabytes
        (".", "as a file and as a folder"),
        ("manifest.json", "two files of the same name"),
        ("manifest.json/x", "as a file and as a folder"),
    ],
)
def test_titles_that_lead_elsewhere(
    machine: Machine, registry: Registry, tmp_path: Path, title: str, words: str
) -> None:
    made = pushed(machine, registry.address)
    manifest = manifest_of(registry, made.oci_digest)
    manifest["layers"].append({**manifest["layers"][0], "annotations": {_TITLE: title}})
    digest = registry.put("team/m", manifest)
    assert "\x1b" not in refused(words, f"oci://{registry.address}/team/m@{digest}", tmp_path / "in" / "pod")
    assert [path.name for path in tmp_path.rglob("*evil*")] == []


def test_manifests_that_are_none(machine: Machine, registry: Registry, tmp_path: Path) -> None:
    made = pushed(machine, registry.address)
    good = manifest_of(registry, made.oci_digest)
    layer = good["layers"][0]
    for manifest, words in (
        ([], "is no artifact of files"),
        ({**good, "layers": [{**layer, "annotations": {}}]}, "is no artifact of files"),  # an image of a container
        ({**good, "layers": [{**layer, "digest": "sha256:../../x"}]}, "is no artifact of files"),
        ({**good, "layers": [{**layer, "size": -1}]}, "is no artifact of files"),
        ({**good, "layers": [{**layer, "size": 1 << 60}]}, "has room for"),
        ({**good, "layers": [layer] * 10_001}, "is no artifact of files"),
        ({**good, "layers": []}, "no finished artifact"),
        ({**good, "annotations": {"x": "y" * (4 << 20)}}, "does not answer as one does"),
    ):
        digest = registry.put("team/m", manifest)
        refused(words, f"oci://{registry.address}/team/m@{digest}", tmp_path / "pod")


def test_who_writes_the_registry_can_add_nothing(machine: Machine, registry: Registry, tmp_path: Path) -> None:
    """By the tag and the digest of manifest.json, as a pod asks."""
    made = pushed(machine, registry.address)
    manifest = manifest_of(registry, made.oci_digest)
    registry.blobs[digest_of(b"import os")] = b"import os"
    blob = {"digest": digest_of(b"import os"), "size": 9, "annotations": {_TITLE: "1/model.py"}}
    layers = [*manifest["layers"], {**manifest["layers"][0], **blob}]
    registry.tag("team/m", made.digest[7:], registry.put("team/m", {**manifest, "layers": layers}))
    fetch(f"oci://{registry.address}/team/m", tmp_path / "pod", made.digest)
    assert files(tmp_path / "pod") == files(made.folder)
    unsigned = [layer for layer in manifest["layers"] if layer["annotations"][_TITLE] != trust.SIGNATURE]
    digest = registry.put("team/m", {**manifest, "layers": unsigned})
    refused("it is not signed", f"oci://{registry.address}/team/m@{digest}", tmp_path / "other")
    machine.policy(ci={"signs": ["verdict"]})
    refused("the key ci may not sign a model", made.address, tmp_path / "other")


def test_blobs_may_lie_elsewhere_and_credentials_stay(
    machine: Machine, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_credentials(tmp_path, registry.address)
    registry.realm = f"http://{registry.address}/token"
    made = pushed(machine, registry.address)
    with oci_registry() as inner:
        inner.blobs = registry.blobs
        registry.redirects = f"http://{inner.address}"
        refused(r"127\.0\.0\.1 port \d+ is no public address", made.address, tmp_path / "pod")
        assert inner.asked == []
        monkeypatch.setenv("ENGINERY_ALLOWED_NETWORKS", "127.0.0.1")
        inner.realm = f"http://{inner.address}/token"  # it asks for the credentials
        told = refused(r"was answered 401 by 127\.0\.0\.1", made.address, tmp_path / "pod")
        assert not any(secret in told for secret in (PASSWORD, TOKEN, BASIC))
        inner.realm = ""
        fetch(made.address, tmp_path / "pod")
        assert {authorization for _, _, authorization in inner.asked} == {""}


def write_credentials(folder: Path, registry: str) -> None:
    (folder / "docker").mkdir(exist_ok=True)
    auths = {registry: {"auth": BASIC.removeprefix("Basic ")}, "other:1": {"auth": "b3RoZXI6b3RoZXI="}}
    (folder / "docker" / "config.json").write_text(json.dumps({"auths": auths}))


def test_credentials_are_for_the_registry_alone(machine: Machine, registry: Registry, tmp_path: Path) -> None:
    registry.realm = f"http://{registry.address}/token"
    folder = signed(machine)
    command = ("push", str(folder), f"oci://{registry.address}/team/m", "--key", str(machine.key("ci")))
    with pytest.raises(EngineryError, match=r"answered 401 by 127\.0\.0\.1; give it credentials: `docker login`"):
        enginery(*command)
    write_credentials(tmp_path, registry.address)
    output = enginery(*command).output
    assert not any(secret in output for secret in (PASSWORD, TOKEN, BASIC))
    assert {told for _, path, told in registry.asked if path.startswith("/token")} == {"", BASIC}
    with oci_registry() as thief:
        registry.realm = f"http://{thief.address}/token"
        with pytest.raises(EngineryError, match=r"wants its credentials sent to 127\.0\.0\.1, and they are for itself"):
            enginery(*command)
        assert thief.asked == []


def test_credentials_that_cannot_be_read(machine: Machine, registry: Registry, tmp_path: Path) -> None:
    registry.realm = f"http://{registry.address}/token"
    write_credentials(tmp_path, registry.address)
    file = tmp_path / "docker" / "config.json"
    helper = tmp_path / "docker-credential-test"
    helper.write_text(f'#!/bin/sh\nread name; [ "$name" = {registry.address} ] && echo \'{{"Username": "robot", '
                      f'"Secret": "{PASSWORD}"}}\'\n')  # fmt: skip
    helper.chmod(0o755)
    machine.monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for text, words in (
        ("{", "can't read credentials"),
        (json.dumps({"credHelpers": {registry.address: "missing"}}), "can't read credentials"),
        (json.dumps({"credsStore": "test"}), ""),
    ):
        file.write_text(text)
        if not words:
            pushed(machine, registry.address, "helped-090")
            continue
        with pytest.raises(UserError, match=words):
            enginery("push", str(signed(machine, f"{len(text)}-090")), f"oci://{registry.address}/m", "--key",
                     str(machine.key("ci")))  # fmt: skip


def test_a_registry_that_is_not_there(tmp_path: Path) -> None:
    refused("does not answer as one does", f"oci://127.0.0.1:{free_port()}/m@sha256:{'0' * 64}", tmp_path / "pod")


def _tool(name: str, module: str, folder: Path) -> str:
    """What the machine has, or what Go builds."""
    if found := shutil.which(name):
        return found
    if not (folder / name).exists():
        subprocess.run(["go", "install", module], env={**os.environ, "GOBIN": str(folder)}, check=True)
    return str(folder / name)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go, which builds a registry and cosign")
def test_a_real_registry_and_cosign(machine: Machine, tmp_path: Path, shared: Any) -> None:
    tools = shared("oci_tools", lambda folder: None)
    server = _tool("registry", "github.com/google/go-containerregistry/cmd/registry@v0.22.1", tools)
    cosign = _tool("cosign", "github.com/sigstore/cosign/v2/cmd/cosign@v2.6.5", tools)
    port = free_port()
    process = subprocess.Popen([server, "-port", str(port)], stderr=subprocess.DEVNULL)
    try:
        _wait_for(f"http://localhost:{port}/v2/")
        made = pushed(machine, f"localhost:{port}")
        fetch(made.address, tmp_path / "pod")
        assert files(tmp_path / "pod") == files(made.folder)
        other = pushed(machine, f"localhost:{port}", "other-080")

        def verify(address: str, key: str) -> subprocess.CompletedProcess[str]:
            command = [cosign, "verify", "--key", str(machine.keys[key][1]), "--insecure-ignore-tlog=true"]
            return subprocess.run([*command, address.removeprefix("oci://")], capture_output=True, text=True)

        done = verify(made.address, "ci")
        assert done.returncode == 0, done.stderr
        assert f'"docker-manifest-digest":"{made.oci_digest}"' in done.stdout
        done = verify(made.address, "stranger")
        assert done.returncode != 0
        assert "no matching signatures" in done.stderr
        # The signature of one artifact, put where cosign looks for that of another.
        base = f"http://localhost:{port}/v2/team/m/manifests"
        kind = "application/vnd.oci.image.manifest.v1+json"
        signature = urllib.request.urlopen(f"{base}/{made.oci_digest.replace(':', '-')}.sig").read()
        place = f"{base}/{other.oci_digest.replace(':', '-')}.sig"
        request = urllib.request.Request(place, signature, {"Content-Type": kind}, method="PUT")
        urllib.request.urlopen(request).read()
        done = verify(other.address, "ci")
        assert done.returncode != 0
        assert "no matching signatures" in done.stderr
    finally:
        process.terminate()
        process.wait(10)


def _wait_for(url: str) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the registry did not start")
