"""`enginery release`: what is in the folder, what is refused, and that nothing half-written stays."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from click.testing import CliRunner
from mlflow import MlflowClient

from components.common.contracts.digests import digest_file
from components.common.contracts.errors import EngineryError, GateFailed, UserError
from components.common.contracts.manifests import ReportManifest, VerdictManifest, load
from components.common.registry.trust import PASSPHRASE_VARIABLE
from components.promote.packaging import write_model
from enginery.cli.commands import cli
from enginery.release import writing

from .making import NAME, promote_parts, reseal, write_keys


def enginery(*arguments: object) -> str:
    """The command's output; raises what the process would."""
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False).output


def by_paths(parts: dict[str, Path]) -> list[object]:
    return [word for name, path in parts.items() for word in (f"--{name}", path)]


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".tmp" in path.name]


# --- what is in it


def test_a_release_of_a_registered_version(promoted, proved, tmp_path: Path, keys) -> None:
    private, public = keys
    text = enginery("release", tmp_path / "out", f"{NAME}@candidate", "--key", private)
    assert f"release:   {NAME} version 1 @candidate @champion" in text
    out = tmp_path / "out"
    checks = json.loads((out / "verdict" / "manifest.json").read_text())["checks"]
    assert f"gate:      passed: {'; '.join(check['explanation'] for check in checks)}" in text
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    root = {name for name in names if "/" not in name}
    assert root == {
        *("release.json", "inputs.cdx.json", "MODEL_CARD.md", "SHA256SUMS", "model.sig"),
        *("MLmodel", "requirements.txt", "python_env.yaml"),
    }
    for part, path in proved.parts.items():
        own = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
        assert {name.removeprefix(f"{part}/") for name in names if name.startswith(f"{part}/")} == own
        assert digest_file(out / part / "manifest.json") == digest_file(path / "manifest.json")
    record = json.loads((out / "release.json").read_text())
    assert (record["name"], record["version"], record["passed"], record["forced"]) == (NAME, "1", True, None)
    assert record["digests"]["dataset"] == proved.dataset.digest
    assert left_over(tmp_path) == []
    text = enginery("verify", out, "--key", public)
    assert f"signature: valid, by the key {record['key_fingerprint']}" in text


def test_coreutils_openssl_and_model_signing_agree(promoted, tmp_path: Path, keys) -> None:
    private, public = keys
    out = tmp_path / "out"
    enginery("release", out, f"{NAME}/1", "--key", private)
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(out), "--signature", str(out / "model.sig")]
    done = subprocess.run([*command, "--public_key", str(public)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", str(public), "-outform", "DER"], capture_output=True, check=True
    ).stdout
    assert json.loads((out / "release.json").read_text())["key_fingerprint"].endswith(hashlib.sha256(der).hexdigest())


def test_the_folder_is_a_model_without_a_registry(proved, tmp_path: Path, few_digits: Path) -> None:
    enginery("release", tmp_path / "out", *by_paths(proved.parts))
    model = mlflow.pyfunc.load_model(str(tmp_path / "out"))
    assert len(model.predict(sorted((few_digits / "3").iterdir())[:2])) == 2
    assert "as it was released" in enginery("verify", tmp_path / "out")  # loading writes nothing into it


def test_the_list_of_inputs(proved, tmp_path: Path) -> None:
    enginery("release", tmp_path / "out", *by_paths(proved.parts))
    bom = json.loads((tmp_path / "out/inputs.cdx.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    entries = {entry["bom-ref"]: entry for entry in bom["components"]}
    assert len(entries) == len(bom["components"])
    report = load(proved.parts["report"], ReportManifest)
    assert f"sha256:{entries['dataset']['hashes'][0]['content']}" == report.manifest.inputs["dataset"]
    torch = report.manifest.environment.versions["torch"]
    steps = {entry["name"]: entry["value"] for entry in entries[f"pkg:pypi/torch@{torch}"]["properties"]}
    assert steps["enginery:steps"] == "preprocess export validate"
    assert entries["enginery"]["version"]
    model = bom["metadata"]["component"]
    assert model["type"] == "machine-learning-model"
    files = {entry["name"]: entry["hashes"][0]["content"] for entry in model["components"]}
    assert f"sha256:{files['bundle/int8.onnx']}" == digest_file(proved.parts["bundle"] / "int8.onnx")
    assert set(bom["dependencies"][0]["dependsOn"]) == set(entries)


def test_a_release_without_a_key_says_so(proved, tmp_path: Path) -> None:
    assert "signature: none: this release is not signed" in enginery(
        "release", tmp_path / "out", *by_paths(proved.parts)
    )
    assert "signature: none: this release is not signed" in enginery("verify", tmp_path / "out")


# --- what is refused


def test_nothing_is_overwritten(proved, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name in ("empty", "link", "file"):
        with pytest.raises(UserError, match=f"{name} exists already, and a release is never overwritten"):
            enginery("release", tmp_path / name, *by_paths(proved.parts))
    with pytest.raises(UserError, match=r"there is no folder .*/a; make it first"):
        enginery("release", tmp_path / "a/b", *by_paths(proved.parts))


def test_a_model_that_did_not_pass(refused, tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match="is not a pass, so it is not released"):
        enginery("release", tmp_path / "out", *by_paths(refused.parts))
    assert not (tmp_path / "out").exists()
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (NAME, "'digits' names no version; write NAME@alias or NAME/VERSION"),
        (f"{NAME}@gone", r"digits has no alias gone; it has @candidate \(version 1\)"),
        (f"{NAME}/7", "digits has no version 7"),
        ("other@champion", "there is no registered model 'other'.*; there are digits"),
        ("../x@champion", "names no version"),
    ],
)
def test_a_version_that_is_not_there(promoted, tmp_path: Path, reference: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        enginery("release", tmp_path / "out", reference)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [[], [f"{NAME}@candidate", "--bundle", "b"], ["--bundle", "b", "--report", "r"]])
def test_what_to_release_is_said_once(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(UserError, match="release takes a registered version, such as classifier@champion, or all of"):
        enginery("release", tmp_path / "out", *words)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("file", ["bundle/int8.onnx", "bundle/scales.json", "report/predictions.npz"])
def test_a_tampered_version_is_neither_released_nor_loaded_nor_promoted(
    promoted, proved, tmp_path: Path, file: str
) -> None:
    """In the registry's own store: by release, by MLflow, and by promote once it was downloaded."""
    version = MlflowClient().get_model_version_by_alias(NAME, "candidate")
    root = Path(MlflowClient().get_model_version_download_uri(NAME, version.version).removeprefix("file://"))
    flip(root / file)
    with pytest.raises(EngineryError, match=f"{Path(file).name} was changed after it was sealed"):
        enginery("release", tmp_path / "out", f"{NAME}@candidate")
    assert not (tmp_path / "out").exists()
    if file.startswith("bundle"):
        with pytest.raises(EngineryError, match=f"{Path(file).name} was changed after it was sealed"):
            mlflow.pyfunc.load_model(f"models:/{NAME}@candidate")
    parts = {name: root / name for name in ("bundle", "report", "verdict")}
    with pytest.raises(EngineryError, match=f"{Path(file).name} was changed after it was sealed"):
        promote_parts(parts, proved.dataset.path, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_parts_that_do_not_belong_together(proved, refused, tmp_path: Path) -> None:
    parts = {**proved.parts, "verdict": refused.parts["verdict"]}
    with pytest.raises(EngineryError, match=r"verdict/manifest.json is about another report"):
        enginery("release", tmp_path / "out", *by_paths(parts))


def test_a_verdict_turned_into_a_pass(refused, tmp_path: Path) -> None:
    """Sealed again, as who knows the format can: the report still tells."""
    parts = {name: shutil.copytree(path, tmp_path / name) for name, path in refused.parts.items()}

    def forge(record) -> None:
        record["passed"] = True
        for entry in record["checks"]:
            entry["verdict"] = "pass"

    reseal(parts["verdict"] / "manifest.json", forge)
    assert load(parts["verdict"], VerdictManifest).manifest.passed
    with pytest.raises(EngineryError, match="does not follow from the report: top1_pct is pass, and must be fail"):
        enginery("release", tmp_path / "out", *by_paths(parts))


@pytest.mark.parametrize("part", ["bundle", "report", "verdict"])
def test_a_manifest_without_a_seal(proved, tmp_path: Path, part: str) -> None:
    parts = {**proved.parts, part: shutil.copytree(proved.parts[part], tmp_path / part)}

    def age(record) -> None:
        record["schema_version"] = 1
        del record["seal"]

    reseal(parts[part] / "manifest.json", age)
    with pytest.raises(EngineryError, match="is of schema version 1, which has no seal"):
        enginery("release", tmp_path / "out", *by_paths(parts))


def test_files_beside_the_artifact_stay_behind(proved, tmp_path: Path) -> None:
    bundle = shutil.copytree(proved.parts["bundle"], tmp_path / "bundle")
    (bundle / "notes.txt").write_text("private")
    os.symlink("/etc/passwd", bundle / "link")
    enginery("release", tmp_path / "out", *by_paths({**proved.parts, "bundle": bundle}))
    assert not (tmp_path / "out/bundle/notes.txt").exists()
    assert not (tmp_path / "out/bundle/link").is_symlink()


# --- keys


def test_keys_of_every_kind(proved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, _ = write_keys(tmp_path / "locked", b"open sesame")
    _, public = write_keys(tmp_path / "plain")
    rsa = tmp_path / "rsa.key"
    subprocess.run(["openssl", "genrsa", "-out", str(rsa), "2048"], check=True, capture_output=True)
    (tmp_path / "text.key").write_text("no key")
    words = ["release", tmp_path / "out", *by_paths(proved.parts), "--key"]
    for file, said in (
        (tmp_path / "nothing", "can't read the key .*nothing: No such file"),
        (tmp_path / "text.key", "is no private key in PEM .*openssl genpkey -algorithm EC"),
        (public, "is no private key in PEM"),
        (rsa, "is a key of another kind than ECDSA P-256"),
        (locked, f"has a passphrase; set {PASSPHRASE_VARIABLE}"),
    ):
        with pytest.raises(UserError, match=said):
            enginery(*words, file)
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "wrong")
    with pytest.raises(UserError, match="can't be opened with the passphrase"):
        enginery(*words, locked)
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "open sesame")
    enginery(*words, locked)
    with pytest.raises(UserError, match="is a private key, which only the signer should have"):
        enginery("verify", tmp_path / "out", "--key", locked)


# --- nothing half-written


def test_an_interrupted_release_leaves_nothing(proved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> Path:
        write_model(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "write_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writing.write_release(proved.parts, tmp_path / "out", name="x")
    assert list(tmp_path.iterdir()) == []


def test_two_releases_to_one_folder(proved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came first stays."""

    def late(folder: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/first").touch()

    monkeypatch.setattr(writing, "to_disk", late)
    with pytest.raises(UserError, match=r"can't write .*out: Directory not empty"):
        enginery("release", tmp_path / "out", *by_paths(proved.parts))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["first"]
