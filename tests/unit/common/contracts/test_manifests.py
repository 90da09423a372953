"""Manifests: what is sealed comes back, and what was touched since is refused, by the steps themselves, too."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.digests import canonical_json, digest_bytes, digest_file
from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import (
    MANIFEST,
    Artifact,
    CheckpointManifest,
    DatasetManifest,
    PromotionManifest,
    load,
    prepare_directory,
    seal,
    seal_of,
    write_atomically,
)
from components.common.contracts.transforms import transform_for
from components.export.sources import check_model
from components.promote.config import PromoteConfig
from components.train.config import TrainConfig
from tests.conftest import Dataset
from tests.processes import run_python
from tests.steps import step
from tests.unit.refusals import refuses
from tests.unit.registered import make_chain

FIELDS = {"registered_model": "m", "version": "1", "alias": "a", "bundle_digest": "b", "verdict_digest": "v"}
SPEC = transform_for(32, resize_ratio=1.0)
Edit = Callable[[dict[str, Any]], object]


def seal_one(path: Path, content: bytes = b"weights") -> Artifact[PromotionManifest]:
    (path / "sub").mkdir(parents=True)
    (path / "a.bin").write_bytes(content)
    (path / "sub" / "b.txt").write_text("text")
    (path / "sub" / MANIFEST).write_text("a file like any other")
    return seal(path, PromotionManifest, inputs={"bundle": "sha256:0"}, config=PromoteConfig(), **FIELDS)


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    return seal_one(tmp_path / "artifact").path


def edit(path: Path, change: Edit, *, seal_again: bool = False) -> None:
    record = json.loads((path / MANIFEST).read_text())
    change(record)
    if seal_again:
        record["seal"] = seal_of(record)
    (path / MANIFEST).write_bytes(canonical_json(record))


def refusal(path: Path, kind: Any = PromotionManifest, **options: Any) -> tuple[str, int, str]:
    """Code, exit code and message."""
    with pytest.raises(EngineryError) as caught:
        load(path, kind, **options)
    return caught.value.code, caught.value.exit_code, str(caught.value)


def test_a_manifest_without_end(sealed: Path) -> None:
    with (sealed / MANIFEST).open("r+b") as file:
        file.truncate(1 << 40)
    assert refusal(sealed)[0] == "invalid-manifest"
    (sealed / MANIFEST).unlink()
    (sealed / MANIFEST).symlink_to("/dev/null")  # as well as /dev/zero
    assert "is no plain file, so it is no manifest" in refusal(sealed)[2]


def test_a_manifest_nested_as_deep_as_json_can_just_be_read(sealed: Path) -> None:
    """A little less deep it could be written, too; the seal fits."""
    record = {**json.loads((sealed / MANIFEST).read_bytes()), "config": "DEEP"}
    del record["seal"]
    for depth in range(900, 1000):
        nested = f'{{"a":{"[" * depth}{"]" * depth}}}'.encode()
        unsealed = canonical_json(record).replace(b'"DEEP"', nested)
        whole = canonical_json({**record, "seal": digest_bytes(unsealed)}).replace(b'"DEEP"', nested)
        (sealed / MANIFEST).write_bytes(whole)
        with suppress(EngineryError):
            load(sealed, PromotionManifest)


def test_what_is_sealed_comes_back_with_a_digest_of_its_content_alone(tmp_path: Path) -> None:
    written = seal_one(tmp_path / "artifact")
    read = load(tmp_path / "artifact", PromotionManifest, verify=("",))
    assert read == written
    assert read.digest == digest_file(tmp_path / "artifact" / MANIFEST)
    assert set(read.manifest.files) == {"a.bin", "sub/b.txt", f"sub/{MANIFEST}"}
    assert read.manifest.files["a.bin"].digest == digest_file(read.file("a.bin"))
    assert read.manifest.files["a.bin"].size_bytes == 7
    assert read.manifest.config == PromoteConfig().model_dump()
    assert read.manifest.environment.versions["torch"]
    assert seal_one(tmp_path / "elsewhere" / "b").digest == read.digest
    assert seal_one(tmp_path / "other", b"Weights").digest != read.digest


def test_what_is_no_artifact_of_the_kind_is_named(tmp_path: Path, sealed: Path) -> None:
    assert refusal(tmp_path, DatasetManifest)[:2] == ("no-manifest", 2)
    assert refusal(tmp_path / "absent", DatasetManifest)[:2] == ("no-manifest", 2)
    code, exit_code, said = refusal(sealed, DatasetManifest)
    assert (code, exit_code) == ("other-kind", 2)
    assert "is a promotion, and a dataset is needed here; name the output of `python -m components.preprocess`" in said


def add_file(name: str) -> Edit:
    return lambda record: record["files"].update({name: record["files"]["a.bin"]})


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda record: record.update(schema_version=3), "unknown-schema-version", "a newer enginery wrote it. Update"),
        (lambda record: record.update(schema_version=1), "unknown-schema-version", "write it again with `python -m "),
        (lambda record: record.pop("schema_version"), "unknown-schema-version", "schema_version none"),
        (lambda record: record.update(schema_version="2"), "unknown-schema-version", 'schema_version "2"'),
        (lambda record: record.update(schema_version=True), "unknown-schema-version", "schema_version true"),
        (lambda record: record.update(schema_version=2.0), "unknown-schema-version", "schema_version 2.0"),
        (lambda record: record.pop("version"), "invalid-manifest", "version: Field required"),
        (lambda record: record.update(surprise=1), "invalid-manifest", "surprise: Extra inputs are not permitted"),
        *(
            (add_file(name), "invalid-manifest", "is no path of a file inside the artifact")
            for name in ("../x", "../artifact/a.bin", "/etc/passwd", "sub//b.txt", "./a.bin", "", ".", "a\nb", "a\\b")
        ),
        (add_file("absent"), "damaged-artifact", "absent is missing"),
    ],
)
def test_a_manifest_that_cannot_be_trusted(sealed: Path, change: Edit, code: str, said: str) -> None:
    (sealed.parent / "x").write_bytes(b"weights")
    edit(sealed, change, seal_again=True)
    found, _, message = refusal(sealed)
    assert found == code
    assert said in message


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(version="2"),
        lambda record: record["files"]["a.bin"].update(digest="sha256:0"),
        lambda record: record["files"].pop("a.bin"),
        lambda record: record["inputs"].update(bundle="sha256:1"),
        lambda record: record["config"].update(alias="champion"),
        lambda record: record["environment"].update(python="2.7"),
        lambda record: record.update(seal=""),
        lambda record: record.pop("seal"),
    ],
)
def test_an_edited_manifest_does_not_fit_its_seal(sealed: Path, change: Edit) -> None:
    edit(sealed, change)
    assert refusal(sealed)[:2] == ("broken-seal", 1)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        # The same content in other bytes has another identity.
        (lambda text: json.dumps(json.loads(text), indent=2, sort_keys=True), "broken-seal"),
        (lambda text: text + "\n", "broken-seal"),
        (lambda text: text.replace('"version":"1"', '"version":"2","version":"1"'), "broken-seal"),
        (lambda text: text.replace('"alias":"candidate"', '"alias":1e999'), "broken-seal"),  # no canonical form
        (lambda text: text.replace('"size_bytes":7', '"size_bytes":NaN'), "invalid-manifest"),
        (lambda text: text[:100], "invalid-manifest"),
        (lambda text: "{\x00", "invalid-manifest"),
    ],
)
def test_a_manifest_of_other_bytes(sealed: Path, change: Callable[[str], str], code: str) -> None:
    text = (sealed / MANIFEST).read_text()
    assert change(text) != text
    (sealed / MANIFEST).write_text(change(text))
    assert refusal(sealed)[:2] == (code, 1)


def test_damaged_files_are_found(sealed: Path, tmp_path: Path) -> None:
    file = sealed / "a.bin"
    file.write_bytes(b"longer than before")
    assert "a.bin has 18 bytes, its manifest says 7. Put the original back, or write it" in refusal(sealed)[2]
    file.write_bytes(b"wEights")
    assert load(sealed, PromotionManifest).manifest.version == "1"  # sizes alone don't tell
    assert load(sealed, PromotionManifest, verify=(".txt",)).manifest.version == "1"
    assert "a.bin was changed after it was sealed" in refusal(sealed, verify=(".onnx", ".bin"))[2]
    file.unlink()
    assert "a.bin is missing" in refusal(sealed)[2]
    (tmp_path / "outside.bin").write_bytes(b"weights")
    file.symlink_to(tmp_path / "outside.bin")
    code, exit_code, said = refusal(sealed)
    assert (code, exit_code) == ("damaged-artifact", 1)
    assert "names a file outside the artifact" in said


# The steps


def step_refusal(name: str, **folders: Path) -> EngineryError:
    """The error of a step that refuses to run."""
    with pytest.raises(EngineryError) as caught:
        step(name, **folders)
    return caught.value


def seal_checkpoint(folder: Path, classes: tuple[str, ...]) -> Path:
    """A checkpoint that is none; returns its weights."""
    folder.mkdir()
    (folder / "weights.safetensors").write_bytes(b"weights")
    fields = {"architecture": "resnet18", "classes": classes, "transform": SPEC, "metrics": {}}
    seal(folder, CheckpointManifest, inputs={}, config=TrainConfig(), **fields)
    return folder / "weights.safetensors"


@pytest.mark.parametrize("name", ["int8.onnx", "int8.plan"])
def test_a_swapped_model_of_the_same_size_is_refused(tmp_path: Path, digits_dataset: Dataset, name: str) -> None:
    models = make_chain(tmp_path, 50, data=digits_dataset, planned=("int8.plan",))["bundle"]
    (models / name).write_bytes((models / name).read_bytes().swapcase())
    error = step_refusal("validate", bundle=models, dataset=digits_dataset.path, output=tmp_path / "report")
    assert error.code == "damaged-artifact"
    assert f"{models / name} was changed after it was sealed" in str(error)
    assert "write it again with `python -m components.export`" in str(error)


def test_swapped_weights_are_refused(tmp_path: Path, digits_dataset: Dataset) -> None:
    checkpoint, classes = tmp_path / "checkpoint", digits_dataset.manifest.classes
    weights = seal_checkpoint(checkpoint, classes)
    weights.write_bytes(b"Weights")
    error = step_refusal("export", model=checkpoint, dataset=digits_dataset.path, output=tmp_path / "bundle")
    assert error.code == "damaged-artifact"
    assert f"{weights} was changed after it was sealed" in str(error)
    with pytest.raises(EngineryError) as before_packing:
        check_model(checkpoint, "", classes, 32)
    assert str(before_packing.value) == str(error)


def test_a_checkpoint_of_other_classes_is_refused(tmp_path: Path, digits_dataset: Dataset) -> None:
    """By name: a pair of swapped classes would be found by nothing else. Before anything is packed, too."""
    classes = digits_dataset.manifest.classes
    checkpoint = seal_checkpoint(tmp_path / "checkpoint", classes[::-1]).parent
    with refuses("other-classes"):
        step("export", tmp_path / "bundle", model=checkpoint, dataset=digits_dataset.path)
    with refuses("other-classes"):
        check_model(checkpoint, "", classes, 32)


def test_a_traceback_is_there_for_who_asks(tmp_path: Path) -> None:
    gate = ["components.gate", "--report", str(tmp_path / "absent"), "--output", str(tmp_path / "verdict")]
    for module, debug, shown in (
        (gate, "", False),
        (gate, "1", True),
        (["enginery.cli.main", "--debug", "run", "absent.py"], "", True),
    ):
        done = run_python("-m", *module, ENGINERY_DEBUG=debug)
        assert (done.returncode, "Traceback" in done.stderr) == (2, shown)
        assert shown or done.stderr.count("\n") == 1


# Files and folders


def test_atomic_writes_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, fsync = tmp_path / "file", os.fsync
    file.write_bytes(b"old")
    with pytest.raises(TypeError):
        write_atomically(file, "no bytes")
    assert file.read_bytes() == b"old"

    def other_writes_meanwhile(number: int) -> None:
        """Another container, in which the step is process 1, too."""
        fsync(number)
        monkeypatch.setattr(os, "fsync", fsync)
        write_atomically(file, b"other")
        assert file.read_bytes() == b"other"

    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "fsync", other_writes_meanwhile)
    write_atomically(file, b"the last one's")
    assert file.read_bytes() == b"the last one's"
    assert os.listdir(tmp_path) == ["file"]


def test_output_directories(tmp_path: Path) -> None:
    assert prepare_directory(tmp_path / "new" / "deep").is_dir()
    assert prepare_directory(tmp_path / "new" / "deep") == tmp_path / "new" / "deep"  # empty: fine again
    (tmp_path / "file").write_text("")
    for path, code in (
        (tmp_path / "new", "output-not-empty"),
        (tmp_path / "file", "output-is-file"),
        (tmp_path / "file" / "below", "output-is-file"),
        (Path("/sys/enginery"), "output-not-writable"),  # closed to root, too
    ):
        with refuses(code, "--output"):
            prepare_directory(path)
