"""Manifests: what is sealed comes back, and what was touched since does not."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.digests import canonical_json, digest_bytes, digest_file
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import (
    MANIFEST,
    Artifact,
    DatasetManifest,
    PromotionManifest,
    load,
    prepare_directory,
    seal,
    seal_of,
    write_atomically,
)
from components.promote.config import PromoteConfig

FIELDS = {"registered_model": "m", "version": "1", "alias": "a", "bundle_digest": "b", "verdict_digest": "v"}


def seal_one(path: Path, content: bytes = b"weights") -> Artifact[PromotionManifest]:
    (path / "sub").mkdir(parents=True)
    (path / "a.bin").write_bytes(content)
    (path / "sub" / "b.txt").write_text("text")
    (path / "sub" / MANIFEST).write_text("a file like any other")
    return seal(path, PromotionManifest, inputs={"bundle": "sha256:0"}, config=PromoteConfig(), **FIELDS)


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    return seal_one(tmp_path / "artifact").path


def edit(path: Path, change: Callable[[dict[str, Any]], object], *, seal_again: bool = False) -> None:
    record = json.loads((path / MANIFEST).read_text())
    change(record)
    if seal_again:
        record["seal"] = seal_of(record)
    (path / MANIFEST).write_bytes(canonical_json(record))


def as_version_1(record: dict[str, Any]) -> None:
    record.update(schema_version=1)
    del record["seal"]


def test_what_is_sealed_comes_back(tmp_path: Path) -> None:
    written = seal_one(tmp_path / "artifact")
    read = load(tmp_path / "artifact", PromotionManifest, verify=("",))
    assert read == written
    assert read.digest == digest_file(tmp_path / "artifact" / MANIFEST)
    assert set(read.manifest.files) == {"a.bin", "sub/b.txt", f"sub/{MANIFEST}"}
    assert read.manifest.files["a.bin"].digest == digest_file(read.file("a.bin"))
    assert read.manifest.files["a.bin"].size_bytes == 7
    assert read.manifest.config == PromoteConfig().model_dump()
    assert read.manifest.environment.versions["torch"]


def test_the_digest_depends_on_the_content_and_nothing_else(tmp_path: Path) -> None:
    first, second, other = (
        seal_one(tmp_path / "a"),
        seal_one(tmp_path / "elsewhere" / "b"),
        seal_one(tmp_path / "c", b"Weights"),
    )
    assert first.digest == second.digest != other.digest


def test_without_a_manifest_it_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no finished dataset: it has no manifest\.json"):
        load(tmp_path, DatasetManifest)
    with pytest.raises(UserError, match="is no finished dataset"):
        load(tmp_path / "absent", DatasetManifest)


def test_another_kind_is_named(sealed: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"is a promotion, and a dataset is needed here; name the output of `python -m components\.preprocess`",
    ):
        load(sealed, DatasetManifest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda record: record.update(schema_version=3),
            r"has schema_version 3, and this enginery reads 1 to 2: a newer enginery wrote it. Update enginery",
        ),
        (
            lambda record: record.update(schema_version=0),
            "has schema_version 0, and this enginery reads 1 to 2.*write it again with `python -m components.promote`",
        ),
        (lambda record: record.pop("schema_version"), "has schema_version none.*write it again with `python -m"),
        (
            lambda record: record.update(schema_version="2"),
            'has schema_version "2", which must be a whole number without quotes.*write it again with `python -m',
        ),
        (lambda record: record.update(schema_version=True), "has schema_version true, which must be a whole number"),
        (lambda record: record.pop("version"), "version: Field required"),
        (lambda record: record.update(surprise=1), "surprise: Extra inputs are not permitted"),
        (lambda record: record["files"].update({"../x": record["files"]["a.bin"]}), "names a file outside the artif"),
        (lambda record: record["files"].update({"/etc/passwd": record["files"]["a.bin"]}), "names a file outside"),
        (lambda record: record["files"].update({"absent": record["files"]["a.bin"]}), "absent is missing"),
    ],
)
def test_a_manifest_that_cannot_be_trusted(sealed: Path, change: Callable[[Any], object], message: str) -> None:
    (sealed.parent / "x").write_bytes(b"weights")
    edit(sealed, change, seal_again=True)
    with pytest.raises(EngineryError, match=message):
        load(sealed, PromotionManifest)


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
def test_a_manifest_that_was_edited_by_hand(sealed: Path, change: Callable[[Any], object]) -> None:
    load(sealed, PromotionManifest)
    edit(sealed, change)
    with pytest.raises(
        EngineryError, match=r"manifest\.json was edited after it was sealed.*write it again with"
    ) as error:
        load(sealed, PromotionManifest)
    assert error.value.exit_code == 1


def test_a_manifest_of_version_1_is_migrated(sealed: Path) -> None:
    now = load(sealed, PromotionManifest).manifest
    edit(sealed, as_version_1)
    old = load(sealed, PromotionManifest)
    assert old.manifest.model_dump(exclude={"seal"}) == now.model_dump(exclude={"seal"})
    assert old.digest == digest_bytes((sealed / MANIFEST).read_bytes())  # still known by what is on disk
    (sealed / "a.bin").write_bytes(b"longer than before")
    with pytest.raises(EngineryError, match="is damaged"):
        load(sealed, PromotionManifest)


def test_a_seal_is_not_lifted_by_calling_the_manifest_version_1(sealed: Path) -> None:
    edit(sealed, lambda record: record.update(schema_version=1, version="2"))
    with pytest.raises(
        EngineryError, match="was edited after it was sealed: it says schema_version 1, which had no seal"
    ):
        load(sealed, PromotionManifest)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: json.dumps(json.loads(text), indent=2, sort_keys=True),
        lambda text: text + "\n",
        lambda text: text.replace('"version":"1"', '"version":"2","version":"1"'),
    ],
)
def test_a_manifest_of_other_bytes_has_another_identity(sealed: Path, change: Callable[[str], str]) -> None:
    text = (sealed / MANIFEST).read_text()
    assert json.loads(change(text)) == json.loads(text)
    assert change(text) != text
    (sealed / MANIFEST).write_text(change(text))
    with pytest.raises(
        EngineryError, match="was edited after it was sealed: its content is the same, its layout is not"
    ):
        load(sealed, PromotionManifest)


def test_a_manifest_without_a_canonical_form_was_never_sealed(sealed: Path) -> None:
    text = (sealed / MANIFEST).read_text()
    (sealed / MANIFEST).write_text(text.replace('"alias":"candidate"', '"alias":1e999'))
    with pytest.raises(EngineryError, match="was edited after it was sealed: its content does not fit its seal"):
        load(sealed, PromotionManifest)


def test_a_manifest_with_a_number_that_json_has_not(sealed: Path) -> None:
    text = (sealed / MANIFEST).read_text()
    (sealed / MANIFEST).write_text(text.replace('"size_bytes":7', '"size_bytes":NaN'))
    with pytest.raises(EngineryError, match="is not a valid promotion manifest"):
        load(sealed, PromotionManifest)


def test_a_manifest_that_is_no_json(sealed: Path) -> None:
    (sealed / MANIFEST).write_bytes(b"{\x00")
    with pytest.raises(EngineryError, match="is not a valid promotion manifest: Invalid JSON"):
        load(sealed, PromotionManifest)


def test_a_missing_file_and_one_of_another_size(sealed: Path) -> None:
    (sealed / "a.bin").write_bytes(b"longer than before")
    with pytest.raises(
        EngineryError, match=r"a\.bin has 18 bytes, its manifest says 7\. Put the original back, or write it again with"
    ):
        load(sealed, PromotionManifest)
    (sealed / "a.bin").unlink()
    with pytest.raises(EngineryError, match=r"a\.bin is missing"):
        load(sealed, PromotionManifest)


def test_a_swapped_file_of_the_same_size_is_found_by_its_digest(sealed: Path) -> None:
    (sealed / "a.bin").write_bytes(b"wEights")
    assert load(sealed, PromotionManifest).manifest.version == "1"  # sizes alone don't tell
    assert load(sealed, PromotionManifest, verify=(".txt",)).manifest.version == "1"
    with pytest.raises(EngineryError, match=r"a\.bin was changed after it was sealed"):
        load(sealed, PromotionManifest, verify=(".onnx", ".bin"))


def test_a_link_out_of_the_artifact_is_refused(sealed: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"weights")
    (sealed / "a.bin").unlink()
    (sealed / "a.bin").symlink_to(outside)
    with pytest.raises(EngineryError, match="names a file outside the artifact"):
        load(sealed, PromotionManifest)


def test_atomic_write_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with pytest.raises(TypeError):
        write_atomically(file, "no bytes")  # type: ignore[arg-type]
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_two_containers_that_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is process 1 of its own; a cache is a folder that both see."""
    file, fsync = tmp_path / "file", os.fsync

    def other_writes_meanwhile(number: int) -> None:
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
    with pytest.raises(UserError, match=r"is not empty \(it holds deep\)"):
        prepare_directory(tmp_path / "new")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; name a directory"):
        prepare_directory(tmp_path / "file")
    with pytest.raises(UserError, match="is a file; name a directory"):
        prepare_directory(tmp_path / "file" / "below")


def test_output_directory_without_permission() -> None:
    with pytest.raises(UserError, match=r"can't write the output directory /sys/enginery: .*; name one that you may"):
        prepare_directory(Path("/sys/enginery"))  # closed to root, too
