"""An OCI registry: what comes back is what was pushed and signed, whoever else writes there."""

import json
import os
import shutil
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from components.common.contracts.digests import digest_file
from components.common.contracts.manifests import BundleManifest, load
from components.common.registry import trust
from enginery.release.fetch import fetch
from enginery.release.oci import read_address
from enginery.release.writing import write_release
from tests.oci_registry import BASIC, PASSWORD, TOKEN, Registry, digest_of, oci_registry
from tests.pipelines.servers import free_port, started
from tests.processes import run_python
from tests.unit.registered import Machine, enginery, files, refuses

_TITLE = "org.opencontainers.image.title"


@pytest.fixture
def oci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with oci_registry() as found:
        yield found


class Pushed(NamedTuple):
    folder: Path
    digest: str  # of manifest.json
    address: str  # with that of the registry's manifest
    oci_digest: str


def signed(machine: Machine, name: str = "a-090") -> Path:
    """A bundle as the gate and a release's key sign it."""
    paths = machine.judged(name)
    for file, statement in trust.read_statements(paths["verdict"]).items():
        (paths["bundle"] / file).write_bytes(statement)
    trust.sign_folder(paths["bundle"], machine.key("ci"))
    return paths["bundle"]


def push(machine: Machine, folder: Path, address: str, key: str = "ci") -> str:
    """The address to fetch from."""
    output = enginery("push", folder, address, "--key", machine.key(key)).output
    assert not any(secret in output for secret in (PASSWORD, TOKEN, BASIC))
    return output.split("enginery fetch ")[1].split()[0]


def pushed(machine: Machine, registry: str, name: str = "a-090") -> Pushed:
    folder = signed(machine, name)
    address = push(machine, folder, f"oci://{registry}/team/m")
    return Pushed(folder, load(folder, BundleManifest).digest, address, address.partition("@")[2])


def manifest_of(oci: Registry, digest: str) -> Any:
    return json.loads(oci.manifests[f"team/m/{digest}"])


def not_fetched(code: str, source: str, target: Path, digest: str = "") -> str:
    with refuses(code) as caught:
        fetch(source, target, digest)
    assert not target.exists()
    assert not list(target.parent.glob(".*.tmp"))
    return str(caught.value)


def test_there_and_back(machine: Machine, oci: Registry, tmp_path: Path) -> None:
    made = pushed(machine, oci.address)
    named = f"oci://{oci.address}/team/m"
    # By the registry's digest; by its tag, as the chart does; by the same tag written out.
    for number, (source, digest) in enumerate(
        [(made.address, ""), (named, made.digest), (f"{named}:{made.digest[7:]}", made.digest)]
    ):
        fetch(source, tmp_path / f"pod{number}", digest)
        assert files(tmp_path / f"pod{number}") == files(made.folder)
    fetch(named, tmp_path / "pod0", made.digest)  # a pod that is started again
    with refuses("output-exists"):
        fetch(made.address, tmp_path / "pod0")
    again = push(machine, made.folder, f"oci://{oci.address}/other:v1")
    assert made.oci_digest in again, "the same files have the same digest"
    assert {key for key in oci.manifests if key.startswith("other/")} >= {"other/v1", f"other/{made.oci_digest}"}
    not_fetched("no-digest", f"{named}:{made.digest[7:]}", tmp_path / "tag alone")
    older = pushed(machine, oci.address, "older-080")
    oci.tag("team/m", made.digest[7:], older.oci_digest)  # moved to an older version that is signed, too
    not_fetched("other-digest", named, tmp_path / "pod", made.digest)


def test_a_release_comes_back_verified(machine: Machine, oci: Registry, proved, tmp_path: Path) -> None:
    machine.without_policy()
    folder = tmp_path / "release"
    write_release(proved.parts, folder, name="digits", key=machine.key("ci"))
    address = push(machine, folder, f"oci://{oci.address}/r")
    found = fetch(f"oci://{oci.address}/r", tmp_path / "copy", digest_file(folder / "SHA256SUMS"))
    assert found.kind == "release"
    assert files(tmp_path / "copy") == files(folder)
    fetch(str(folder), tmp_path / "local", found.digest)  # folders, too
    not_fetched("other-digest", str(folder), tmp_path / "other", "sha256:" + "0" * 64)
    machine.policy()
    not_fetched("no-verdict", address, tmp_path / "untrusted")


def test_what_is_not_signed_by_the_key_is_not_pushed(machine: Machine, oci: Registry) -> None:
    folder = signed(machine)
    for change, undo, key, code in (
        (lambda: None, lambda: None, "stranger", "signature-mismatch"),
        (lambda: (folder / "model.py").touch(), lambda: (folder / "model.py").unlink(), "ci", "signature-mismatch"),
        (lambda: (folder / "l").symlink_to("/etc/passwd"), (folder / "l").unlink, "ci", "signature-mismatch"),
        (lambda: (folder / "int8.onnx").write_bytes(b"other"), lambda: None, "ci", "signature-mismatch"),
        (lambda: (folder / "model.sig").unlink(), lambda: None, "ci", "not-signed"),
    ):
        change()
        with refuses(code):
            push(machine, folder, f"oci://{oci.address}/m", key)
        undo()
    assert (oci.blobs, oci.manifests) == ({}, {})


def test_addresses() -> None:
    for rest in (
        *("registry", "registry/UPPER", "registry/../x", "registry/a/../b", "registry/m@sha256:12"),
        *("registry/m:a/b", "registry/m?x=1", "registry/m#x", "registry/m\n", "regis try/m"),
    ):
        with refuses("invalid-address"):
            read_address(f"oci://{rest}")
    with refuses("secret-in-address") as caught:
        read_address("oci://robot:hunter2@registry/m")
    assert "hunter2" not in str(caught.value)


def test_a_registry_that_serves_something_else(machine: Machine, oci: Registry, tmp_path: Path) -> None:
    older, made = (pushed(machine, oci.address, name) for name in ("a-080", "b-090"))
    oci.served[made.oci_digest] = oci.manifests[f"team/m/{older.oci_digest}"]
    not_fetched("other-manifest", made.address, tmp_path / "pod")
    oci.served.clear()
    layers = {layer["annotations"][_TITLE]: layer["digest"] for layer in manifest_of(oci, made.oci_digest)["layers"]}
    model = oci.blobs[layers["int8.onnx"]]
    for data in (model[::-1], model + b"x" * 9_000_000, model[:-1], b""):
        oci.served[layers["int8.onnx"]] = data
        not_fetched("blob-mismatch", made.address, tmp_path / "pod")
    not_fetched("registry-failed", f"oci://127.0.0.1:{free_port()}/m@sha256:{'0' * 64}", tmp_path / "pod")


def test_manifests_that_lead_elsewhere_or_are_none(machine: Machine, oci: Registry, tmp_path: Path) -> None:
    made = pushed(machine, oci.address)
    good = manifest_of(oci, made.oci_digest)
    layer = good["layers"][0]
    titles = {
        **dict.fromkeys(("../evil", "/etc/evil", "a/../../evil", "a//b", "./a", "..\\evil", ""), "file-outside"),
        "evil\x1b[2J": "file-outside",
        "a/" * 10_000: "name-too-long",  # its parents would take gigabytes
        "a/" * 40 + "b": "name-too-long",  # of thousands, folders that nobody counts fill the disk
        **dict.fromkeys((".", "manifest.json", "manifest.json/x"), "name-conflict"),
    }
    added = [({**good, "layers": [*good["layers"], {**layer, "annotations": {_TITLE: title}}]}, code)
             for title, code in titles.items()]  # fmt: skip
    for manifest, code in (
        *added,
        ([], "not-an-artifact"),
        ({**good, "layers": [{**layer, "annotations": {}}]}, "not-an-artifact"),  # an image of a container
        ({**good, "layers": [{**layer, "digest": "sha256:../../x"}]}, "not-an-artifact"),
        ({**good, "layers": [{**layer, "size": -1}]}, "not-an-artifact"),
        ({**good, "layers": [{**layer, "size": 1 << 60}]}, "no-space"),
        ({**good, "layers": [layer] * 10_001}, "not-an-artifact"),
        ({**good, "layers": []}, "no-artifact"),
        ({**good, "annotations": {"x": "y" * (4 << 20)}}, "registry-failed"),
    ):
        source = f"oci://{oci.address}/team/m@{oci.put('team/m', manifest)}"
        said = not_fetched(code, source, tmp_path / "in" / "pod")
        assert "\x1b" not in said
        assert code != "no-space" or f"{tmp_path / 'in'} has" in said, "a folder that is there still"
    assert [path.name for path in tmp_path.rglob("*evil*")] == []


def test_who_writes_the_registry_can_add_nothing(machine: Machine, oci: Registry, tmp_path: Path) -> None:
    made = pushed(machine, oci.address)
    manifest = manifest_of(oci, made.oci_digest)
    oci.blobs[digest_of(b"import os")] = b"import os"
    blob = {"digest": digest_of(b"import os"), "size": 9, "annotations": {_TITLE: "1/model.py"}}
    layers = [*manifest["layers"], {**manifest["layers"][0], **blob}]
    oci.tag("team/m", made.digest[7:], oci.put("team/m", {**manifest, "layers": layers}))
    fetch(f"oci://{oci.address}/team/m", tmp_path / "pod", made.digest)
    assert files(tmp_path / "pod") == files(made.folder)
    unsigned = [layer for layer in manifest["layers"] if layer["annotations"][_TITLE] != trust.SIGNATURE]
    digest = oci.put("team/m", {**manifest, "layers": unsigned})
    not_fetched("not-signed", f"oci://{oci.address}/team/m@{digest}", tmp_path / "other")
    machine.policy(ci={"signs": ["verdict"]})
    not_fetched("key-without-right", made.address, tmp_path / "other")


def write_credentials(folder: Path, registry: str) -> Path:
    (folder / "docker").mkdir(exist_ok=True)
    auths = {registry: {"auth": BASIC.removeprefix("Basic ")}, "other:1": {"auth": "b3RoZXI6b3RoZXI="}}
    (folder / "docker" / "config.json").write_text(json.dumps({"auths": auths}))
    return folder / "docker" / "config.json"


def test_blobs_may_lie_elsewhere_and_credentials_stay(machine: Machine, oci: Registry, tmp_path, monkeypatch) -> None:
    write_credentials(tmp_path, oci.address)
    oci.realm = f"http://{oci.address}/token"
    made = pushed(machine, oci.address)
    with oci_registry() as inner:
        inner.blobs = oci.blobs
        oci.redirects = f"http://{inner.address}"
        not_fetched("address-refused", made.address, tmp_path / "pod")
        assert inner.asked == []
        monkeypatch.setenv("ENGINERY_ALLOWED_NETWORKS", "127.0.0.1")
        inner.realm = f"http://{inner.address}/token"  # it asks for the credentials
        said = not_fetched("registry-refused", made.address, tmp_path / "pod")
        assert not any(secret in said for secret in (PASSWORD, TOKEN, BASIC))
        inner.realm = ""
        fetch(made.address, tmp_path / "pod")
        assert {authorization for _, _, authorization in inner.asked} == {""}


def test_credentials_are_for_the_registry_alone(machine: Machine, oci: Registry, tmp_path: Path) -> None:
    oci.realm = f"http://{oci.address}/token"
    folder, target = signed(machine), f"oci://{oci.address}/team/m"
    with refuses("registry-refused", says="answered 401 by 127.0.0.1; give it credentials: `docker login`"):
        push(machine, folder, target)
    file = write_credentials(tmp_path, oci.address)
    push(machine, folder, target)
    assert {sent for _, path, sent in oci.asked if path.startswith("/token")} == {"", BASIC}
    with oci_registry() as thief:
        oci.realm = f"http://{thief.address}/token"
        with refuses("credentials-elsewhere"):
            push(machine, folder, target)
        assert thief.asked == []
    oci.realm = f"http://{oci.address}/token"
    for text in ("{", json.dumps({"credHelpers": {oci.address: "missing"}})):
        file.write_text(text)
        with refuses("credentials-unreadable"):
            push(machine, folder, target)
    helper = tmp_path / "docker-credential-test"
    helper.write_text(f'#!/bin/sh\nread name; [ "$name" = {oci.address} ] && echo \'{{"Username": "robot", '
                      f'"Secret": "{PASSWORD}"}}\'\n')  # fmt: skip
    helper.chmod(0o755)
    machine.monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    file.write_text(json.dumps({"credsStore": "test"}))
    push(machine, signed(machine, "helped-090"), target)


def certificate(folder: Path, name: str) -> tuple[Path, ssl.SSLContext]:
    """A self-signed certificate of a host, and what serves with it."""
    key, subject = generate_private_key(SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(datetime(2020, 1, 1)).not_valid_after(datetime(2999, 1, 1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    file, private = folder / f"{name}.pem", folder / f"{name}.key"
    file.write_bytes(made.sign(key, SHA256()).public_bytes(Encoding.PEM))
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, private)
    return file, context


def test_certificates(machine: Machine, tmp_path: Path, oci: Registry) -> None:
    """Only an authority that SSL_CERT_FILE names is trusted beside the system's, and for its name alone."""
    made = pushed(machine, oci.address)
    for name, works in (("localhost", True), ("elsewhere", False)):
        authority, context = certificate(tmp_path, name)
        with oci_registry(context) as secure:
            secure.blobs, secure.manifests = oci.blobs, oci.manifests
            address = f"oci://{secure.address}/team/m@{made.oci_digest}"
            not_fetched("certificate-refused", address, tmp_path / "pod")
            command = ("-m", "enginery.cli.main", "fetch", address, tmp_path / name)
            done = run_python(*command, SSL_CERT_FILE=str(authority))
            assert (done.returncode == 0, (tmp_path / name).exists()) == (works, works), done.stderr
            assert ("no certificate that is trusted here" in done.stderr) is not works
            assert bool(secure.asked) is works


def _tool(name: str, module: str, folder: Path) -> str:
    """The machine's own program, or one that Go builds."""
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

    def refused(address: str, key: str) -> str:
        """Return cosign's objection; empty where it has none."""
        command = [cosign, "verify", "--key", str(machine.keys[key][1]), "--insecure-ignore-tlog=true"]
        done = subprocess.run([*command, address.removeprefix("oci://")], capture_output=True, text=True)
        assert done.returncode or f'"docker-manifest-digest":"{address.partition("@")[2]}"' in done.stdout
        return done.stderr if done.returncode else ""

    with started([server, "-port", str(port)], f"http://localhost:{port}/v2/", stderr=subprocess.DEVNULL):
        made = pushed(machine, f"localhost:{port}")
        fetch(made.address, tmp_path / "pod")
        assert files(tmp_path / "pod") == files(made.folder)
        other = pushed(machine, f"localhost:{port}", "other-080")
        assert refused(made.address, "ci") == ""
        assert "no matching signatures" in refused(made.address, "stranger")
        # The signature of one artifact, put where cosign looks for that of another.
        base = f"http://localhost:{port}/v2/team/m/manifests"
        kind = "application/vnd.oci.image.manifest.v1+json"
        signature = urllib.request.urlopen(f"{base}/{made.oci_digest.replace(':', '-')}.sig").read()
        place = f"{base}/{other.oci_digest.replace(':', '-')}.sig"
        request = urllib.request.Request(place, signature, {"Content-Type": kind}, method="PUT")
        urllib.request.urlopen(request).read()
        assert "no matching signatures" in refused(other.address, "ci")
