"""Images within tar and zip archives, which may be hostile."""

import io
import lzma
import os
import pickle
import shutil
import stat
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.errors import EngineryError, UserError
from components.preprocess.sources import Sample, Source, Unreadable, find_samples, read_sample

WriteTree = Callable[..., Path]
MODES = {".tar": "w", ".tar.gz": "w:gz", ".tgz": "w:gz", ".tar.bz2": "w:bz2", ".tar.xz": "w:xz"}
Usage = namedtuple("Usage", "total used free")


def find(data: Path | str, scratch: Path, **options: Any) -> Source:
    scratch.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"val_fraction": 0.25, "seed": 0, "class_names_file": "", **options}
    return find_samples(str(data), scratch=scratch, **settings)


def contents(source: Source) -> dict[str, dict[str, tuple[int, bytes]]]:
    """Label and bytes of each path of each split, as another process reads them."""
    storage = pickle.loads(pickle.dumps(source.storage))
    return {
        split: {sample.path: (sample.label, storage.read(sample)) for sample in samples}
        for split, samples in source.splits.items()
    }


def reasons(source: Source) -> dict[str, str]:
    """Why samples can't be used."""
    storage = pickle.loads(pickle.dumps(source.storage))
    found = {}
    for sample in source.splits["train"] + source.splits["val"]:
        try:
            storage.read(sample)
        except Unreadable as error:
            found[sample.path] = error.reason
    return found


def archive(file: Path, root: Path, top: str = "") -> Path:
    """The files of `root`, sorted backwards, below a folder `top`."""
    paths = sorted((path for path in root.rglob("*") if path.is_file()), reverse=True)
    if file.suffix == ".zip":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            for path in paths:
                packed.write(path, f"{top}{path.relative_to(root)}")
    else:
        with tarfile.open(file, MODES["".join(Path(file.name).suffixes)]) as packed:
            for path in paths:
                packed.add(path, f"{top}{path.relative_to(root)}")
    return file


@pytest.mark.parametrize("top", ["", "./", "photos/", "./photos/"])
@pytest.mark.parametrize("suffix", [*MODES, ".zip"])
def test_an_archive_of_class_folders_is_as_the_folders(
    tmp_path: Path, write_tree: WriteTree, suffix: str, top: str
) -> None:
    root = write_tree(tmp_path / "images", {"cat": 4, "dog": 5, "dog/deep": 1})
    (root / "cat" / ".DS_Store").write_bytes(b"junk")
    (root / "__MACOSX" / "cat").mkdir(parents=True)
    (root / "__MACOSX" / "cat" / "000.png").write_bytes(b"junk")
    (root / "readme.txt").write_text("beside the classes")
    packed = find(archive(tmp_path / f"images{suffix}", root, top), tmp_path / "scratch")
    plain = find(root, tmp_path / "scratch")
    assert packed.classes == plain.classes == ("cat", "dog")
    assert contents(packed) == contents(plain)
    assert len(plain.splits["val"]) == 3
    assert [[(s.path, s.size_bytes) for s in packed.splits[split]] for split in packed.splits] == [
        [(s.path, s.size_bytes) for s in plain.splits[split]] for split in plain.splits
    ]


@pytest.mark.parametrize("top", ["", "photos/"])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".zip"])
def test_an_archive_of_a_split_tree(tmp_path: Path, write_tree: WriteTree, suffix: str, top: str) -> None:
    root = write_tree(tmp_path / "images", {"train/a": 3, "train/b": 2, "val/a": 1, "val/b": 1})
    packed = find(archive(tmp_path / f"images{suffix}", root, top), tmp_path / "scratch")
    plain = find(root, tmp_path / "scratch")
    assert packed.classes == plain.classes
    assert contents(packed) == contents(plain)


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_imagenet_in_an_archive(tmp_path: Path, write_tree: WriteTree, suffix: str) -> None:
    base = "ILSVRC/Data/CLS-LOC"
    root = write_tree(
        tmp_path / "images", {f"{base}/{split}/n0000000{n}": 2 for split in ("train", "val") for n in "12"}
    )
    (root / "LOC_synset_mapping.txt").write_text("n00000002 two\nn00000001 one, uno\n")
    source = find(archive(tmp_path / f"images{suffix}", root), tmp_path / "scratch")
    assert source.classes == ("two", "one")
    assert contents(source) == contents(find(root, tmp_path / "scratch"))


def test_an_uncompressed_tar_is_read_in_place_and_nothing_is_written(tmp_path: Path, write_tree: WriteTree) -> None:
    file = archive(tmp_path / "images.tar", write_tree(tmp_path / "images", {"a": 3, "b": 3}))
    (tmp_path / "link.tar").symlink_to(file)
    for data in (file, tmp_path / "link.tar", f"file://{file}"):
        source = find(data, tmp_path / "scratch")
        assert list((tmp_path / "scratch").iterdir()) == []
        for sample in source.splits["train"]:
            raw = file.read_bytes()[sample.offset : sample.offset + sample.size_bytes]
            assert source.storage.read(sample) == raw == (tmp_path / "images" / sample.path).read_bytes()
    os.truncate(file, source.splits["train"][-1].offset + 10)
    with pytest.raises(OSError, match=r"10 of \d+ bytes came"):
        source.storage.read(source.splits["train"][-1])


def member(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, target: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, target
    return info, data


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_hostile_members_of_a_tar_are_never_read(tmp_path: Path, suffix: str) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    members = [member(f"{name}/{number}.png", name.encode()) for name in ("a", "b") for number in range(2)]
    members += [
        member("../secret.png", b"evil"),
        member("a/../../b/up.png", b"evil"),
        member(str(secret), b"evil"),
        member("a/link.png", kind=tarfile.SYMTYPE, target=str(secret)),
        member("a/hard.png", kind=tarfile.LNKTYPE, target="../secret.png"),
        member("b/device.png", kind=tarfile.CHRTYPE),
        member("b/pipe.png", kind=tarfile.FIFOTYPE),
        member("b/sparse.png", b"evil", kind=tarfile.GNUTYPE_SPARSE),
        member("b/replaced.png", b"good"),
        member("b/replaced.png", kind=tarfile.SYMTYPE, target=str(secret)),
        member("evil", kind=tarfile.SYMTYPE, target=str(tmp_path)),
        member("../evil.txt", b"evil"),
    ]
    file = tmp_path / f"images{suffix}"
    with tarfile.open(file, MODES[suffix]) as packed:
        for info, data in members:
            packed.addfile(info, io.BytesIO(data))
    source = find(file, tmp_path / "scratch")
    assert source.classes == ("a", "b")
    outside, irregular = "a path out of the archive", "no regular file of the archive"
    assert reasons(source) == {
        "../secret.png": outside,
        "a/../../b/up.png": outside,
        str(secret): outside,
        "a/link.png": irregular,
        "a/hard.png": irregular,
        "b/device.png": irregular,
        "b/pipe.png": irregular,
        "b/sparse.png": irregular,
        "b/replaced.png": irregular,
        "../evil.txt": outside,
    }
    assert sum(len(samples) for samples in source.splits.values()) == 4 + 10
    assert secret.read_bytes() == b"secret"
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["unpacked.tar"] * (suffix != ".tar")


def test_hostile_members_of_a_zip_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "images.zip"
    link = zipfile.ZipInfo("a/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png", "b/bomb.png"):
            packed.writestr(name, b"0" * (5000 if "bomb" in name else 10))
        packed.writestr("../up.png", b"evil")
        packed.writestr("../up.txt", b"evil")
        packed.writestr("./", b"")
        packed.writestr("/root.png", b"evil")
        packed.writestr(link, "/etc/passwd")
    monkeypatch.setattr("components.preprocess.sources.archive_members.MAX_FILE_BYTES", 4999)
    source = find(file, tmp_path / "scratch")
    assert reasons(source) == {
        "../up.png": "a path out of the archive",
        "../up.txt": "a path out of the archive",
        "/root.png": "a path out of the archive",
        "a/link.png": "no regular file of the archive",
        "b/bomb.png": "unpacks to 5,000 bytes, more than an image may have",
    }


def test_encrypted_and_damaged_members_of_a_zip(tmp_path: Path) -> None:
    file = tmp_path / "images.zip"
    with zipfile.ZipFile(file, "w") as packed:
        for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
            packed.writestr(name, f"content of {name}")
    raw = bytearray(file.read_bytes())
    directory = raw.index(b"PK\x01\x02")
    raw[directory + 8] |= 1  # the first member's flag for "encrypted"
    raw[raw.index(b"content of b/1.png")] ^= 1
    file.write_bytes(raw)
    source = find(file, tmp_path / "scratch")
    assert reasons(source) == {
        "a/0.png": "encrypted; unpack the archive with its password and name the folder",
        "b/1.png": "damaged in the archive: its checksum is wrong",
    }
    with pytest.raises(FileNotFoundError):
        source.storage.read(Sample(path="a/absent.png", label=0, size_bytes=0))


def test_a_process_that_reads_from_a_zip_does_not_read_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes 150 MiB and seconds where there are 200,000 members."""
    file = tmp_path / "images.zip"
    methods = {
        "a/0": zipfile.ZIP_STORED,
        "a/1": zipfile.ZIP_DEFLATED,
        "b/0": zipfile.ZIP_BZIP2,
        "b/1": zipfile.ZIP_LZMA,
    }
    expected = {f"{name}.png": name.encode() * 1000 for name in methods} | {"a/empty.png": b""}
    with file.open("wb") as stream:
        stream.write(b"what stands before an archive that unpacks itself")
        with zipfile.ZipFile(stream, "w") as packed:
            for name, method in methods.items():
                packed.writestr(f"photos/{name}.png", expected[f"{name}.png"], method)
            packed.writestr("photos/a/empty.png", b"", zipfile.ZIP_DEFLATED)
    source = find(file, tmp_path / "scratch")
    monkeypatch.setattr(zipfile, "ZipFile", None)
    told = reasons(source)
    assert told == {"b/1.png": "packed in a way that is not read (LZMA); unpack the archive and name the folder"}
    for sample in [sample for samples in source.splits.values() for sample in samples if sample.path not in told]:
        assert source.storage.read(sample) == expected[sample.path]
        assert len(pickle.dumps(sample)) < 500


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_member_of_a_zip_that_is_not_what_the_directory_says(tmp_path: Path, method: int) -> None:
    file = tmp_path / "images.zip"
    with zipfile.ZipFile(file, "w", method) as packed:
        for name in ("a/0.png", "a/bomb.png", "b/0.png", "b/moved.png", "b/cut.png"):
            packed.writestr(name, b"0" * (50_000_000 if "bomb" in name else 10_000))
    raw = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as packed:
        places = {member.filename: member.header_offset for member in packed.infolist()}
    raw[places["b/moved.png"]] = 0
    raw[places["b/cut.png"] + 30 + len("b/cut.png")] ^= 0xFF
    for entry in (index for index in range(len(raw)) if raw[index : index + 4] == b"PK\x01\x02"):
        if raw[entry + 46 : entry + 46 + len("a/bomb.png")] == b"a/bomb.png":
            raw[entry + 24 : entry + 28] = (100).to_bytes(4, "little")  # its size, so it claims
    file.write_bytes(raw)
    source = find(file, tmp_path / "scratch")
    tracemalloc.start()
    told = reasons(source)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 5_000_000
    assert set(told) == {"a/bomb.png", "b/moved.png", "b/cut.png"}
    assert told["a/bomb.png"] == "damaged in the archive: it is not as long as the directory says"
    assert told["b/moved.png"] == "damaged in the archive: its header is not where the directory says"
    assert told["b/cut.png"].startswith("damaged in the archive: ")
    os.truncate(file, places["b/cut.png"] - 5)
    last = next(s for samples in source.splits.values() for s in samples if s.path == "b/moved.png")
    with pytest.raises(Unreadable, match="damaged in the archive"):
        source.storage.read(last)


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_members_with_one_name_the_last_counts(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"images{suffix}"
    names = [("a/0.png", b"old"), ("a/1.png", b"x"), ("b/0.png", b"x"), ("b/1.png", b"x"), ("./a/0.png", b"new")]
    if suffix == ".zip":
        with zipfile.ZipFile(file, "w") as packed:
            for name, data in names:
                packed.writestr(name, data)
    else:
        with tarfile.open(file, "w") as packed:
            for info, data in (member(*name) for name in names):
                packed.addfile(info, io.BytesIO(data))
            packed.addfile(member("b/1.png", kind=tarfile.SYMTYPE, target="0.png")[0])
            packed.addfile(member("b/1.png", b"y")[0], io.BytesIO(b"y"))
    found = contents(find(file, tmp_path / "scratch"))
    found = found["train"] | found["val"]
    assert found["a/0.png"][1] == b"new"
    assert found["b/1.png"][1] == (b"x" if suffix == ".zip" else b"y")
    assert len(found) == 4


def test_what_lies_beside_the_top_folder_is_not_taken_for_it(tmp_path: Path) -> None:
    file = tmp_path / "images.tar"
    with tarfile.open(file, "w") as packed:
        for name in ("top/a/0.png", "top/a/1.png", "top/b/0.png", "top/b/1.png"):
            info, data = member(name, name.encode())
            packed.addfile(info, io.BytesIO(data))
        packed.addfile(member("a/0.png", kind=tarfile.SYMTYPE, target="top/a/0.png")[0])
        packed.addfile(member("top/a/2.png", kind=tarfile.SYMTYPE, target="0.png")[0])
    source = find(file, tmp_path / "scratch")
    assert set(reasons(source)) == {"../a/0.png", "a/2.png"}
    assert len(contents_of_readable(source)) == 4


def contents_of_readable(source: Source) -> set[str]:
    refused = reasons(source)
    return {s.path for samples in source.splits.values() for s in samples if s.path not in refused}


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_an_empty_class_folder_counts_and_depth_has_no_limit(tmp_path: Path, suffix: str) -> None:
    names = [f"a/{'d/' * 3000}0.png", "a/1.png", "b/0.png", "b/1.png", "b/x", "b/x/y.png"]
    for extra, message in (([], ""), (["none/"], r"class 'none' has no files")):
        file = tmp_path / f"images{suffix}"
        if suffix == ".zip":
            with zipfile.ZipFile(file, "w") as packed:
                for name in names + extra:
                    packed.writestr(name, name[-9:])
        else:
            with tarfile.open(file, "w") as packed:
                for name in names + extra:
                    info, data = member(name, name[-9:].encode(), tarfile.DIRTYPE if name[-1] == "/" else b"0")
                    info.size *= name[-1] != "/"
                    packed.addfile(info, io.BytesIO(data))
        if message:
            with pytest.raises(UserError, match=message):
                find(file, tmp_path / "scratch")
        else:
            found = contents(find(file, tmp_path / "scratch"))
            assert {path: data.decode() for path, (_, data) in (found["train"] | found["val"]).items()} == {
                name: name[-9:] for name in names
            }


def test_archives_that_are_none_or_damaged(tmp_path: Path, write_tree: WriteTree) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    for suffix in (*MODES, ".zip"):
        file = tmp_path / f"x{suffix}"
        for data in (b"", b"no archive", archive(file, root).read_bytes()[:-2000]):
            if suffix == ".tar" and len(data) > 100:  # only the end marker is cut off
                data = data[:600]
            file.write_bytes(data)
            with pytest.raises(UserError, match=r"x\.\S+ .*(make it anew, or fetch it again|no permission)"):
                find(file, tmp_path / "scratch")
    whole = archive(tmp_path / "y.tar", root).read_bytes()
    with tarfile.open(tmp_path / "y.tar") as packed:
        second = packed.getmembers()[1].offset
    (tmp_path / "y.tar").write_bytes(whole[:second] + b"\xff" * 512 + whole[second + 512 :])
    with pytest.raises(UserError, match=rf"y\.tar is damaged at byte {second}"):
        find(tmp_path / "y.tar", tmp_path / "scratch")


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.bz2", ".tar.xz", ".zip"])
def test_a_tar_that_is_something_else_is_told_so(tmp_path: Path, write_tree: WriteTree, suffix: str) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    file = archive(tmp_path / f"x{suffix}", root).rename(tmp_path / "x.tar")
    with pytest.raises(UserError, match=rf"x\.tar is no tar but a \{suffix} file; give it a name that ends so"):
        find(file, tmp_path / "scratch")


def test_an_archive_that_fills_the_disk_is_given_up(
    tmp_path: Path, write_tree: WriteTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = archive(tmp_path / "x.tar.gz", write_tree(tmp_path / "images", {"a": 2, "b": 2}))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12, 10**8))
    with pytest.raises(EngineryError, match=r"too small for .*x\.tar\.gz: less than 1 GB is left"):
        find(file, tmp_path / "scratch")


def test_a_zip_of_a_version_to_come(tmp_path: Path, write_tree: WriteTree) -> None:
    file = archive(tmp_path / "x.zip", write_tree(tmp_path / "images", {"a": 2, "b": 2}))
    data = bytearray(file.read_bytes())
    data[data.index(b"PK\x01\x02") + 6] = 102
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"x\.zip is no zip that can be read \(zip file version 10\.2\)"):
        find(file, tmp_path / "scratch")


def test_zst_needs_a_decompressor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_tree: WriteTree) -> None:
    plain = archive(tmp_path / "x.tar", write_tree(tmp_path / "images", {"a": 2, "b": 2}))
    (tmp_path / "x.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"can't read x\.tar\.zst; unpack it to a \.tar \(zstd -d\), or pip install"):
        find(tmp_path / "x.tar.zst", tmp_path / "scratch")

    class Zstandard:
        @staticmethod
        def open(path: Path, mode: str) -> Any:
            assert (path, mode) == (tmp_path / "x.tar.zst", "rb")
            return plain.open("rb")

    monkeypatch.setitem(sys.modules, "zstandard", Zstandard)
    assert find(tmp_path / "x.tar.zst", tmp_path / "scratch").classes == ("a", "b")


def test_names_of_an_archive_need_not_be_unicode(tmp_path: Path) -> None:
    file = tmp_path / "x.tar"
    odd = os.fsdecode(b"a/caf\xe9.png")
    with tarfile.open(file, "w", errors="surrogateescape", format=tarfile.GNU_FORMAT) as packed:
        for name in (odd, "a/0.png", "b/0.png", "b/1.png"):
            info, data = member(name, b"x")
            packed.addfile(info, io.BytesIO(data))
    found = contents(find(file, tmp_path / "scratch"))
    assert odd in found["train"] | found["val"]


MANY = 400 << 20


def header(kind: bytes, size: int, name: str = "a/0.png") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def sparse_file(file: Path, start: bytes, size: int) -> Path:
    """`start`, then nothing but a hole: it takes a block of the disk."""
    file.write_bytes(start)
    os.truncate(file, size)
    assert file.stat().st_blocks * 512 <= len(start) + (64 << 10)
    return file


def pax_record(key: str, value: str) -> bytes:
    text = f" {key}={value}\n".encode()
    length = len(text) + len(str(len(text) + 2))
    return f"{length}".encode() + text


PAX_SPARSE = pax_record("GNU.sparse.major", "1") + pax_record("GNU.sparse.minor", "0")
BOMBS = {
    "GNU long name": header(tarfile.GNUTYPE_LONGNAME, MANY),
    "GNU long link": header(tarfile.GNUTYPE_LONGLINK, MANY),
    "PAX header": header(tarfile.XHDTYPE, MANY),
    "global PAX header": header(tarfile.XGLTYPE, MANY),
    "PAX sparse map": header(tarfile.XHDTYPE, len(PAX_SPARSE))
    + PAX_SPARSE.ljust(512, b"\0")
    + header(tarfile.REGTYPE, MANY),
    "chain of long names": (header(tarfile.GNUTYPE_LONGNAME, 2) + b"a\0".ljust(512, b"\0")) * 2000,
    "large member": header(tarfile.REGTYPE, 1 << 40),
    "negative size": header(tarfile.REGTYPE, 512)[:124] + b"\xff" * 12 + header(tarfile.REGTYPE, 512)[136:],
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_tar_of_a_few_kilobytes_costs_no_memory(tmp_path: Path, name: str) -> None:
    """It claims to hold 400 MB and more; listing it, and reading what is listed, takes next to nothing."""
    file = sparse_file(tmp_path / "x.tar", BOMBS[name], MANY + (1 << 20))

    def read() -> bytes:
        source = find(file, tmp_path / "scratch")
        return read_sample(source.storage, source.splits["train"][0])

    tracemalloc.start()
    try:
        with pytest.raises((UserError, Unreadable)):
            read()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10_000_000


def test_what_is_larger_than_an_image_is_not_read(tmp_path: Path, write_tree: WriteTree) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    sparse_file(root / "a" / "large.png", b"", 1 << 40)
    samples = [sample for split in find(root, tmp_path / "scratch").splits.values() for sample in split]
    (large,) = (sample for sample in samples if "large" in sample.path)
    with pytest.raises(Unreadable, match=r"has 1,099,511,627,776 bytes, more than an image may have"):
        read_sample(find(root, tmp_path / "scratch").storage, large)


def test_folders_in_one_another_without_end(tmp_path: Path) -> None:
    file = tmp_path / "x.tar"
    with tarfile.open(file, "w", format=tarfile.GNU_FORMAT) as packed:
        for number in range(4):
            packed.addfile(member(f"{number}/{'d/' * 30_000}0.png")[0])
    with pytest.raises(UserError, match="has too many folders, or too many in one another"):
        find(file, tmp_path / "scratch")


@pytest.mark.parametrize("number", ["_MAX_MEMBERS", "_MAX_DIRECTORY_BYTES"])
def test_too_many_members(tmp_path: Path, write_tree: WriteTree, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    suffix = ".tar" if number == "_MAX_MEMBERS" else ".zip"
    monkeypatch.setattr(f"components.preprocess.sources.archive_members.{number}", 3)
    with pytest.raises(UserError, match=r"has (more than 3 members|a directory of more than 3 bytes); pack it as "):
        find(archive(tmp_path / f"images{suffix}", root), tmp_path / "scratch")


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.xz", ".tar.bz2"])
def test_a_compressed_bomb_is_given_up_before_it_fills_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("components.preprocess.sources.archive_members._MIN_BOMB_BYTES", 1 << 24)
    file = tmp_path / f"x{suffix}"
    with tarfile.open(file, MODES[suffix]) as packed:
        info = tarfile.TarInfo("a/0.png")
        info.size = 64 << 20
        packed.addfile(info, io.BytesIO(bytes(info.size)))
    with pytest.raises(UserError, match=r"unpacks to more than 16,777,216 bytes, 200 times its size"):
        find(file, tmp_path / "scratch")
    assert sum(left.stat().st_size for left in (tmp_path / "scratch").iterdir()) <= 1 << 24


def test_the_dictionary_of_an_xz_file_is_bounded(tmp_path: Path) -> None:
    body = bytearray(lzma.compress(bytes(1 << 16), format=lzma.FORMAT_XZ, check=lzma.CHECK_NONE))
    at = body.index(b"\x21\x01") + 2  # LZMA2's filter, one byte of properties: the dictionary's size
    body[at] = 39  # 3 GiB
    header_size = (body[12] + 1) * 4
    body[12 + header_size - 4 : 12 + header_size] = zlib.crc32(body[12 : 12 + header_size - 4]).to_bytes(4, "little")
    (tmp_path / "x.tar.xz").write_bytes(body)
    with pytest.raises(UserError, match=r"x\.tar\.xz is damaged \(Memory usage limit exceeded\)"):
        find(tmp_path / "x.tar.xz", tmp_path / "scratch")


def test_several_xz_streams_are_one_file(tmp_path: Path, write_tree: WriteTree) -> None:
    plain = archive(tmp_path / "x.tar", write_tree(tmp_path / "images", {"a": 2, "b": 2})).read_bytes()
    parts = [lzma.compress(plain[:700]), lzma.compress(plain[700:])]
    (tmp_path / "x.tar.xz").write_bytes(parts[0] + bytes(4) + parts[1] + bytes(8))
    source = find(tmp_path / "x.tar.xz", tmp_path / "scratch")
    assert contents(source) == contents(find(tmp_path / "x.tar", tmp_path / "scratch"))
