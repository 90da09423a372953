"""`enginery release`: what is in the folder, what is refused, and that nothing half-written stays."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import mlflow
import pytest
from mlflow import MlflowClient

from components.common.contracts.digests import digest_file
from components.common.contracts.manifests import ReportManifest, load
from components.common.registry.keys import PASSPHRASE_VARIABLE
from components.promote.packaging import write_model
from enginery.release import writing
from tests.unit.registered import NAME, enginery, files, refuses, reseal, write_keys


def release(output: Path, parts: dict[str, Path], *more: object) -> str:
    """Release folders by their paths. Returns what is printed."""
    return enginery("release", output, *(word for name in parts for word in (f"--{name}", parts[name])), *more).output


# --- what is in it


def test_a_release_of_a_registered_version(promoted, proved, tmp_path: Path) -> None:
    (private, public), out = write_keys(tmp_path / "signer"), tmp_path / "out"
    text = enginery("release", out, f"{NAME}@candidate", "--key", private).output
    assert f"release:   {NAME} version 1 @candidate @champion" in text
    checks = json.loads((out / "verdict" / "manifest.json").read_text())["checks"]
    assert f"gate:      pass: {'; '.join(check['explanation'] for check in checks)}" in text
    names = files(out).keys()
    assert {name for name in names if "/" not in name} == {
        *("release.json", "inputs.cdx.json", "MODEL_CARD.md", "SHA256SUMS", "model.sig"),
        *("MLmodel", "requirements.txt", "python_env.yaml"),
    }
    for part, path in proved.parts.items():
        assert files(out / part).keys() == files(path).keys()
        assert digest_file(out / part / "manifest.json") == digest_file(path / "manifest.json")
    record = json.loads((out / "release.json").read_text())
    assert (record["name"], record["version"], record["passed"], record["forced"]) == (NAME, "1", True, None)
    assert record["digests"]["dataset"] == proved.dataset.digest
    assert not [path.name for path in tmp_path.iterdir() if ".tmp" in path.name]
    fingerprint = record["key_fingerprint"]
    assert f"signature: valid, by the key {fingerprint}" in enginery("verify", out, "--key", public).output

    def run(*command: object) -> bytes:
        return subprocess.run([str(word) for word in command], cwd=out, capture_output=True, check=True).stdout

    run("sha256sum", "--check", "--strict", "SHA256SUMS")
    options = ("--signature", out / "model.sig", "--public_key", public)
    run(sys.executable, "-m", "model_signing", "verify", "key", out, *options)
    der = run("openssl", "pkey", "-pubin", "-in", public, "-outform", "DER")
    assert fingerprint.endswith(hashlib.sha256(der).hexdigest())


def test_the_folder_is_a_model_and_says_what_it_was_made_from(proved, tmp_path: Path, few_digits: Path) -> None:
    """Without a key, it says that too. Nothing that lies beside the artifacts comes along."""
    bundle, out = shutil.copytree(proved.parts["bundle"], tmp_path / "bundle"), tmp_path / "out"
    (bundle / "notes.txt").write_text("private")
    os.symlink("/etc/passwd", bundle / "link")
    unsigned = "signature: none: this release is not signed"
    assert unsigned in release(out, {**proved.parts, "bundle": bundle})
    assert not {"notes.txt", "link"} & {path.name for path in out.rglob("*")}
    model = mlflow.pyfunc.load_model(str(out))
    assert len(model.predict(sorted((few_digits / "3").iterdir())[:2])) == 2
    assert unsigned in enginery("verify", out).output  # loading writes nothing into it

    bom = json.loads((out / "inputs.cdx.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    entries = {entry["bom-ref"]: entry for entry in bom["components"]}
    assert len(entries) == len(bom["components"])
    report = load(proved.parts["report"], ReportManifest)
    assert f"sha256:{entries['dataset']['hashes'][0]['content']}" == report.manifest.inputs["dataset"]
    torch = report.manifest.environment.versions["torch"]
    steps = {entry["name"]: entry["value"] for entry in entries[f"pkg:pypi/torch@{torch}"]["properties"]}
    assert steps["enginery:steps"] == "preprocess export validate"
    assert entries["enginery"]["version"]
    subject = bom["metadata"]["component"]
    assert subject["type"] == "machine-learning-model"
    hashes = {entry["name"]: entry["hashes"][0]["content"] for entry in subject["components"]}
    assert f"sha256:{hashes['bundle/int8.onnx']}" == digest_file(bundle / "int8.onnx")
    assert set(bom["dependencies"][0]["dependsOn"]) == set(entries)


# --- what is refused


def test_nothing_is_overwritten(proved, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name in ("empty", "link", "file"):
        with refuses("output-exists"):
            release(tmp_path / name, proved.parts)
    with refuses("no-parent-folder"):
        release(tmp_path / "a/b", proved.parts)


def test_a_folder_that_may_not_be_written_into(proved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with refuses("output-unwritable"):
        release(tmp_path / "out", proved.parts)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([NAME], "invalid-reference"),
        (["../x@champion"], "invalid-reference"),
        ([f"{NAME}@gone"], "no-alias"),
        ([f"{NAME}/7"], "no-version"),
        (["other@champion"], "no-model"),
        ([], "nothing-named"),
        ([f"{NAME}@candidate", "--bundle", "b"], "nothing-named"),
        (["--bundle", "b", "--report", "r"], "nothing-named"),
    ],
)
def test_what_is_not_there(promoted, tmp_path: Path, words: list[str], code: str) -> None:
    with refuses(code):
        enginery("release", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_a_link_swapped_between_check_and_copy(promoted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = MlflowClient().get_model_version_by_alias(NAME, "candidate")
    root = Path(MlflowClient().get_model_version_download_uri(NAME, version.version).removeprefix("file://"))
    file = root / "bundle/int8.onnx"
    file.rename(file.with_suffix(".original"))
    file.symlink_to("int8.original")

    def check(*arguments: object, **options: object) -> None:
        file.unlink()
        file.write_bytes(b"another network")

    monkeypatch.setattr(writing, "check_chain", check)
    with refuses("contradiction"):
        enginery("release", tmp_path / "out", f"{NAME}@candidate")
    assert not (tmp_path / "out").exists()


def forge_pass(record) -> None:
    record["passed"] = True
    for entry in record["checks"]:
        entry["verdict"] = "pass"


@pytest.mark.parametrize(
    ("change", "part", "code"),
    [
        (None, "", "gate-failed"),
        (forge_pass, "verdict", "contradiction"),  # sealed again, as who knows the format can: the report still tells
    ],
)
def test_a_chain_that_is_not_released(proved, refused, tmp_path: Path, change, part: str, code: str) -> None:
    parts = {name: shutil.copytree(path, tmp_path / name) for name, path in refused.parts.items()}
    if change is not None:
        reseal(parts[part], change)
    with refuses(code):
        release(tmp_path / "out", parts)
    with refuses("contradiction"):
        release(tmp_path / "out", {**proved.parts, "verdict": refused.parts["verdict"]})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(parts), "nothing half-written either"


def test_keys_of_every_kind(proved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, _ = write_keys(tmp_path / "locked", b"open sesame")
    plain, public = write_keys(tmp_path / "plain")
    rsa = tmp_path / "rsa.key"
    subprocess.run(["openssl", "genrsa", "-out", str(rsa), "2048"], check=True, capture_output=True)
    (tmp_path / "text.key").write_text("no key")
    (tmp_path / "config.key").write_text("{}")
    for curve in ("P-384", "secp224k1"):  # the library does not know the second
        made, pair = tmp_path / f"{curve}.key", ("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt")
        subprocess.run([*pair, f"ec_paramgen_curve:{curve}", "-out", made], check=True)
        subprocess.run(["openssl", "pkey", "-in", made, "-pubout", "-out", made.with_suffix(".pub")], check=True)
    for file, passphrase, code in (
        (tmp_path / "nothing", "", "key-unreadable"),
        (tmp_path / "text.key", "", "not-a-private-key"),
        (public, "", "not-a-private-key"),
        (rsa, "", "other-key-kind"),
        *((tmp_path / f"{curve}.key", "", "other-key-kind") for curve in ("P-384", "secp224k1")),
        (tmp_path / "config.key", "", "trust-config-invalid"),
        (locked, "", "passphrase-missing"),
        (locked, "wrong", "passphrase-wrong"),
        (plain, "open sesame", "passphrase-not-needed"),
    ):
        monkeypatch.setenv(PASSPHRASE_VARIABLE, passphrase)
        with refuses(code) as refusal:
            release(tmp_path / "out", proved.parts, "--key", file)
        assert "https:" not in str(refusal.value), "an address of a library's own documents"
        assert not (tmp_path / "out").exists()
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "open sesame")
    release(tmp_path / "out", proved.parts, "--key", locked)
    for name, code in (("locked", "private-key-given"), ("rsa", "private-key-given"), ("text", "not-a-public-key")):
        with refuses(code) as refusal:
            enginery("verify", tmp_path / "out", "--key", tmp_path / f"{name}.key")
        assert "https:" not in str(refusal.value)
    for curve in ("P-384", "secp224k1"):
        with refuses("not-a-public-key") as refusal:
            enginery("verify", tmp_path / "out", "--key", tmp_path / f"{curve}.pub")
        assert str(refusal.value).count("another kind than ECDSA P-256; make a pair") == 1
        assert "is no public key" not in str(refusal.value)


# --- nothing half-written


def test_what_killed_processes_left(proved, tmp_path: Path) -> None:
    killed, begun, held, mine = (tmp_path / f".out.{name}.tmp" for name in ("0" * 8, "1" * 8, "2" * 8, "mine"))
    for left in (killed, begun, held, mine):
        left.mkdir()
        (left / "part").touch()
        if left != begun:
            os.utime(left, (0, 0))
    descriptor = os.open(held, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    release(tmp_path / "out", proved.parts)
    assert [left.exists() for left in (killed, begun, held, mine)] == [False, True, True, True]
    os.close(descriptor)


def test_an_interrupted_release_leaves_nothing(proved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def then(end: Callable[[], object]) -> None:
        monkeypatch.setattr(writing, "write_model", lambda *arguments: [write_model(*arguments), end()][0])

    then(Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        writing.write_release(proved.parts, tmp_path / "out", name="x")
    assert list(tmp_path.iterdir()) == []
    then(lambda: [(tmp_path / "out").mkdir(), (tmp_path / "out/first").touch()])
    with refuses("output-unwritable"):
        release(tmp_path / "out", proved.parts)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/first"]
