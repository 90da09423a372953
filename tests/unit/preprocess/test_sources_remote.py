"""Sources behind URIs: an in-memory store, real web servers, and what is said of drivers and credentials."""

import asyncio
import base64
import http.server
import io
import pickle
import shutil
import socket
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.http import HTTPFileSystem

from components.common.contracts.errors import EngineryError, UserError
from components.preprocess.sources import Source, Unreadable, check_data_folder, find_samples, locations, web

WriteTree = Callable[..., Path]


def find(data: str, scratch: Path, **options: Any) -> Source:
    scratch.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"val_fraction": 0.25, "seed": 0, "class_names_file": "", **options}
    return find_samples(data, scratch=scratch, **settings)


def contents(source: Source) -> dict[str, dict[str, tuple[int, bytes]]]:
    storage = pickle.loads(pickle.dumps(source.storage))
    return {
        split: {sample.path: (sample.label, storage.read(sample)) for sample in samples}
        for split, samples in source.splits.items()
    }


def sizes(source: Source) -> dict[str, int]:
    return {sample.path: sample.size_bytes for samples in source.splits.values() for sample in samples}


@pytest.fixture(autouse=True)
def _own_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "_ATTEMPTS_S", (0.0, 0.0))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """Copies a folder into memory and gives its URI."""
    memory = fsspec.filesystem("memory")

    def upload(root: Path) -> str:
        for path in root.rglob("*"):
            if path.is_file():
                memory.pipe_file(f"/bucket/{root.name}/{path.relative_to(root)}", path.read_bytes())
        return f"memory://bucket/{root.name}"

    yield upload
    memory.rm("/", recursive=True)


def pack(file: Path, root: Path) -> Path:
    if file.suffix == ".zip":
        with zipfile.ZipFile(file, "w") as packed:
            for path in root.rglob("*.png"):
                packed.write(path, path.relative_to(root))
    else:
        with tarfile.open(file, "w:gz" if file.suffix == ".gz" else "w") as packed:
            packed.add(root, "images")
    return file


def write_shard(file: Path, first: int) -> None:
    file.parent.mkdir(exist_ok=True)
    with tarfile.open(file, "w") as packed:
        for number in range(first, first + 4):
            for suffix, data in (("jpg", b"image %d" % number), ("cls", b"%d" % (number % 2))):
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = len(data)
                packed.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("trees", [{"cat": 4, "dog": 5, "dog/x": 1}, {"train/a": 2, "train/b": 2, "val/a": 1}])
def test_folders_of_a_store_are_as_those_of_a_disk(
    tmp_path: Path, write_tree: WriteTree, store: Callable[[Path], str], trees: dict[str, int]
) -> None:
    root = write_tree(tmp_path / "images", {**trees, ".hidden": 2})
    plain = find(str(root), tmp_path / "scratch")
    for uri in (store(root), store(root) + "/", f"file://{root}"):
        source = find(uri, tmp_path / "scratch")
        assert source.classes == plain.classes
        assert source.splits == plain.splits
        assert contents(source) == contents(plain)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_objects_whose_names_lead_out_of_their_folder(
    tmp_path: Path, write_tree: WriteTree, store: Callable[[Path], str]
) -> None:
    uri = store(write_tree(tmp_path / "images", {"a": 2, "b": 2}))
    memory = fsspec.filesystem("memory")
    memory.store["/bucket/images/a/../../x.png"] = memory.store["/bucket/images/a/000.png"]
    source = find(uri, tmp_path / "scratch")
    assert source.splits["train"][-1].path == "a/../../x.png"
    with pytest.raises(Unreadable, match="a path out of the data folder"):
        source.storage.read(source.splits["train"][-1])
    assert sum(map(len, source.splits.values())) == 5


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip"])
def test_archives_of_a_store(tmp_path: Path, write_tree: WriteTree, store: Callable[[Path], str], name: str) -> None:
    root = write_tree(tmp_path / "images", {"cat": 4, "dog": 5})
    plain = find(str(root), tmp_path / "scratch")
    (tmp_path / "up").mkdir()
    pack(tmp_path / "up" / name, root)
    source = find(f"{store(tmp_path / 'up')}/{name}", tmp_path / "scratch")
    assert source.classes == plain.classes
    assert contents(source) == contents(plain)
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == {
        "x.tar": [],
        "x.tar.gz": ["unpacked.tar"],
        "x.zip": ["x.zip"],
    }[name]


def test_webdataset_tars_of_a_store(tmp_path: Path, store: Callable[[Path], str]) -> None:
    write_shard(tmp_path / "shards" / "train-0.tar", 0)
    write_shard(tmp_path / "shards" / "train-1.tar", 4)
    write_shard(tmp_path / "shards" / "val-0.tar", 8)
    (tmp_path / "shards" / "classes.txt").write_text("even\nodd\n")
    uri = store(tmp_path / "shards")
    source = find(uri, tmp_path / "scratch")
    assert source.classes == ("even", "odd")
    assert contents(source) == contents(find(str(tmp_path / "shards"), tmp_path / "scratch"))
    assert contents(source)["val"]["val-0.tar/9.jpg"] == (1, b"image 9")
    one = find(f"{uri}/train-0.tar", tmp_path / "scratch")
    assert one.classes == ("even", "odd")
    assert contents(one)["train"].items() <= {f"{n}.jpg": (n % 2, b"image %d" % n) for n in range(4)}.items()


def test_a_table_of_a_store(tmp_path: Path, write_tree: WriteTree, store: Callable[[Path], str]) -> None:
    root = write_tree(tmp_path / "images", {"a": 3, "b": 3})
    plain = find(str(root), tmp_path / "scratch")
    paths = [path.relative_to(root).as_posix() for path in root.rglob("*.png")]
    prefixed = [f"memory://bucket/images/{path}" if path[0] == "a" else path for path in paths]
    rows = "\n".join(f"{shown},{path[0]}" for shown, path in zip(prefixed, paths, strict=True))
    (root / "table.csv").write_text(f"path,label\n{rows}\n")
    uri = store(root)
    source = find(f"{uri}/table.csv", tmp_path / "scratch")
    assert contents(source) == contents(plain)
    assert sizes(source) == sizes(plain)
    (root / "table.csv").write_text(f"path,label\n{rows}\nmemory://bucket/other/x.png,a\n")
    store(root)
    with pytest.raises(
        UserError, match=r"row 8 leads out of the table's folder.*write paths within memory://bucket/im"
    ):
        find(f"{uri}/table.csv", tmp_path / "scratch")


@pytest.mark.parametrize("error", [PermissionError("403"), NotImplementedError(), FileNotFoundError()])
def test_a_table_of_a_store_that_lists_nothing(
    tmp_path: Path,
    write_tree: WriteTree,
    store: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    rows = "".join(f"{path.relative_to(root)},{path.parent.name}\n" for path in root.rglob("*.png"))
    (root / "table.csv").write_text(f"path,label\n{rows}")
    uri = store(root)

    def ls(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", ls)  # every thread has its own
    source = find(f"{uri}/table.csv", tmp_path / "scratch")
    assert set(sizes(source).values()) == {0}
    assert len(sizes(source)) == 4
    monkeypatch.setattr("components.preprocess.sources.locations._ATTEMPTS_S", (0.0, 0.0))
    error = OSError("down")  # half of the sizes would make another plan than that of the other parts
    with pytest.raises(UserError, match=r"can't read .*: down; check the address and the network"):
        find(f"{uri}/table.csv", tmp_path / "scratch")


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and parts of files where the server is told to."""

    ranges = False
    status = 0  # of every answer, if any
    authorization = ""  # that a request must have

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "") if self.ranges else ""
        if self.status or self.is_stranger():
            self.send_error(self.status or 401)
        elif not wanted:
            super().do_GET()
        else:
            data = Path(self.translate_path(self.path)).read_bytes()
            start, end = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
            part = data[start : end + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
            self.end_headers()
            self.wfile.write(part)

    def is_stranger(self) -> bool:
        return bool(self.authorization) and self.headers.get("Authorization") != self.authorization

    def do_HEAD(self) -> None:
        if self.status or self.is_stranger():
            self.send_error(self.status or 401)
        else:
            super().do_HEAD()


@contextmanager
def listening(handler: Any) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def serving(root: Path, **settings: Any) -> AbstractContextManager[str]:
    return listening(partial(type("Configured", (Handler,), settings), directory=str(root)))


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip", "x.tar?download=1"])
def test_archives_of_a_web_server(tmp_path: Path, write_tree: WriteTree, name: str, ranges: bool) -> None:
    root = write_tree(tmp_path / "images", {"cat": 4, "dog": 5})
    plain = find(str(root), tmp_path / "scratch")
    (tmp_path / "up").mkdir()
    pack(tmp_path / "up" / name.partition("?")[0], root)
    with serving(tmp_path / "up", ranges=ranges) as uri:
        source = find(f"{uri}/{name}", tmp_path / "scratch")
        assert source.classes == plain.classes
        assert contents(source) == contents(plain)
    fetched = [path.name for path in (tmp_path / "scratch").iterdir()]
    in_place = name.startswith("x.tar") and "gz" not in name and ranges
    assert len(fetched) == (0 if in_place else 1)


def test_worker_processes_read_from_a_web_server(
    tmp_path: Path, write_tree: WriteTree, run_preprocess: Callable[..., Any], listing: Callable[..., Any]
) -> None:
    root = write_tree(tmp_path / "images", {"cat": 4, "dog": 5})
    (tmp_path / "up").mkdir()
    pack(tmp_path / "up" / "x.tar", root)
    of_folder = run_preprocess(root, tmp_path / "of_folder")
    with serving(tmp_path / "up", ranges=True) as uri:
        of_server = run_preprocess(f"{uri}/x.tar", tmp_path / "of_server")
    assert of_server.manifest.classes == of_folder.manifest.classes
    for split in ("train", "val"):
        assert listing(of_server, split) == listing(of_folder, split)


def test_a_table_of_a_web_server(tmp_path: Path, write_tree: WriteTree) -> None:
    root = write_tree(tmp_path / "top" / "im ages", {"a": 3, "b": 3})
    odd = root / "b" / "odd%20 #?ü.png"
    odd.write_bytes(b"odd")
    plain = find(str(root), tmp_path / "scratch")
    rows = "".join(f"{path.relative_to(root)},{path.parent.name}\n" for path in root.rglob("*.png"))
    (root / "t.csv").write_text(f"path,label\n{rows}", encoding="utf-8")
    with serving(tmp_path / "top") as uri:
        source = find(f"{uri}/im%20ages/t.csv", tmp_path / "scratch")
        assert contents(source) == contents(plain)
        odd.unlink()
        gone = next(s for samples in source.splits.values() for s in samples if s.path.startswith("b/odd"))
        with pytest.raises(FileNotFoundError):
            source.storage.read(gone)
        (root / "t.csv").write_text(f"path,label\n{uri}/im%20ages/a/000.png,a\n{uri}/other/x.png,b\n")
        with pytest.raises(UserError, match="row 3 leads out of the table's folder"):
            find(f"{uri}/im%20ages/t.csv", tmp_path / "scratch")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, "there is nothing at {}; check the spelling"),
        (401, r"no permission to read {} \(.*401.*\); give credentials in the environment: ~/\.netrc"),
        (403, r"no permission to read {} \(.*403.*\); give credentials in the environment: ~/\.netrc"),
        (500, "can't read {}: .*500.*; check the address and the network, then try again"),
    ],
)
@pytest.mark.parametrize("name", ["x.tar", "x.zip", "t.csv"])
def test_what_a_web_server_answers(tmp_path: Path, name: str, status: int, message: str) -> None:
    with (
        serving(tmp_path, status=status) as uri,
        pytest.raises(UserError, match=message.format(f"{uri}/{name}")),
    ):
        find(f"{uri}/{name}", tmp_path / "scratch")


def test_credentials_of_a_web_server_come_from_netrc(
    tmp_path: Path, write_tree: WriteTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    secret = "Basic " + base64.b64encode(b"me:secret").decode()
    pack(tmp_path / "x.tar", root)
    with serving(tmp_path, authorization=secret, ranges=True) as uri:
        netrc.write_text("machine elsewhere login me password secret\n")
        with pytest.raises(UserError, match=r"no permission to read .*x\.tar \(.*401"):
            find(f"{uri}/x.tar", tmp_path / "scratch")
        netrc.write_text("machine 127.0.0.1 login me password secret\n")
        source = find(f"{uri}/x.tar", tmp_path / "scratch")
        assert contents(source) == contents(find(str(root), tmp_path / "scratch"))


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with serving(tmp_path) as uri:
        pass
    with pytest.raises(UserError, match=f"can't read {uri}/x.tar: .*; check the address and the network"):
        find(f"{uri}/x.tar", tmp_path / "scratch")


def test_a_read_that_fails_once_is_tried_again_and_one_that_keeps_failing_is_an_os_error(
    tmp_path: Path, write_tree: WriteTree, store: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find(store(write_tree(tmp_path / "images", {"a": 2, "b": 2})), tmp_path / "scratch")
    sample = source.splits["train"][0]
    memory = fsspec.filesystem("memory")
    whole = memory.cat_file(f"/bucket/images/{sample.path}")
    failures = iter((RuntimeError("driver's own"), OSError("broken pipe")))
    calls = []

    def cat_file(path: str, **_: Any) -> bytes:
        calls.append(path)
        if (failure := next(failures, None)) is not None:
            raise failure
        return whole

    monkeypatch.setattr(memory, "cat_file", cat_file)
    assert source.storage.read(sample) == whole
    assert len(calls) == 3
    failures = iter([RuntimeError("driver's own")] * 3)
    with pytest.raises(OSError, match="RuntimeError: driver's own"):
        source.storage.read(sample)
    failures = iter([PermissionError("no")] * 3)
    calls.clear()
    with pytest.raises(PermissionError):
        source.storage.read(sample)
    assert len(calls) == 1


def test_a_store_without_anything(tmp_path: Path, store: Callable[[Path], str]) -> None:
    for uri in ("memory://bucket/absent", "memory://bucket/absent.tar", "memory://bucket/absent.csv"):
        with pytest.raises(UserError, match=f"there is nothing at {uri}; check the spelling"):
            find(uri, tmp_path / "scratch")


def test_drivers_schemes_and_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(scheme: str) -> None:
        raise ImportError(f"Install the driver of {scheme}")

    check_data_folder("memory://bucket/images")
    check_data_folder("http://host/x.tar?download=1")
    for uri, message in (
        ("s4://bucket/images", "has the scheme s4, which is not read; use a path, or a URI of file, s3, gs, http"),
        ("http://host/images/", "a web server lists no folders, so http://host/images/ can't be read as one"),
        ("simplecache::s3://bucket/x", "chains several with '::', which is not read"),
        ("http://me:secret@host/x.tar", r"http://\*\*\*@host/x.tar holds a user, a password.*fetched before \(~/"),
        ("https://secret@host/x.tar", "holds a user"),
        ("https://host/x.tar?key=secret", "holds a user"),
        ("https://host/x.tar?v=1&t=secret-and-too-long", "holds a user"),
        ("https://host/x.tar?secret-and-too-long-secret", "holds a user"),
        ("s3://key:secret@bucket/x", r"s3://\*\*\*@bucket/x holds a user.*\(AWS_ACCESS_KEY_ID"),
        ("https://b.s3.amazonaws.com/x.tar?X-Amz-Signature=secret", "https://b.s3.amazonaws.com/x.tar holds a user"),
        ("github://org:repo@main/x.tar", "holds a user"),
        ("ftp://host/x.tar", "has the scheme ftp, which is not read"),
        ("data://text/csv,path", "has the scheme data, which is not read"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            check_data_folder(uri)
        assert "secret" not in str(caught.value)
    monkeypatch.setattr("components.preprocess.sources.locations.get_filesystem_class", absent)
    for uri, package in (
        ("s3://b/x", "pip install s3fs"),
        ("gs://b/x", "pip install gcsfs"),
        ("https://host/x.tar", "pip install aiohttp"),
        ("abfs://b@account/x", "pip install adlfs"),
        ("sftp://me@host/x", "pip install paramiko"),
    ):
        with pytest.raises(UserError, match=rf"reading \w+:// needs a package that is not installed: {package}"):
            check_data_folder(uri)


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
        self.send_response(302)
        self.send_header("Location", self.target)
        self.end_headers()


def leading(target: str) -> AbstractContextManager[str]:
    return listening(type("Configured", (Leading,), {"target": target}))


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "x.tar", "x.zip", "x.tar.gz"])
def test_a_redirect_into_the_inner_network_is_not_followed(tmp_path: Path, name: str, monkeypatch) -> None:
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / name).write_bytes(CREDENTIALS)
    asked: list[str] = []
    monkeypatch.setattr(Handler, "log_message", lambda self, *_: asked.append(self.path))
    with serving(tmp_path / "meta") as inner, leading(f"{inner}/{name}") as outer:
        with pytest.raises(UserError, match=r"127\.0\.0\.1 port \d+ is no public address and not the one") as caught:
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
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:127.0.0.1]:1/x",
        "http://localhost:1/",
        "http://0.0.0.0/",
    ],
)
def test_other_ways_inside(tmp_path: Path, target: str) -> None:
    with leading(target) as outer, pytest.raises(UserError, match="no public address"):
        find(f"{outer}/t.csv", tmp_path / "scratch")


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
        twin = http.server.ThreadingHTTPServer(("127.0.0.2", port), type("C", (Leading,), {"target": f"{inner}/t.csv"}))
        threading.Thread(target=twin.serve_forever, daemon=True).start()
        try:
            told = asyncio.run(_asked(f"http://outer.example:{port}/x.csv"))
        finally:
            twin.shutdown()
            twin.server_close()
    assert b"SecretAccessKey" not in told
    assert len(set(asked)) == 1  # the public server or, where the name was an inner one's from the start, that one


async def _asked(uri: str) -> bytes:
    async with await web.open_session(named=uri, loop=asyncio.get_running_loop()) as session:
        try:
            async with session.get(uri) as answer:
                return await answer.read()
        except OSError as error:
            return str(error).encode()


def test_a_link_local_address_is_refused_even_where_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"169\.254\.169\.254 port 80 is no public address"):
        find("http://169.254.169.254/latest/meta-data/t.csv", tmp_path / "scratch")


def test_a_redirect_behind_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy answers in the place of every server; it may be anywhere, but nothing may lead inside."""
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("NO_PROXY")
    with leading("http://169.254.169.254/x.csv") as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(UserError, match=r"169\.254\.169\.254 port 80 is no public address"):
            find("http://example.invalid/t.csv", tmp_path / "scratch")


def test_an_answer_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shutil.disk_usage(tmp_path)

    def free(folder: Path) -> Any:
        used = sum(file.stat().st_size for file in Path(folder).iterdir())
        return before._replace(free=(1 << 30) + (4 << 20) - used)

    monkeypatch.setattr(web, "MAX_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(locations.shutil, "disk_usage", free)
    with leading("/") as outer:
        with pytest.raises(OSError, match="the answer has more than 1,048,576 bytes"):
            locations.RemotePlace(outer).read("long.png")
        (tmp_path / "scratch").mkdir()
        with pytest.raises(EngineryError, match=r"the disk of .* is too small for .*less than 1 GB is left"):
            find(f"{outer}/long.csv", tmp_path / "scratch")
