"""Tars, compressed tars and zips as a source, which may be hostile; WebDataset tars."""

import lzma
import os
import pickle
import shutil
import stat
import sys
import tarfile
import zipfile
import zlib
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.errors import UserError
from components.preprocess.sources import Sample, Source, Unreadable, read_sample
from tests.unit.refusals import refuses

from .builders import (
    IRREGULAR,
    MODES,
    OUTSIDE,
    archive,
    contents,
    find,
    member,
    paths,
    peak_below,
    reasons,
    shard,
    write_shard,
    write_tar,
    write_tree,
    write_zip,
)

Usage = namedtuple("Usage", "total used free")
FOUR = ("a/0.png", "a/1.png", "b/0.png", "b/1.png")


def sizes(source: Source) -> dict[str, int]:
    return {sample.path: sample.size_bytes for samples in source.splits.values() for sample in samples}


def two_classes(folder: Path) -> Path:
    return write_tree(folder / "images", {"a": 2, "b": 2})


def of_names(file: Path, *names: str) -> Path:
    """An archive of files, and of folders where a name ends in a slash; a file's content is the end of its name."""
    if file.suffix == ".zip":
        return write_zip(file, {name: b"" if name[-1] == "/" else name[-9:].encode() for name in names})
    return write_tar(
        file,
        *(member(one, kind=tarfile.DIRTYPE) if one[-1] == "/" else member(one, one[-9:].encode()) for one in names),
    )


@pytest.mark.parametrize("top", ["", "./", "photos/", "./photos/"])
@pytest.mark.parametrize("suffix", [*MODES, ".zip"])
def test_an_archive_of_class_folders_is_as_the_folders(tmp_path: Path, suffix: str, top: str) -> None:
    root = write_tree(tmp_path / "images", {"cat": 4, "dog": 5, "dog/deep": 1})
    (root / "cat" / ".DS_Store").write_bytes(b"junk")
    (root / "__MACOSX" / "cat").mkdir(parents=True)
    (root / "__MACOSX" / "cat" / "000.png").write_bytes(b"junk")
    (root / "readme.txt").write_text("beside the classes")
    packed, expected = find(archive(tmp_path / f"images{suffix}", root, top), tmp_path / "scratch"), find(root)
    assert packed.classes == expected.classes == ("cat", "dog")
    assert contents(packed) == contents(expected)
    assert len(expected.splits["val"]) == 3
    assert list(sizes(packed).items()) == list(sizes(expected).items())  # in the same order


@pytest.mark.parametrize("top", ["", "photos/"])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".zip"])
def test_an_archive_of_a_split_tree_or_of_imagenet(tmp_path: Path, suffix: str, top: str) -> None:
    root = write_tree(tmp_path / "images", {"train/a": 3, "train/b": 2, "val/a": 1, "val/b": 1})
    packed = find(archive(tmp_path / f"images{suffix}", root, top), tmp_path / "scratch")
    assert contents(packed) == contents(find(root))
    base = "ILSVRC/Data/CLS-LOC"
    root = write_tree(tmp_path / "net", {f"{base}/{split}/n0000000{n}": 2 for split in ("train", "val") for n in "12"})
    (root / "LOC_synset_mapping.txt").write_text("n00000002 two\nn00000001 one, uno\n")
    source = find(archive(tmp_path / f"net{suffix}", root), tmp_path / "scratch")
    assert source.classes == ("two", "one")
    assert contents(source) == contents(find(root))


def test_an_uncompressed_tar_is_read_in_place_and_nothing_is_written(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    file = archive(tmp_path / "images.tar", root)
    (tmp_path / "link.tar").symlink_to(file)
    for data in (file, tmp_path / "link.tar", f"file://{file}"):
        source = find(data, tmp_path / "scratch")
        assert list((tmp_path / "scratch").iterdir()) == []
        for sample in source.splits["train"]:
            raw = file.read_bytes()[sample.offset : sample.offset + sample.size_bytes]
            assert source.storage.read(sample) == raw == (root / sample.path).read_bytes()
    os.truncate(file, source.splits["train"][-1].offset + 10)
    with pytest.raises(OSError, match=r"10 of \d+ bytes came"):
        source.storage.read(source.splits["train"][-1])


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_hostile_members_of_a_tar_are_never_read(tmp_path: Path, suffix: str) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    file = write_tar(
        tmp_path / f"images{suffix}",
        *(member(name, name.encode()) for name in FOUR),
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
    )
    source = find(file, tmp_path / "scratch")
    assert source.classes == ("a", "b")
    irregular = ("a/link.png", "a/hard.png", "b/device.png", "b/pipe.png", "b/sparse.png", "b/replaced.png")
    outside = ("../secret.png", "a/../../b/up.png", str(secret), "../evil.txt")
    assert reasons(source) == dict.fromkeys(outside, OUTSIDE) | dict.fromkeys(irregular, IRREGULAR)
    assert len(paths(source)) == 4 + 10
    assert secret.read_bytes() == b"secret"
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["unpacked.tar"] * (suffix != ".tar")


def test_hostile_members_of_a_zip_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = ("../up.png", "../up.txt", "/root.png")
    members = dict.fromkeys(FOUR, b"0" * 10) | dict.fromkeys((*outside, "./"), b"evil") | {"b/bomb.png": b"0" * 5000}
    file = write_zip(tmp_path / "images.zip", members)
    link = zipfile.ZipInfo("a/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(file, "a") as packed:
        packed.writestr(link, "/etc/passwd")
    monkeypatch.setattr("components.preprocess.sources.zips.MAX_FILE_BYTES", 4999)
    assert reasons(find(file)) == {
        **dict.fromkeys(outside, OUTSIDE),
        "a/link.png": IRREGULAR,
        "b/bomb.png": "unpacks to 5,000 bytes, more than an image may have",
    }


def from_windows(file: Path, *names: str) -> Path:
    with zipfile.ZipFile(file, "w") as packed:
        for name in names:
            info = zipfile.ZipInfo(name)
            info.create_system = 0
            packed.writestr(info, name)
    return file


def test_names_of_a_zip_as_windows_and_macos_write_them(tmp_path: Path) -> None:
    file = from_windows(tmp_path / "windows.zip", "cat\\0.jpg", "cat\\1.jpg", "dog\\0.jpg", "dog\\1.jpg")
    assert paths(find(file)) == ["cat/0.jpg", "cat/1.jpg", "dog/0.jpg", "dog/1.jpg"]
    names = {b"xx/0": "ä/0", b"xx/1": "ä/1"}  # in UTF-8, but without the flag that says so
    file = write_zip(tmp_path / "macos.zip", {name.decode(): b"image" for name in (*names, b"dog/0", b"dog/1")})
    content = file.read_bytes()
    for plain, name in names.items():
        content = content.replace(plain, name.encode())
    file.write_bytes(content)
    source = find(file)
    assert source.classes == ("dog", "ä")
    assert contents(source)["val"]["ä/0" if "ä/0" in contents(source)["val"] else "ä/1"] == ("ä", b"image")
    file.write_bytes(content.replace("ä".encode(), b"\x84e"))  # CP437
    assert find(file).classes == ("dog", "äe")


def test_backslashes_of_a_zip_that_are_halves_of_letters(tmp_path: Path) -> None:
    file = from_windows(tmp_path / "japan.zip", "1111/0", "1111/1", "2222/0", "2222/1", "dog/0", "dog/1")
    shift_jis = file.read_bytes()
    for plain, name in ((b"1111", "表紙"), (b"2222", "表面")):  # as Windows writes them, of 4 bytes
        shift_jis = shift_jis.replace(plain + b"/", name.encode("cp932") + b"/")
    file.write_bytes(shift_jis)
    assert len(find(file).classes) == 3


def test_a_process_that_reads_from_a_zip_does_not_read_its_directory(tmp_path: Path, monkeypatch) -> None:
    """A listing takes 150 MiB and seconds where there are 200,000 members."""
    file = tmp_path / "images.zip"
    methods = zip(FOUR, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA), strict=True)
    expected = {name: name.encode() * 1000 for name in FOUR} | {"a/empty.png": b""}
    with file.open("wb") as stream:
        stream.write(b"what stands before an archive that unpacks itself")
        with zipfile.ZipFile(stream, "w") as packed:
            for name, method in methods:
                packed.writestr(f"photos/{name}", expected[name], method)
            packed.writestr("photos/a/empty.png", b"", zipfile.ZIP_DEFLATED)
    source = find(file)
    monkeypatch.setattr(zipfile, "ZipFile", None)
    refused = reasons(source)
    assert refused == {"b/1.png": "packed in a way that is not read (LZMA); unpack the archive and name the folder"}
    for sample in [sample for samples in source.splits.values() for sample in samples if sample.path not in refused]:
        assert source.storage.read(sample) == expected[sample.path]
        assert len(pickle.dumps(sample)) < 500
    with pytest.raises(FileNotFoundError):
        source.storage.read(Sample(path="a/absent.png", label=0, size_bytes=0))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_members_of_a_zip_that_are_not_what_the_directory_says(tmp_path: Path, method: int) -> None:
    names = ("a/0.png", "a/bomb.png", "a/locked.png", "b/0.png", "b/moved.png", "b/cut.png")
    members = {name: b"0" * (50_000_000 if "bomb" in name else 10_000) for name in names}
    file = write_zip(tmp_path / "images.zip", members, method)
    raw = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as packed:
        places = {one.filename: one.header_offset for one in packed.infolist()}
    raw[places["b/moved.png"]] = 0
    raw[places["b/cut.png"] + 30 + len("b/cut.png")] ^= 0xFF
    for name, at, value in (("a/bomb.png", 24, (100).to_bytes(4, "little")), ("a/locked.png", 8, b"\1")):
        entry = raw.rindex(name.encode()) - 46  # of the directory
        raw[entry + at : entry + at + len(value)] = value  # its size, so it claims; its flag for "encrypted"
    file.write_bytes(raw)
    source = find(file)
    with peak_below(5_000_000 if method else 60_000_000):
        found = reasons(source)
    assert found == {
        "a/bomb.png": "damaged in the archive: it is not as long as the directory says",
        "a/locked.png": "encrypted; unpack the archive with its password and name the folder",
        "b/moved.png": "damaged in the archive: its header is not where the directory says",
        "b/cut.png": found["b/cut.png"],
    }
    assert found["b/cut.png"].startswith("damaged in the archive: ")
    os.truncate(file, places["b/cut.png"] - 5)
    last = next(one for samples in source.splits.values() for one in samples if one.path == "b/moved.png")
    with pytest.raises(Unreadable, match="damaged in the archive"):
        source.storage.read(last)


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_members_with_one_name_the_last_counts(tmp_path: Path, suffix: str) -> None:
    names = [*((name, b"x") for name in FOUR), ("./a/0.png", b"new")]
    link = member("b/1.png", kind=tarfile.SYMTYPE, target="0.png")
    if suffix == ".zip":
        file = write_zip(tmp_path / "images.zip", dict(names))
    else:
        file = write_tar(tmp_path / "images.tar", *(member(*name) for name in names), link, member("b/1.png", b"y"))
    found = contents(find(file))
    every = {path: data for split in found.values() for path, (_, data) in split.items()}
    assert every == {**dict.fromkeys(FOUR, b"x"), "a/0.png": b"new", "b/1.png": b"x" if suffix == ".zip" else b"y"}


def test_what_lies_beside_the_top_folder_is_not_taken_for_it(tmp_path: Path) -> None:
    file = write_tar(
        tmp_path / "images.tar",
        *(member(f"top/{name}", name.encode()) for name in FOUR),
        member("a/0.png", kind=tarfile.SYMTYPE, target="top/a/0.png"),
        member("top/a/2.png", kind=tarfile.SYMTYPE, target="0.png"),
    )
    source = find(file)
    assert set(reasons(source)) == {"../a/0.png", "a/2.png"}
    assert set(paths(source)) == {*FOUR, "../a/0.png", "a/2.png"}


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_an_empty_class_folder_counts_and_names_may_be_deep_and_odd(tmp_path: Path, suffix: str) -> None:
    odd = os.fsdecode(b"a/caf\xe9.png") if suffix == ".tar" else "a/ü.png"  # names of a tar need not be Unicode
    names = [f"a/{'d/' * 2000}0.png", odd, "a/1.png", "b/0.png", "b/1.png", "b/x", "b/x/y.png"]
    file = tmp_path / f"images{suffix}"
    if suffix == ".tar":
        write_tar(file, *(member(name, b"x") for name in names))
    else:
        of_names(file, *names)
    assert paths(find(file)) == sorted(names)
    with refuses("too-few-images"):
        find(of_names(file, *(name for name in names if name != odd), "none/"))


def test_archives_that_are_none_or_damaged(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    for suffix in (*MODES, ".zip"):
        file = tmp_path / f"x{suffix}"
        for data in (b"", b"no archive", archive(file, root).read_bytes()[: 600 if suffix == ".tar" else -2000]):
            file.write_bytes(data)
            with refuses("damaged-archive"):
                find(file, tmp_path / "scratch")
        if suffix not in (".tar", ".tgz"):
            with refuses("other-archive-kind", says=f"x.tar is no tar but a {suffix} file"):
                find(archive(file, root).rename(tmp_path / "x.tar"))
    whole = archive(tmp_path / "y.tar", root).read_bytes()
    with tarfile.open(tmp_path / "y.tar") as packed:
        second = packed.getmembers()[1].offset
    (tmp_path / "y.tar").write_bytes(whole[:second] + b"\xff" * 512 + whole[second + 512 :])
    with refuses("damaged-archive", says=f"is damaged at byte {second}"):
        find(tmp_path / "y.tar")
    data = bytearray(archive(tmp_path / "x.zip", root).read_bytes())
    data[data.index(b"PK\x01\x02") + 6] = 102  # of a version to come
    (tmp_path / "x.zip").write_bytes(data)
    with refuses("damaged-archive"):
        find(tmp_path / "x.zip")
    whole = of_names(tmp_path / "x.tar", *FOUR).read_bytes()
    for name in FOUR[:2]:  # whose header does not fit its checksum
        (tmp_path / "x.tar").write_bytes(whole.replace(name.encode(), b"b/7.png"))
        with refuses("damaged-archive"):
            find(tmp_path / "x.tar")


def test_an_archive_that_fills_the_disk_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = archive(tmp_path / "x.tar.gz", two_classes(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12, 10**8))
    with refuses("disk-full"):
        find(file, tmp_path / "scratch")


def test_zst_needs_a_decompressor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = archive(tmp_path / "x.tar", two_classes(tmp_path))
    (tmp_path / "x.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with refuses("missing-package"):
        find(tmp_path / "x.tar.zst", tmp_path / "scratch")

    class Zstandard:
        @staticmethod
        def open(path: Path, mode: str) -> Any:
            assert (path, mode) == (tmp_path / "x.tar.zst", "rb")
            return unpacked.open("rb")

    monkeypatch.setitem(sys.modules, "zstandard", Zstandard)
    assert find(tmp_path / "x.tar.zst", tmp_path / "scratch").classes == ("a", "b")


MANY = 400 << 20


def header(kind: bytes, size: int, name: str = "a/0.png") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def pax_record(key: str, value: str) -> bytes:
    text = f" {key}={value}\n".encode()
    return f"{len(text) + len(str(len(text) + 2))}".encode() + text


PAX_SPARSE = pax_record("GNU.sparse.major", "1") + pax_record("GNU.sparse.minor", "0")
FILE = header(tarfile.REGTYPE, 512)
BOMBS = {
    "GNU long name": header(tarfile.GNUTYPE_LONGNAME, MANY),
    "GNU long link": header(tarfile.GNUTYPE_LONGLINK, MANY),
    "PAX header": header(tarfile.XHDTYPE, MANY),
    "global PAX header": header(tarfile.XGLTYPE, MANY),
    "PAX sparse map": header(tarfile.XHDTYPE, len(PAX_SPARSE))
    + PAX_SPARSE.ljust(512, b"\0")
    + header(tarfile.REGTYPE, MANY),
    "chain of long names": (header(tarfile.GNUTYPE_LONGNAME, 2) + b"a\0".ljust(512, b"\0")) * 2000,
    "long names": b"".join(
        header(tarfile.GNUTYPE_LONGNAME, 1 << 16)
        + f"\U0001f600/{number}/".encode().ljust((1 << 16) - 1, b"a")
        + b"\0"
        + FILE.ljust(1024, b"\0")
        for number in range(100)
    ),
    "list of classes": b"".join(header(tarfile.REGTYPE, 0, f"{folder}/{n}.png") for folder in "ab" for n in range(2))
    + header(tarfile.REGTYPE, MANY, "LOC_synset_mapping.txt"),
    "large member": header(tarfile.REGTYPE, 1 << 40),
    "negative size": FILE[:124] + b"\xff" * 12 + FILE[136:],
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_tar_of_a_few_kilobytes_costs_no_memory(tmp_path: Path, name: str) -> None:
    """It claims to hold 400 MB and more; listing it, and reading what is listed, takes next to nothing."""
    file = tmp_path / "x.tar"
    file.write_bytes(BOMBS[name])
    os.truncate(file, MANY + (1 << 20))  # a hole, which takes a block of the disk
    with peak_below(10_000_000), pytest.raises((UserError, Unreadable)):
        read_sample((source := find(file)).storage, source.splits["train"][0])


def test_too_many_members_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix, limit in (
        (".tar", "tars._MAX_MEMBERS"),
        (".tar.gz", "tars._MAX_PACKED_MEMBERS"),
        (".tar.gz", "tars._FEW_MEMBERS"),
        (".zip", "zips._MAX_DIRECTORY_BYTES"),
        (".zip", "zips._MAX_MEMBERS"),
        (".tar", "folders._MAX_KEPT_BYTES"),
        (".zip", "folders._MAX_KEPT_BYTES"),
    ):
        with monkeypatch.context() as patch, refuses("too-many-members"):
            patch.setattr(f"components.preprocess.sources.{limit}", 3)
            find(of_names(tmp_path / f"images{suffix}", *FOUR), tmp_path / "scratch")
    monkeypatch.setattr("components.preprocess.sources.folders._MAX_NAME_CHARACTERS", 1 << 22)
    with refuses("too-many-folders"):
        find(write_tar(tmp_path / "x.tar", *(member(f"{number}/{'d/' * 2_000}0.png") for number in range(4))))


def test_a_member_has_few_headers(tmp_path: Path) -> None:
    """Each takes as long to read as a member."""
    name = header(tarfile.GNUTYPE_LONGNAME, 8) + b"a/9.png".ljust(512, b"\0")
    rest = of_names(tmp_path / "x.tar", *FOUR).read_bytes()
    (tmp_path / "x.tar").write_bytes(name * 4 + rest)
    assert "a/9.png" in paths(find(tmp_path / "x.tar"))
    (tmp_path / "x.tar").write_bytes(name * 5 + rest)
    with refuses("damaged-archive"):
        find(tmp_path / "x.tar")


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_paths_are_as_long_as_linux_has_them(tmp_path: Path, suffix: str) -> None:
    longest = f"a/{'é' * 2045}.png"
    assert longest in paths(find(of_names(tmp_path / f"images{suffix}", longest, *FOUR)))
    with refuses("damaged-archive"):
        find(of_names(tmp_path / f"images{suffix}", f"a/{longest}", *FOUR))


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.xz", ".tar.bz2"])
def test_a_compressed_bomb_is_given_up_before_it_fills_the_disk(tmp_path: Path, monkeypatch, suffix: str) -> None:
    monkeypatch.setattr("components.preprocess.sources.tars._MIN_BOMB_BYTES", 1 << 20)
    monkeypatch.setattr("components.preprocess.sources.tars._CHUNK_BYTES", 1 << 18)
    file = write_tar(tmp_path / f"x{suffix}", member("a/0.png", bytes(4 << 20)))
    with refuses("archive-too-large"):
        find(file, tmp_path / "scratch")
    assert sum(left.stat().st_size for left in (tmp_path / "scratch").iterdir()) <= 1 << 20


def test_xz_files_of_several_streams_and_of_a_large_dictionary(tmp_path: Path) -> None:
    whole = archive(tmp_path / "x.tar", two_classes(tmp_path)).read_bytes()
    file = tmp_path / "x.tar.xz"
    file.write_bytes(lzma.compress(whole[:700]) + bytes(4) + lzma.compress(whole[700:]) + bytes(8))
    assert contents(find(file, tmp_path / "scratch")) == contents(find(tmp_path / "x.tar"))
    body = bytearray(lzma.compress(bytes(1 << 16), format=lzma.FORMAT_XZ, check=lzma.CHECK_NONE))
    body[body.index(b"\x21\x01") + 2] = 39  # LZMA2's filter, one byte of properties: a dictionary of 3 GiB
    end = 12 + (body[12] + 1) * 4
    body[end - 4 : end] = zlib.crc32(body[12 : end - 4]).to_bytes(4, "little")
    file.write_bytes(body)
    with refuses("damaged-archive", says="Memory usage limit exceeded"):
        find(file, tmp_path / "scratch")


@pytest.mark.parametrize(
    "names",
    [
        ("train-000.tar", "train-001.tar", "val-000.tar"),
        ("train/0.tar", "train/1.tar", "validation/0.tar"),
        ("pets-train-0.tar", "pets-train-1.tar", "pets-validation-0.tar"),
        ("pets_0.tar", "pets_1.tar", "pets_val_0.tar"),
    ],
)
def test_webdataset_tars_with_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name, labels, first in zip(names, (["0", "2"], ["1", "0\n"], ["2"]), (0, 2, 4), strict=True):
        write_shard(tmp_path / "shards" / name, shard(labels, first))
    source = find(tmp_path / "shards")
    assert source.classes == ("0", "1", "2")
    labels = ((names[0], 0, "0"), (names[0], 1, "2"), (names[1], 2, "1"), (names[1], 3, "0"))
    assert contents(source) == {
        "train": {f"{tar}/00{number}.jpg": (label, f"image {number}".encode()) for tar, number, label in labels},
        "val": {f"{names[2]}/004.jpg": ("2", b"image 4")},
    }


def test_webdataset_tars_without_splits_are_split_by_class(tmp_path: Path) -> None:
    write_shard(tmp_path / "shards" / "a.tar", shard(["cat"] * 8 + ["dog"] * 2))
    write_shard(tmp_path / "shards" / "b.tar", shard(["dog"] * 6, 10, "png"))
    source = find(tmp_path / "shards")
    assert source.classes == ("cat", "dog")
    for split, counts in (("train", [6, 6]), ("val", [2, 2])):
        assert [sum(sample.label == label for sample in source.splits[split]) for label in (0, 1)] == counts
    assert find(tmp_path / "shards") == source


def test_one_webdataset_tar_and_folders_within_it(tmp_path: Path) -> None:
    members = {"x/0.seg.png": "mask", "x/0.json": "{}", "._x.jpg": "junk", "__MACOSX/0.jpg": "junk"}
    for folder in ("x", "y"):
        for number in range(4):
            members |= {f"{folder}/{number}.jpg": f"{folder}{number}", f"{folder}/{number}.cls": str(number % 2)}
    found = contents(find(write_shard(tmp_path / "images.tar", members)))
    expected = {f"{f}/{n}.jpg": (str(n % 2), f"{f}{n}".encode()) for f in "xy" for n in range(4)}
    assert found["train"] | found["val"] == expected


@pytest.mark.parametrize("where", ["class_names_file", "classes.txt"])
@pytest.mark.parametrize("one", [True, False])
def test_names_of_integer_labels(tmp_path: Path, where: str, one: bool) -> None:
    folder = tmp_path / "shards"
    tar = write_shard(folder / "0.tar", shard(["0", "0", "1", "1", "3"]))
    names = (tmp_path if where == "class_names_file" else folder) / "classes.txt"
    names.write_text("tench\nbird\nshark\n")
    source = find(tar if one else folder, **({where: str(names)} if where == "class_names_file" else {}))
    assert source.classes == ("tench", "bird", "shark")
    assert list(reasons(source).values()) == ["its label 3 is not below 3"]
    assert sorted(sample.label for sample in source.splits["val"]) == [0, 1]


def test_images_without_a_usable_label_are_refused_and_nothing_else(tmp_path: Path) -> None:
    members = shard(["0", "0", "1", "1", "dog", "-1", "", "99999999999999999999", "1" * 2000, "1000000"])
    members |= {"alone.jpg": "image", "b.cls": "1", "b.gif": "no kind that is read"}
    tar = write_shard(tmp_path / "images.tar", members)
    with tarfile.open(tar, "a") as packed:
        packed.addfile(member("link.jpg", kind=tarfile.SYMTYPE, target="/etc/passwd")[0])
    source = find(tar)
    assert source.classes == ("0", "1")
    assert reasons(source) == {
        "004.jpg": "its label 'dog' is no integer from 0",
        "005.jpg": "its label '-1' is no integer from 0",
        "006.jpg": "its .cls file is empty or too long",
        "007.jpg": "its label 99999999999999999999 is not below 2",
        "008.jpg": "its .cls file is empty or too long",
        "009.jpg": "its label 1000000 is not below 2",
        "alone.jpg": "no .cls file with its label",
        "link.jpg": IRREGULAR,
    }
    assert len(paths(source)) == 12
    (tmp_path / "names.txt").write_text("dog\ncat\n")
    tar = write_shard(tmp_path / "x.tar", shard(["cat", "cat", "dog", "dog", "eel", "7"]))
    source = find(tar, class_names_file=str(tmp_path / "names.txt"))
    assert source.classes == ("dog", "cat")
    names = {"004.jpg": "its label 'eel' is no class name", "005.jpg": "its label '7' is no class name"}
    assert reasons(source) == names


def test_folders_of_tars_that_cannot_be_used(tmp_path: Path) -> None:
    good = shard(["0", "0", "1", "1"])
    write_shard(tmp_path / "a" / "val-0.tar", good)
    write_shard(tmp_path / "b" / "n01440764.tar", {"n01440764_1.JPEG": "image"})
    write_shard(tmp_path / "c" / "0.tar", shard(["0", "0"]))
    write_shard(tmp_path / "d" / "0.tar", shard(["0", "0", "1"]))
    write_shard(tmp_path / "e" / "0.tar", good)
    (tmp_path / "e" / "1.tar").write_bytes(b"broken")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "0.tar").symlink_to(write_shard(tmp_path / "outside.tar", good))
    write_shard(tmp_path / "g" / "pets-train-0.tar", good)
    write_shard(tmp_path / "g" / "pets-test-0.tar", good)
    codes = ("missing-split", "no-labels", "too-few-classes", "too-few-images", "damaged-archive", "unreadable-file")
    for name, code in zip("abcdefg", (*codes, "test-tars"), strict=True):
        with refuses(code):
            find(tmp_path / name)
    for name in ("testing-0", "eval-0", "pets-holdout-0", "dev-0", "Test/0"):
        write_shard(tmp_path / name.lower() / "train" / "0.tar", good)
        write_shard(tmp_path / name.lower() / f"{name}.tar", good)
        with refuses("test-tars"):
            find(tmp_path / name.lower())
    write_shard(
        tmp_path / "h" / "0.tar", {f"{split}/{key}": text for split in ("train", "val") for key, text in good.items()}
    )
    with refuses("splits-as-classes"):
        find(tmp_path / "h")
    (tmp_path / "e" / "1.tar").rename(tmp_path / "e" / ".1.tar")  # hidden
    assert find(tmp_path / "e").classes == ("0", "1")
    root = two_classes(tmp_path)
    write_shard(root / "stray.tar", good)
    assert find(root).classes == ("a", "b")
