"""`enginery verify` against somebody who changes a release, with and without the right to list it again."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from components.common.contracts.digests import digest_file
from components.common.process.steplog import StepLog
from components.common.registry.keys import KEY_VARIABLE
from components.common.registry.trust import POLICY_VARIABLE, read_statements
from components.gate.config import GateConfig
from components.gate.run import run as gate
from enginery.release.fetch import fetch
from enginery.release.verify import PublicKey, public_key, verify, write_sums
from enginery.release.writing import write_release
from enginery.serving.sources import find_source
from tests.processes import run_python
from tests.unit.conftest import LENIENT, Proved
from tests.unit.registered import enginery, refuses, reseal, write_keys


@pytest.fixture(scope="module")
def signed(proved, tmp_path_factory) -> tuple[Path, Path]:
    """A signed release, and the public key."""
    folder = tmp_path_factory.mktemp("signed")
    private, public = write_keys(folder / "signer")
    write_release(proved.parts, folder / "out", name="digits", key=private)
    return folder / "out", public


@pytest.fixture
def release(signed, tmp_path: Path) -> Path:
    """A copy to attack."""
    (tmp_path / "behind").mkdir()
    return Path(shutil.copytree(signed[0], tmp_path / "release", symlinks=True))


@pytest.fixture
def key(signed) -> PublicKey:
    return public_key(signed[1])


def problems(release: Path, key: PublicKey | None = None) -> str:
    return "\n".join(verify(release, key).problems)


def list_again(release: Path) -> None:
    """Do as an attacker who knows the format and has no key."""
    (release / "SHA256SUMS").write_bytes(write_sums(release))


def test_what_was_released_is_valid(release: Path, key, proved) -> None:
    checked = verify(release, key)
    assert checked.problems == ()
    assert checked.signature.startswith("valid, by the key sha256:")
    assert checked.record.digests["dataset"] == proved.dataset.digest
    assert checked.num_files == len([path for path in release.rglob("*") if path.is_file()]) - 2
    assert verify(release).problems == ()
    assert verify(release).signature == "NOT CHECKED: name the signer's public key with --key"


def test_every_byte_of_every_file_counts(release: Path, key) -> None:
    for file in sorted(path for path in release.rglob("*") if path.is_file()):
        name = file.relative_to(release).as_posix()
        original = file.read_bytes()
        for position in {0, len(original) // 2, len(original) - 1}:
            data = bytearray(original)
            data[position] ^= 1
            file.write_bytes(data)
            assert name in problems(release, key), (name, position)
        file.write_bytes(original[:-1])
        assert name in problems(release, key), name
        file.write_bytes(original + b"x")
        assert name in problems(release, key), name
        file.unlink()
        if name == "SHA256SUMS":
            with refuses("not-a-release"):
                verify(release, key)
        else:
            assert f"{name} is missing" in problems(release, key)
        file.write_bytes(original)
    assert problems(release, key) == ""


@pytest.mark.parametrize("name", ["extra", ".hidden", "bundle/extra", "new/deep/file", "SHA256SUMS.bak"])
@pytest.mark.parametrize("listed", [False, True], ids=["not listed", "listed again"])
def test_an_added_file(release: Path, key, name: str, listed: bool) -> None:
    (release / name).parent.mkdir(parents=True, exist_ok=True)
    (release / name).touch()
    assert f"{name} is not listed in SHA256SUMS: it was added" in problems(release)
    if listed:
        list_again(release)
        said = "is not named in bundle/manifest.json" if name.startswith("bundle") else "has no place in a release"
        assert f"{name} {said}" in problems(release)
        assert "model.sig does not fit" in problems(release, key)


def test_links_pipes_and_empty_folders(release: Path, key) -> None:
    for name in ("bundle/int8.onnx", "report", "model.sig"):  # with the right content
        (release / name).rename(release.parent / "behind" / name.replace("/", "-"))
        (release / name).symlink_to(release.parent / "behind" / name.replace("/", "-"))
    os.mkfifo(release / "verdict/pipe")
    (release / "empty").mkdir()
    found = problems(release, key)
    for name in ("bundle/int8.onnx", "report", "model.sig"):
        assert f"{name} is a symbolic link; a release holds plain files" in found
    assert "not signed" in found
    assert "verdict/pipe is no regular file" in found
    assert "empty is an empty folder" in found
    (release / "SHA256SUMS").rename(release.parent / "sums")
    (release / "SHA256SUMS").symlink_to(release.parent / "sums")
    with refuses("symbolic-link"):
        verify(release)


def test_signatures_of_something_else(release: Path, key, proved, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path / "stranger")
    stranger, file = public_key(public), release / "model.sig"
    own = file.read_bytes()
    assert "model.sig is by another signer, or damaged: " in problems(release, stranger)
    write_release(proved.parts, tmp_path / "other", name="other", key=private)
    shutil.copyfile(tmp_path / "other/model.sig", file)
    assert "model.sig is by another signer, or damaged: " in problems(release, key)
    assert "model.sig does not fit" in problems(release, stranger)
    for data in (b"", own[:-1], own + b"x", bytes(64)):
        file.write_bytes(data)
        assert "model.sig is by another signer, or damaged: " in problems(release, key)
    old = Ed25519PrivateKey.generate().public_key()
    assert problems(release, old) == "SHA256SUMS.sig is missing: it was signed by a key of another kind"
    file.unlink()
    assert problems(release, old) == "SHA256SUMS.sig is missing: this release is not signed"
    assert problems(release, key) == "model.sig is missing: this release is not signed"
    assert verify(release).signature.startswith("none: this release is not signed")
    file.write_bytes(own)
    (release / "MODEL_CARD.md").write_text("100 % top-1")
    list_again(release)
    assert "model.sig does not fit MODEL_CARD.md, SHA256SUMS (sha256:" in problems(release, key)
    assert problems(release) == "MODEL_CARD.md is not the report's model_card.md"


ZEROS = 64 * "0"
OUTSIDE = {"../../secret": {"size_bytes": 0, "digest": f"sha256:{ZEROS}"}}


LINES = {
    "names '../secret', which leads out of the release": (f"{ZEROS}  ../secret\n",),
    "which leads out of the release": (f"{ZEROS}  bundle/../../secret\n", f"{ZEROS}  /etc/passwd\n"),
    "which is no plain name": [
        f"{ZEROS}  {name}\n"
        for name in ("./release.json", "bundle//int8.onnx", "release.json/", "a\\b", "a\x1bb", "SHA256SUMS")
    ],
    "names 'release.json' a second time": (f"{ZEROS}  release.json\n",),
    "bundle/other is missing": (f"{ZEROS}  bundle/other\n",),
    "is not '<sha256>  <file>'": (f"{ZEROS} *release.json\n", f"{64 * 'A'}  x\n", "\n"),
    "ends in the middle of a line": (f"{ZEROS}  end",),
}


@pytest.mark.parametrize(("said", "line"), [(said, line) for said, lines in LINES.items() for line in lines])
def test_lines_that_are_none(release: Path, said: str, line: str) -> None:
    (release.parent / "secret").touch()
    with (release / "SHA256SUMS").open("a") as file:
        file.write(line)
    assert said in problems(release)


@pytest.mark.parametrize("beside", ["pipe", "unlisted", "no room"])
def test_what_has_no_end_is_not_copied(release: Path, tmp_path: Path, monkeypatch, beside: str) -> None:
    """It is refused before anything of it is copied to where it would be checked."""
    if beside == "pipe":  # as a device, which only root makes
        os.mkfifo(release / "bundle/pipe")
    elif beside == "unlisted":
        (release / "bundle/more").touch()
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(shutil, "copytree", lambda *_, **__: pytest.fail("it was copied"))
    code = "no-space" if beside == "no room" else "release-refused"
    with refuses(code):
        find_source(str(release), None).__enter__()
    with refuses(code):
        fetch(str(release), tmp_path / "got", digest_file(release / "SHA256SUMS"))
    assert not (tmp_path / "got").exists()


def test_lists_that_are_no_text_or_empty_and_files_without_end(release: Path) -> None:
    for data, said in ((b"\xff\xfe", "is not text in UTF-8"), (b"", "release.json is not listed in SHA256SUMS; every")):
        (release / "SHA256SUMS").write_bytes(data)
        assert said in problems(release)
    list_again(release)
    with (release / "inputs.cdx.json").open("r+b") as file:
        file.truncate(100 << 20)
    list_again(release)
    assert "inputs.cdx.json has more than 8,388,608 bytes" in problems(release)
    (release / "other").mkdir()
    (release / "other" / "z.dsse.json").touch()
    list_again(release)
    assert "other/z.dsse.json has no place in a release" in problems(release)
    with (release / "SHA256SUMS").open("r+b") as file:
        file.truncate(1 << 40)
    with refuses("not-a-release"):
        verify(release)


Forgery = Callable[[dict], object]


@pytest.mark.parametrize(
    ("part", "forgery", "said"),
    [
        ("verdict", lambda record: record.update(schema_version=1), "has schema_version 1"),
        ("report", lambda record: record.update(schema_version=3), "a newer enginery wrote it"),
        ("bundle", lambda record: record.update(architecture="other"), "report/manifest.json is about another bundle"),
        ("report", lambda record: record["inputs"].update(dataset="sha256:0"), "is about another dataset"),
        ("report", lambda record: record["accuracy"]["rows"][2].update(score_pct=99.0), "is about another report"),
        ("verdict", lambda record: record.update(checks=[]), "verdict/manifest.json does not follow from the report"),
        ("verdict", lambda record: record.update(passed=False), "says passed false, and its checks say otherwise"),
        ("verdict", lambda record: record.update(kind="bundle"), "is a bundle, and a verdict is needed here"),
        ("verdict", lambda record: record["config"].update(precision="fp16"), "is on int8 by thresholds for fp16"),
        ("verdict", lambda record: record["config"].update(max_drop_points=-1), "names thresholds that are none"),
        ("bundle", lambda record: record["files"].pop("scales.json"), "scales.json is not named in bundle/manifest"),
        ("bundle", lambda record: record["files"].update(OUTSIDE), "is no path of a file inside the artifact"),
    ],
)
def test_a_manifest_sealed_again(release: Path, key, part: str, forgery: Forgery, said: str) -> None:
    (release.parent / "secret").touch()
    reseal(release / part, forgery)
    list_again(release)
    assert said in problems(release)
    assert "model.sig does not fit" in problems(release, key)


def edit(file: Path, change: Forgery) -> None:
    is_model = file.name == "MLmodel"
    record = yaml.safe_load(file.read_text())
    change(record["flavors"]["python_function"] if is_model else record)
    file.write_text((yaml.safe_dump if is_model else json.dumps)(record))


# 446 bytes, of which a message would make gigabytes.
BOMB = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
BOMB += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 6)]
BOMB += ["flavors: {python_function: {loader_module: *a5, data: bundle, config: {}}}"]
RECORD, BOM, MODEL, NO_MODEL = "release.json", "inputs.cdx.json", "MLmodel", "is not the description of a model that"


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (RECORD, lambda r: r["digests"].update(dataset="sha256:0"), "release.json says dataset sha256:0"),
        (RECORD, lambda r: r["digests"].update(more="sha256:0"), "release.json says more sha256:0"),
        (RECORD, lambda r: r.update(passed=False), "release.json says passed false, and the verdict says true"),
        (RECORD, lambda r: r.update(architecture="other"), "release.json says other, and the bundle is"),
        (RECORD, lambda r: r.update(more=1), "release.json is not valid: more: Extra inputs"),
        (RECORD, lambda r: r.update(schema_version=2), "release.json is not valid: schema_version"),
        (BOM, lambda r: r["components"][0]["hashes"].clear(), "inputs.cdx.json is not the list"),
        (BOM, lambda r: r["components"][0]["hashes"][0].update(content=ZEROS), f"says dataset sha256:{ZEROS}"),
        (MODEL, lambda r: r.update(loader_module="os"), "MLmodel says loader_module os, and it must be"),
        (MODEL, lambda r: r.update(data="other"), "MLmodel says data other"),
        (MODEL, lambda r: r.update(code="code"), "MLmodel has code, which no release has"),
        (MODEL, lambda r: r["config"].update(precision="fp16"), "MLmodel says precision fp16"),
        (MODEL, lambda r: r["config"].update(bundle_digest="x"), "MLmodel says bundle_digest x"),
        (MODEL, lambda r: r.pop("config"), NO_MODEL),
        (MODEL, lambda r: r.update(loader_module=[["x"]]), "MLmodel says loader_module no text, and it must be"),
        (MODEL, lambda r: r.update(loader_module=1000 * "x"), "MLmodel says loader_module xxx"),
        (MODEL, lambda r: r.update({1: "x"}), NO_MODEL),
        (MODEL, "a: " + (1 << 20) * "x", NO_MODEL),
        (MODEL, "a: 2026-99-99", NO_MODEL),
        (MODEL, 5000 * "[", NO_MODEL),
        (MODEL, "\n".join(BOMB), NO_MODEL),
        (BOM, 100_000 * "[", "inputs.cdx.json is not the list"),
        *((MODEL, text, NO_MODEL) for text in ("", "[]", "flavors: 3", "flavors: {python_function: 3}", "a: [", "\0")),
    ],
)
def test_files_that_contradict_the_chain(release: Path, file: str, change: Forgery | str, said: str) -> None:
    if isinstance(change, str):
        (release / file).write_text(change)
    else:
        edit(release / file, change)
    list_again(release)
    found = problems(release)
    assert said in found
    assert len(found) < 1000


def test_a_signature_that_the_policy_accepts(proved: Proved, signed, tmp_path: Path, monkeypatch) -> None:
    private = signed[1].with_suffix(".key")
    monkeypatch.setenv(KEY_VARIABLE, private.read_text())
    config = GateConfig.model_validate(LENIENT)
    gate(config, StepLog("gate"), report=proved.parts["report"], output=tmp_path / "verdict")
    parts = {**proved.parts, "verdict": tmp_path / "verdict"}
    statements = read_statements(parts["verdict"])
    write_release(parts, tmp_path / "release", name="digits", statements=statements, key=private)
    rights = {"public_key": signed[1].read_text(), "signs": ["model", "verdict"], "expires": "2099-01-01"}
    (tmp_path / "trust.yaml").write_text(yaml.safe_dump({"keys": {"ci": rights}}))
    monkeypatch.setenv(POLICY_VARIABLE, str(tmp_path / "trust.yaml"))
    assert "signature: valid, by ci of this machine's trust policy" in enginery("verify", tmp_path / "release").stdout


def test_the_command(release: Path, signed) -> None:
    said = enginery("verify", release, "--key", signed[1]).stdout
    for words in ("is as it was released", "signature: valid", "gate:      pass: top-1"):
        assert words in said
    assert "NOT CHECKED" in enginery("verify", release).stdout
    with refuses("not-a-release") as caught:
        enginery("verify", release.parent)
    assert caught.value.exit_code == 2
    (release / "bundle/int8.onnx").write_bytes(b"")
    (release / "new\x1b[31m").touch()
    done = run_python("-m", "enginery.cli.main", "verify", release, "--key", signed[1])
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[1].startswith("failed: bundle/int8.onnx was changed: its digest is sha256:e3b0c44298fc")
    assert lines[2] == "failed: new\\x1b[31m is not listed in SHA256SUMS: it was added"
    assert lines[3].endswith("3 problems. Get it again from who released it [release-changed]")
    assert "Traceback" not in done.stderr
    assert "released" not in done.stdout


def test_texts_of_a_release_look_like_no_lines_of_the_command(release: Path) -> None:
    (release / "model.sig").unlink()
    edit(release / RECORD, lambda record: record.update(created="now\nsignature: valid, by the key sha256:0"))
    list_again(release)
    done = enginery("verify", release)
    assert not done.stderr  # without a trust policy: the line on the signature is enough
    said = [line for line in done.stdout.splitlines() if line.startswith("signature:")]
    assert said == ["signature: none: this release is not signed, so whoever could write it could also change it"]


def test_verify_needs_neither_mlflow_nor_an_engine_room(release: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from enginery.release.verify import verify; "
        "assert verify(Path(sys.argv[1])).problems == (); "
        "print({'mlflow', 'torch', 'nvidia.dali', 'openvino', 'onnx', 'pandas', 'kfp'} & set(sys.modules))"
    )
    done = run_python("-c", script, release)
    assert done.stdout == "set()\n", done.stderr
