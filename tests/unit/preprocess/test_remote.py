"""Sources behind URIs: an in-memory store, real web servers, and what is said of drivers and credentials."""

import asyncio
import base64
import http.server
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.http import HTTPFileSystem

from components.common.contracts.errors import UserError
from components.common.data import places, web
from components.preprocess.sources import check_data_folder
from tests.conftest import preprocess
from tests.serving import QuietHandler, address_of, listening
from tests.unit.refusals import refuses

from .builders import archive, contents, find, listing, paths, reasons, shard, write_shard, write_tree

Store = Callable[[Path], str]


@pytest.fixture(autouse=True)
def _own_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_ATTEMPTS_S", (0.0, 0.0))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def store() -> Iterator[Store]:
    """Copies a folder into memory and gives its URI."""
    memory = fsspec.filesystem("memory")

    def upload(root: Path) -> str:
        for path in root.rglob("*"):
            if path.is_file():
                memory.pipe_file(f"/bucket/{root.name}/{path.relative_to(root)}", path.read_bytes())
        return f"memory://bucket/{root.name}"

    yield upload
    memory.rm("/", recursive=True)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "images", {"a": 4, "b": 5})


def write_table(root: Path, *more: str) -> str:
    """A table of the images below `root`, beside them."""
    rows = [f"{path.relative_to(root)},{path.parent.name}" for path in root.rglob("*.png")]
    (root / "t.csv").write_text("\n".join(["path,label", *rows, *more]), encoding="utf-8")
    return "t.csv"


@pytest.mark.parametrize("trees", [{"cat": 4, "dog": 5, "dog/x": 1}, {"train/a": 2, "train/b": 2, "val/a": 1}])
def test_folders_of_a_store_are_as_those_of_a_disk(tmp_path: Path, store: Store, trees: dict[str, int]) -> None:
    root = write_tree(tmp_path / "images", {**trees, ".hidden": 2})
    expected = find(root)
    for uri in (store(root), store(root) + "/", f"file://{root}"):
        source = find(uri, tmp_path / "scratch")
        assert (source.classes, source.splits) == (expected.classes, expected.splits)
        assert contents(source) == contents(expected)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_objects_whose_names_lead_out_of_their_folder(images: Path, store: Store) -> None:
    uri = store(images)
    memory = fsspec.filesystem("memory")
    memory.store["/bucket/images/a/../../x.png"] = memory.store["/bucket/images/a/000.png"]
    source = find(uri)
    assert reasons(source) == {"a/../../x.png": "a path out of the data folder"}
    assert len(paths(source)) == 10


@pytest.mark.parametrize(("name", "left"), [("x.tar", []), ("x.tar.gz", ["unpacked.tar"]), ("x.zip", ["x.zip"])])
def test_archives_of_a_store(tmp_path: Path, images: Path, store: Store, name: str, left: list[str]) -> None:
    archive(tmp_path / "up" / name, images, "images/")
    source = find(f"{store(tmp_path / 'up')}/{name}", tmp_path / "scratch")
    assert contents(source) == contents(find(images))
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == left


def test_webdataset_tars_of_a_store(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "shards"
    for number, name in enumerate(("train-0.tar", "train-1.tar", "val-0.tar")):
        write_shard(folder / name, shard(["0", "1", "0", "1"], 4 * number))
    (folder / "classes.txt").write_text("even\nodd\n")
    uri = store(folder)
    source = find(uri)
    assert source.classes == find(f"{uri}/train-0.tar").classes == ("even", "odd")
    assert contents(source) == contents(find(folder))
    assert contents(source)["val"]["val-0.tar/009.jpg"] == ("odd", b"image 9")


def test_a_table_of_a_store(images: Path, store: Store) -> None:
    expected = find(images)
    write_table(images, "memory://bucket/images/a/000.png,a")
    uri = f"{store(images)}/t.csv"
    source = find(uri, images.parent)
    assert contents(source) == contents(expected)
    assert source.splits == expected.splits  # sizes, too
    write_table(images, "memory://bucket/other/x.png,a")
    store(images)
    with refuses("outside-path"):
        find(uri, images.parent)


@pytest.mark.parametrize(
    ("labels", "code"), [(["SECRETCELL"], "too-few-classes"), (["other", "other", "SECRETCELL"], "too-few-images")]
)
@pytest.mark.parametrize("name", ["t.csv", "x.tar"])
def test_no_message_shows_fetched_labels(tmp_path: Path, store: Store, name: str, labels: list[str], code: str) -> None:
    (tmp_path / "up").mkdir()
    rows = [f"{number}.png,{label}" for number, label in enumerate(labels)]
    (tmp_path / "up" / "t.csv").write_text("\n".join(["path,label", *rows]), encoding="utf-8")
    write_shard(tmp_path / "up" / "x.tar", shard(labels))
    with refuses(code) as caught:
        find(f"{store(tmp_path / 'up')}/{name}", tmp_path / "scratch")
    assert "SECRETCELL" not in str(caught.value)
    with refuses(code, says="class 'SECRETCELL'"):
        find(tmp_path / "up" / name, tmp_path / "scratch")
    (tmp_path / "up/classes.txt").write_text("SECRETCELL\nSECRETCELL\n")
    with refuses("duplicate-class-names", says="SECRETCELL"):
        find(tmp_path / "up" / "x.tar")
    with refuses("duplicate-class-names") as caught:
        find(f"{store(tmp_path / 'up')}/x.tar", tmp_path / "scratch")
    assert "SECRETCELL" not in str(caught.value)


@pytest.mark.parametrize("error", [PermissionError("403"), NotImplementedError(), FileNotFoundError()])
def test_a_table_of_a_store_that_lists_nothing(images: Path, store: Store, monkeypatch, error: Exception) -> None:
    write_table(images)
    uri = f"{store(images)}/t.csv"

    def ls(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", ls)  # every thread has its own
    source = find(uri, images.parent)
    assert {sample.size_bytes for samples in source.splits.values() for sample in samples} == {0}
    assert len(paths(source)) == 9
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", lambda *_, **__: pytest.fail("it was read"))
    for place, _ in (places.locate_file(uri), places.locate_file(str(images / "t.csv"))):
        with pytest.raises(places.Unreadable, match="more than a list may have"):
            place.read("t.csv", most_bytes=5)
    error = OSError("down")  # half of the sizes would make another plan than that of the other parts
    with refuses("unreadable-uri"):
        find(uri, images.parent)


class Handler(QuietHandler, http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and parts of files where the server is told to."""

    ranges = False
    status = 0  # of every answer, if any
    authorization = ""  # that a request must have

    def refused(self) -> bool:
        is_stranger = self.authorization and self.headers.get("Authorization") != self.authorization
        if code := self.status or (401 if is_stranger else 0):
            self.send_error(code)
        return bool(code)

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "") if self.ranges else ""
        if self.refused():
            return
        if not wanted:
            super().do_GET()
            return
        data = Path(self.translate_path(self.path)).read_bytes()
        start, end = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        part = data[start : end + 1]
        self.reply(206, part, {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"})

    def do_HEAD(self) -> None:
        if not self.refused():
            super().do_HEAD()


def serving(root: Path, **settings: Any) -> AbstractContextManager[str]:
    return address_of(partial(type("Configured", (Handler,), settings), directory=str(root)))


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip", "x.tar?download=1"])
def test_archives_of_a_web_server(tmp_path: Path, images: Path, name: str, ranges: bool) -> None:
    archive(tmp_path / "up" / name.partition("?")[0], images, "images/")
    with serving(tmp_path / "up", ranges=ranges) as uri:
        source = find(f"{uri}/{name}", tmp_path / "scratch")
        assert contents(source) == contents(find(images))
    in_place = name.startswith("x.tar") and "gz" not in name and ranges
    assert len(list((tmp_path / "scratch").iterdir())) == (0 if in_place else 1)


def test_worker_processes_read_from_a_web_server(tmp_path: Path, images: Path) -> None:
    archive(tmp_path / "up" / "x.tar", images)
    of_folder = preprocess(images, tmp_path / "of_folder")
    with serving(tmp_path / "up", ranges=True) as uri:
        of_server = preprocess(f"{uri}/x.tar", tmp_path / "of_server", num_workers=2)
    assert of_server.manifest.classes == of_folder.manifest.classes
    for split in ("train", "val"):
        assert listing(of_server, split) == listing(of_folder, split)


def test_a_table_of_a_web_server(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "top" / "im ages", {"a": 3, "b": 3})
    odd = root / "b" / "odd%20 #?ü.png"
    odd.write_bytes(b"odd")
    expected = contents(find(root))
    write_table(root)
    with serving(tmp_path / "top") as uri:
        table = f"{uri}/im%20ages/t.csv"
        source = find(table, tmp_path / "scratch")
        assert contents(source) == expected
        odd.unlink()
        gone = next(one for samples in source.splits.values() for one in samples if one.path.startswith("b/odd"))
        with pytest.raises(FileNotFoundError):
            source.storage.read(gone)
        write_table(root, f"{uri}/im%20ages/a/000.png,a", f"{uri}/other/x.png,b")
        with refuses("outside-path"):
            find(table, tmp_path / "scratch")


@pytest.mark.parametrize(
    ("status", "code"), [(404, "no-data"), (401, "no-permission"), (403, "no-permission"), (500, "unreadable-uri")]
)
@pytest.mark.parametrize("name", ["x.tar", "x.zip", "t.csv"])
def test_what_a_web_server_answers(tmp_path: Path, name: str, status: int, code: str) -> None:
    with serving(tmp_path, status=status) as uri, refuses(code, says=f"{uri}/{name}") as caught:
        find(f"{uri}/{name}", tmp_path / "scratch")
    assert ("NETRC" in str(caught.value)) == (code == "no-permission")
    with refuses("unreadable-uri"):  # the server is gone
        find(f"{uri}/{name}", tmp_path / "scratch")


def test_credentials_of_a_web_server_come_from_netrc(tmp_path: Path, images: Path, monkeypatch) -> None:
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    secret = "Basic " + base64.b64encode(b"me:secret").decode()
    archive(tmp_path / "x.tar", images)
    with serving(tmp_path, authorization=secret, ranges=True) as uri:
        netrc.write_text("machine elsewhere login me password secret\n")
        with refuses("no-permission"):
            find(f"{uri}/x.tar", tmp_path / "scratch")
        netrc.write_text("machine 127.0.0.1 login me password secret\n")
        assert contents(find(f"{uri}/x.tar", tmp_path / "scratch")) == contents(find(images))


def test_failed_reads_are_tried_again_and_end_as_os_errors(images: Path, store: Store, monkeypatch) -> None:
    source = find(store(images))
    sample = source.splits["train"][0]
    memory = fsspec.filesystem("memory")
    whole = memory.cat_file(f"/bucket/images/{sample.path}")
    failures: Iterator[Exception] = iter(())
    calls = []

    def cat_file(path: str, **_: Any) -> bytes:
        calls.append(path)
        if (failure := next(failures, None)) is not None:
            raise failure
        return whole

    monkeypatch.setattr(memory, "cat_file", cat_file)
    failures = iter((RuntimeError("driver's own"), OSError("broken pipe")))
    assert source.storage.read(sample) == whole
    assert len(calls) == 3
    failures = iter([RuntimeError("driver's own")] * 3)
    with pytest.raises(OSError, match="RuntimeError: driver's own"):
        source.storage.read(sample)
    failures = iter([PermissionError("no")] * 3)
    with pytest.raises(PermissionError):
        source.storage.read(sample)
    assert len(calls) == 3 + 3 + 1


@pytest.mark.parametrize("name", ["absent", "absent.tar", "absent.csv"])
def test_a_store_without_anything(tmp_path: Path, store: Store, name: str) -> None:
    with refuses("no-data"):
        find(f"memory://bucket/{name}", tmp_path / "scratch")


@pytest.mark.parametrize(
    ("uri", "code", "message"),
    [
        ("s4://bucket/images", "unknown-scheme", "s4"),
        ("ftp://host/x.tar", "unknown-scheme", "ftp"),
        ("data://text/csv,path", "unknown-scheme", "data"),
        ("http://host/images/", "unlisted-folder", "http://host/images/"),
        ("simplecache::s3://bucket/x", "chained-uri", "'::'"),
        ("http://me:secret@host/x.tar", "secret-in-uri", "http://***@host/x.tar holds a user, a password"),
        ("https://secret@host/x.tar", "secret-in-uri", "NETRC"),
        ("https://host/x.tar?key=secret", "secret-in-uri", ""),
        ("https://host/x.tar?v=1&t=secret-and-too-long", "secret-in-uri", ""),
        ("https://host/x.tar?secret-and-too-long-secret", "secret-in-uri", ""),
        ("s3://key:secret@bucket/x", "secret-in-uri", "AWS_ACCESS_KEY_ID"),
        ("https://b.s3.amazonaws.com/x.tar?X-Amz-Signature=secret", "secret-in-uri", "b.s3.amazonaws.com/x.tar"),
        ("github://org:repo@main/x.tar", "secret-in-uri", ""),
    ],
)
def test_uris_that_cannot_be_used(uri: str, code: str, message: str) -> None:
    with refuses(code, "data", says=message) as caught:
        check_data_folder(uri)
    assert "secret" not in str(caught.value)


def test_drivers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(scheme: str) -> None:
        raise ImportError(f"Install the driver of {scheme}")

    check_data_folder("memory://bucket/images")
    check_data_folder("http://host/x.tar?download=1")
    monkeypatch.setattr(places, "get_filesystem_class", absent)
    packages = {"s3": "s3fs", "gs": "gcsfs", "https": "aiohttp", "abfs": "adlfs", "sftp": "paramiko"}
    for scheme, package in packages.items():
        with refuses("missing-package") as caught:
            check_data_folder(f"{scheme}://host/x.tar")
        assert str(caught.value).endswith(f"pip install {package}")


CREDENTIALS = b'{"AccessKeyId": "AKIA0123", "SecretAccessKey": "of the metadata service", "Token": "t"}\n'


class Leading(Handler):
    """Redirects to `target`, and answers /long without end."""

    target = ""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.startswith("/long"):
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(bytes(1 << 16))
        self.reply(302, b"", {"Location": self.target})


def leading(target: str) -> AbstractContextManager[str]:
    return address_of(type("Configured", (Leading,), {"target": target}))


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "x.tar", "x.zip", "x.tar.gz"])
def test_a_redirect_into_the_inner_network_is_not_followed(tmp_path: Path, name: str, monkeypatch) -> None:
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / name).write_bytes(CREDENTIALS)
    asked: list[str] = []
    monkeypatch.setattr(Handler, "log_message", lambda self, *_: asked.append(self.path))
    with serving(tmp_path / "meta") as inner, leading(f"{inner}/{name}") as outer:
        with refuses("inner-address") as caught:
            find(f"{outer}/{name}", tmp_path / "scratch")
        assert asked == ["/" + name]  # of the redirect alone: nobody came to the inner server
        monkeypatch.setenv("ENGINERY_ALLOWED_NETWORKS", "10.0.0.0/8,127.0.0.1")
        HTTPFileSystem.clear_instance_cache()
        with pytest.raises(UserError) as allowed:
            find(f"{outer}/{name}", tmp_path / "scratch")
        assert len(asked) > 1
    for error in (caught, allowed):
        assert "AKIA" not in str(error.value)
        assert "SecretAccessKey" not in str(error.value)


@pytest.mark.parametrize(
    "target",
    ["http://169.254.169.254/latest/", "http://[::ffff:127.0.0.1]:1/x", "http://localhost:1/", "http://0.0.0.0/"],
)
def test_other_ways_inside(tmp_path: Path, target: str) -> None:
    with leading(target) as outer, refuses("inner-address"):
        find(f"{outer}/t.csv", tmp_path / "scratch")
    with refuses("inner-address"):  # also where it is named
        find("http://169.254.169.254/latest/meta-data/t.csv", tmp_path / "scratch")


@pytest.mark.parametrize("answers", [["both"], ["inner", "outer", "inner"]], ids=["mixed", "rebound"])
def test_a_name_whose_owner_leads_it_inside(tmp_path: Path, answers: list[str], monkeypatch) -> None:
    """127.0.0.2 plays a public server, whose name has an inner address, too, or has one when it is looked up first."""
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "t.csv").write_bytes(CREDENTIALS)
    asked: list[str] = []
    monkeypatch.setattr(Handler, "log_message", lambda self, *_: asked.append(self.server.server_address[0]))
    addresses = {"inner": ["127.0.0.1"], "outer": ["127.0.0.2"], "both": ["127.0.0.2", "127.0.0.1"]}
    real, lookups = socket.getaddrinfo, [*answers]

    def getaddrinfo(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        if host != "outer.example":
            return real(host, port, *rest, **options)
        found = addresses[lookups.pop(0) if len(lookups) > 1 else lookups[0]]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    public = web._real_address
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(web, "_real_address", lambda text: public("8.8.8.8" if text == "127.0.0.2" else text))
    monkeypatch.setenv("no_proxy", "*")
    with serving(tmp_path / "meta") as inner:
        port = int(inner.rpartition(":")[2])
        with listening(type("C", (Leading,), {"target": f"{inner}/t.csv"}), "127.0.0.2", port):
            answer = asyncio.run(_asked(f"http://outer.example:{port}/x.csv"))
    assert b"SecretAccessKey" not in answer
    assert len(set(asked)) == 1  # the public server or, where the name was an inner one's from the start, that one


async def _asked(uri: str) -> bytes:
    async with await web.open_session(named=uri, loop=asyncio.get_running_loop()) as session:
        try:
            async with session.get(uri) as answer:
                return await answer.read()
        except OSError as error:
            return str(error).encode()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", "public"),
        ("2600::1", "public"),
        ("64:ff9b::808:808", "public"),
        ("10.0.0.1", "private"),
        ("::1", "private"),
        ("fec0::1", "private"),
        ("::a00:1", "private"),
        ("5f00::1", "private"),
        ("64:ff9b::a00:1", "private"),
        ("169.254.169.254", "never"),
        ("fe80::1%eth0", "never"),
        ("::a9fe:a9fe", "never"),
        ("64:ff9b::a9fe:a9fe", "never"),
        ("64:ff9b:1::a9fe:a9fe", "never"),
        ("2002:a9fe:a9fe::1", "never"),
        ("168.63.129.16", "never"),
        ("192.0.0.192", "never"),
        ("100.100.100.200", "never"),
        ("fd00:ec2::254", "never"),
        ("fd20:ce::254", "never"),
        ("fd00:42::42", "never"),
        ("::ffff:0:a9fe:a9fe", "never"),
    ],
)
def test_addresses_by_what_they_may_lead_to(address: str, expected: str) -> None:
    """Private ones may be named; of those that hand out a cloud's credentials nobody may be asked."""
    real = web._real_address(address)
    found = "public" if web._is_public(real) else "never" if web._is_never_trusted(real) else "private"
    assert found == expected


@pytest.mark.parametrize(
    ("uri", "to", "allowed", "refused"),
    [
        ("http://169.254.169.254/t.csv", "", "", True),
        ("http://168.63.129.16/t.csv", "", "", True),
        ("http://10.1.2.3/t.csv", "", "", False),
        ("http://start.invalid/t.csv", "", "", False),
        ("http://start.invalid/t.csv", "http://start.invalid./x", "", False),
        ("http://start.invalid/t.csv", "http://inner.invalid/x", "", True),
        ("http://start.invalid/t.csv", "http://start.invalid@inner.invalid/x", "", True),
        ("http://start.invalid/t.csv", "http://inner.invalid/x", "10.0.0.0/8, Inner.invalid", False),
        ("http://start.invalid/t.csv", "http://10.1.2.3/x", "", True),
        ("http://start.invalid/t.csv", "http://169.254.169.254/x", "", True),
        ("http://start.invalid/t.csv", "http://10.1.2.3/x", "10.0.0.0/8", False),
    ],
)
def test_a_proxy_is_asked_for_nothing_inside(monkeypatch, uri: str, to: str, allowed: str, refused: bool) -> None:
    asked: list[str] = []

    class Proxy(QuietHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.reply(302 if to and self.path == uri else 200, b"", {"Location": to})

    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv("ENGINERY_ALLOWED_NETWORKS", allowed)
    with address_of(Proxy) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        answer = asyncio.run(_asked(uri))
    assert (b"ENGINERY_ALLOWED_NETWORKS" in answer) == refused, answer
    assert asked == ([uri] if to else []) + ([] if refused else [asked[-1]])


@pytest.mark.parametrize("text", ["10.0.0.0/99", "10.0.0.300", "a b", "http://host"])
def test_networks_that_are_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ENGINERY_ALLOWED_NETWORKS", text)
    with refuses("invalid-networks", "ENGINERY_ALLOWED_NETWORKS"):
        web._allowed()


def test_an_answer_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shutil.disk_usage(tmp_path)

    def free(folder: Path) -> Any:
        used = sum(file.stat().st_size for file in Path(folder).iterdir())
        return before._replace(free=(1 << 30) + (4 << 20) - used)

    monkeypatch.setattr(web, "MAX_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(places.shutil, "disk_usage", free)
    with leading("/") as outer:
        with pytest.raises(OSError, match="the answer has more than 1,048,576 bytes"):
            places.RemotePlace(outer).read("long.png")
        with refuses("disk-full"):
            find(f"{outer}/long.csv", tmp_path / "scratch")
