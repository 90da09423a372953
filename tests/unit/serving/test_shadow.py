"""A challenger beside a real Triton: what is sampled and said, and what the champion never notices."""

import dataclasses
import itertools
import json
import os
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
import psutil
import pytest

from components.common.contracts.digests import digest_bytes
from components.common.runtimes.openvino import OpenVINORunner
from components.serve.shadow import KEYS, MAX_IMAGE_BYTES, SHADOW_VARIABLE, Sampler
from enginery.serving.installation import find_triton
from enginery.serving.repository import RepositoryConfig, write_repository
from enginery.serving.server import Ports, Server, shadow_socket
from enginery.serving.shadow import SampleListener, _local_model, open_challenger
from enginery.serving.shadow_record import read_record
from tests.processes import start_python
from tests.unit.registered import enginery, files, refuses, write_keys

from .conftest import NAME, Answer, Running, encoded, free_ports, suspended

SWAPPED = {"3": "8", "8": "3"}
NO_METRICS = "http://127.0.0.1:1/metrics"


@dataclass(kw_only=True)
class Champion(Running):
    """Its server, started in this process: the command is run by the other tests of servers."""

    server: Server


@pytest.fixture(scope="module")
def champion(triton, source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Champion]:
    """All its images may be sampled. What waits is not counted: its models are told a wrong address of its metrics."""
    folder = tmp_path_factory.mktemp("champion")
    repository = write_repository(source, folder / "models", RepositoryConfig(max_wait_s=60, shadow_share=1.0))
    ports = free_ports()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINERY_HOME", str(folder / "home"))
        patch.setattr(Ports, "own_metrics", NO_METRICS)
        server = Server.start(find_triton(), repository.path, Ports(**ports))
    try:
        server.wait_until_ready()
        yield Champion(server=server, process=server.process, log=folder / "serve.log", **ports)
    finally:
        server.kill()


@pytest.fixture(scope="module")
def challenger(source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network, which calls a 3 an 8, and an 8 a 3."""
    classes = tuple(SWAPPED.get(name, name) for name in source.bundle.manifest.classes)
    manifest = source.bundle.manifest.model_copy(update={"classes": classes})
    other = dataclasses.replace(source, bundle=dataclasses.replace(source.bundle, manifest=manifest))
    return write_repository(other, tmp_path_factory.mktemp("challenger") / "models", RepositoryConfig()).path


# An idle process would be the slowest of all. No test waits for an hour.
IN_PROCESS = ("--priority", "normal", "--requests", "20", "--minutes", "5")


def start_shadow(home: Path, challenger: Path, *options: object) -> subprocess.Popen[str]:
    # Beside other tests an idle process would never get to its turn.
    words = ("-m", "enginery.cli.main", "shadow", challenger, "--priority=normal", *options)
    return start_python(*words, env={"ENGINERY_HOME": str(home)}, stdout=subprocess.PIPE)


def wait_until_said(process: subprocess.Popen[str], start: str) -> None:
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(start):
            return
    raise AssertionError(said)


def ask_until_ends(process: subprocess.Popen[str], ask_once: Callable[[], object]) -> None:
    """Requests one after the other, with pauses: the challenger may have the processor in them."""
    while process.poll() is None:
        ask_once()
        time.sleep(0.05)


@contextmanager
def asked_meanwhile(home: Path, ask_once: Callable[[], Answer]) -> Iterator[None]:
    """Requests one after the other while the body runs a challenger in this process. All of them are answered."""
    is_over = threading.Event()

    def ask_all() -> None:
        while not is_over.wait(0.05):
            assert ask_once().status == 200

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setenv("ENGINERY_HOME", str(home))
        asking = pool.submit(ask_all)
        try:
            yield
        finally:
            is_over.set()
        asking.result()


def ask(running: Running, images: list[bytes], name: bytes) -> Answer:
    """A request with an id, which goes into the JSON as it is."""
    data = encoded(images)
    size = {"parameters": {"binary_data_size": len(data)}}
    tensor = {"name": "IMAGE", "datatype": "BYTES", "shape": [len(images), 1], **size}
    head = b'{"id": "%s", "inputs": [%s]}' % (name, json.dumps(tensor).encode())
    return running.post(NAME, head + data, {"Inference-Header-Content-Length": str(len(head))})


def labels_of(answer: Answer) -> list[str]:
    return answer.output("LABELS")[:: len(answer.output("LABELS")) // (answer.body["outputs"][0]["shape"][0])]


def test_what_differs_is_said_and_nothing_else_is_kept(champion, challenger, images, tmp_path: Path) -> None:
    home, output = champion.log.parent / "home", tmp_path / "shadow"
    private, _ = write_keys(tmp_path / "ci")
    process = start_shadow(home, challenger, "--requests", "120", "--output", output, "--json", "--key", private)
    wait_until_said(process, "the champion is digits 1")
    assert stat.S_IMODE((home / "shadow.sock").stat().st_mode) == 0o600
    assert champion.infer([b"no image"]).status == 400  # and is no sample
    expected, starts = {}, itertools.cycle(range(0, 120, 12))

    def ask_once() -> None:
        start = next(starts)
        for index, label in enumerate(labels_of(ask(champion, images[start : start + 12], b"r%d" % start))):
            digest = digest_bytes(images[start + index])
            expected[f"r{start}/{index}"] = (label, SWAPPED.get(label, label), digest)

    ask_until_ends(process, ask_once)  # what it had no time for was not sampled
    out, err = process.communicate()
    assert process.returncode == 0, err
    record = json.loads(out)
    assert record["champion"]["repository_digest"] != record["challenger"]["repository_digest"]
    assert record["num_seen"] >= 120

    answers = [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]
    assert all((a["champion"], a["challenger"], a["image_digest"]) == expected[a["id"]] for a in answers)
    found, swapped = record["comparison"], [a["champion"] for a in answers if a["champion"] in SWAPPED]
    assert found["num_compared"] == len(answers) == 120
    assert found["num_differing"] == len(swapped) > 0
    assert found["low_pct"] < 100 * len(swapped) / 120 < found["high_pct"]
    assert {(pair["champion"], pair["challenger"]): pair["num_images"] for pair in found["pairs"]} == {
        (label, SWAPPED[label]): swapped.count(label) for label in set(swapped)
    }
    assert found["speed"]["num_images"] == 120
    assert found["speed"]["low"] <= found["speed"]["ratio"] <= found["speed"]["high"]

    assert stat.S_IMODE(output.stat().st_mode) == 0o700
    assert stat.S_IMODE((output / "answers.jsonl").stat().st_mode) == 0o600
    assert sorted(files(output)) == ["answers.jsonl", "manifest.json", "shadow.dsse.json"]
    assert not (home / "shadow.sock").exists()

    # Labels come later: the champion was right, by the request's id or the image's digest.
    rows = [f"{name if n % 2 else digest},{label}\n" for n, (name, (label, _, digest)) in enumerate(expected.items())]
    (tmp_path / "labels.csv").write_text("".join(rows), encoding="utf-8-sig")  # as spreadsheets do
    done = enginery("shadow", output, "--labels", tmp_path / "labels.csv", "--output", tmp_path / "judged", "--json")
    judged = json.loads(done.stdout)
    assert (judged["ended"], judged["champion"]) == (record["ended"], record["champion"])
    assert judged["comparison"]["num_labelled"] == len(expected)
    right = judged["comparison"]["labelled"]
    assert (right["num_regressed"], right["num_improved"]) == (len(swapped), 0)
    assert right["high_points"] < 0
    assert right["mcnemar_p"] < 1e-3
    shown = enginery("shadow", output, "--labels", tmp_path / "labels.csv", "--output", tmp_path / "shown").output
    assert "labels differ on" in shown
    wrong = {"": "labels-invalid", "r0/0": "labels-invalid", "nobody,3": "no-label-fits", "r0/0,three": "no-label-fits"}
    for text, code in wrong.items():
        (tmp_path / "labels.csv").write_text(text)
        with refuses(code, "--labels"):
            enginery("shadow", output, "--labels", tmp_path / "labels.csv", "--output", tmp_path / "other")


def test_a_slow_or_killed_challenger_costs_the_champion_nothing(champion, challenger, images, tmp_path: Path) -> None:
    home = champion.log.parent / "home"
    expected = [labels_of(champion.infer([image])) for image in images[:20]]

    def answers_all(times: int) -> None:
        for _ in range(times):
            assert [labels_of(champion.infer([image])) for image in images[:20]] == expected

    process = start_shadow(home, challenger, "--output", tmp_path / "shadow", "--requests", "80", "--json")
    wait_until_said(process, "the champion is")
    with suspended(psutil.Process(process.pid)):
        large = images[0] + bytes(1_000_000)  # which no decoder minds, and far more than the socket holds
        assert [labels_of(champion.infer([large])) for _ in range(80)] == [expected[0]] * 80
    ask_until_ends(process, lambda: answers_all(1))
    record = json.loads(process.communicate()[0])
    assert record["num_dropped"] > 0
    assert record["comparison"]["num_compared"] == 80

    process = start_shadow(home, challenger, "--output", tmp_path / "killed")
    wait_until_said(process, "the champion is")
    answers_all(1)
    process.kill()
    process.wait()
    answers_all(2)
    assert (home / "shadow.sock").exists()
    process = start_shadow(home, challenger, "--output", tmp_path / "again", "--requests", "100", "--json")
    wait_until_said(process, "the champion is")
    with refuses("shadow-runs-already", SHADOW_VARIABLE), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINERY_HOME", str(home))
        enginery("shadow", challenger, "--output", tmp_path / "second")
    answers_all(2)
    wait_until_said(process, "10 of 100")
    process.send_signal(signal.SIGINT)
    assert 10 <= json.loads(process.communicate(timeout=600)[0])["comparison"]["num_compared"] <= 40
    assert not any(images[0] in data for data in files(home).values())


def test_a_challenger_that_another_server_runs(champion, served, source, exported, images, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{served.http}"
    home, options = champion.log.parent / "home", (*IN_PROCESS, "--output", tmp_path / "out", "--url", url)
    other = write_repository(dataclasses.replace(source, precision="fp32"), tmp_path / "fp32", RepositoryConfig())
    with asked_meanwhile(home, partial(champion.infer, images[:20])):
        with refuses("other-challenger-served", "--url"):
            enginery("shadow", other.path, *options)
        record = json.loads(enginery("shadow", exported.path, *options, "--json").stdout)
    assert record["asked"] == url
    found = record["comparison"]
    assert (found["num_compared"], found["num_differing"], found["speed"]) == (20, 0, None)


def test_ids_of_any_kind(champion, challenger, images, tmp_path: Path) -> None:
    names = itertools.cycle((b"", b"\xff\xc3", b"x" * 200_000, "a\u2028b".encode()))  # the last ends a line, as text
    with asked_meanwhile(champion.log.parent / "home", lambda: ask(champion, images[:1], next(names))):
        enginery("shadow", challenger, *IN_PROCESS, "--output", tmp_path / "out")
    found, answers = read_record(tmp_path / "out")
    assert {answer.id for answer in answers} == {"", "a\u2028b"}
    assert found.manifest.num_dropped == 0


def test_nothing_is_sampled_unless_it_was_exported_so(
    served, champion, exported, challenger, images, tmp_path: Path
) -> None:
    for model in ("digits", "digits_preprocess", "digits_labels"):
        assert KEYS not in (exported.path / model / "config.pbtxt").read_text()
    for home, setting in ((served, "--shadow-share"), (champion, "--minutes")):
        asked = asked_meanwhile(home.log.parent / "home", partial(served.infer, images[:1]))
        with asked, refuses("no-samples", setting):
            enginery("shadow", challenger, *IN_PROCESS, "--output", tmp_path / "out", "--minutes", "0.05")
    assert not (tmp_path / "out").exists()
    with refuses("output-exists", "--output"):
        enginery("shadow", challenger, "--output", tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_challenger_names_no_class_where_a_server_refuses(challenger, images, monkeypatch, value: float) -> None:
    logits = np.array([[value, *range(9)]], np.float32)
    monkeypatch.setattr(OpenVINORunner, "infer", lambda *_: logits)
    with _local_model(open_challenger(challenger)) as classify:
        assert classify(images[0]) == ""


def test_metrics_that_are_not_there_are_told(champion, images) -> None:
    """As where Triton was started with another port for them: nothing would be refused."""
    deadline = time.monotonic() + 600
    while not any(f"no bound on waiting requests: {NO_METRICS}" in line for line in champion.server.log):
        assert time.monotonic() < deadline, list(champion.server.log)
        assert champion.infer(images[:1]).status == 200


GREETING = {
    "champion": dict.fromkeys(("name", "version", "bundle_digest", "repository_digest"), "m") | {"precision": "int8"},
    "folder": "models",
}
IMAGE_HALF = {"key": 1, "id": "r", "seen": 7, "dropped": 2, "time": 1.0}


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b'"champion"',
        b"{}",
        json.dumps({**GREETING, "champion": "m"}).encode(),
        json.dumps({**GREETING, "folder": 5}).encode(),
        *(
            json.dumps({**IMAGE_HALF, "key": 2, "seen": 0, **wrong}).encode()
            for wrong in ({"key": []}, {"seen": float("inf")}, {"id": 5}, {"time": "now"})
        ),
        bytes(MAX_IMAGE_BYTES + 100_000),
    ],
    ids=range(13),
)
@pytest.mark.parametrize("is_greeted", [True, False])
def test_messages_that_no_server_sends(message: bytes, is_greeted: bool, tmp_path: Path) -> None:
    with SampleListener.at(tmp_path / "s", print) as listener, ThreadPoolExecutor() as pool:
        good, bad = (Client(str(tmp_path / "s")) for _ in range(2))
        with good, bad:
            for half in (GREETING, {"key": 3, "label": "a", "time": 1.0}, {"key": 2, "label": "a", "time": 1.0}):
                good.send_bytes(json.dumps(half).encode())
            if is_greeted:
                bad.send_bytes(json.dumps(GREETING).encode())
            sent = pool.submit(bad.send_bytes, message)
            found = []
            while not bad.poll():  # until it was ended
                found += listener.poll()
            assert sent.exception() is None or isinstance(sent.exception(), OSError)
            good.send_bytes(json.dumps({"key": 3, "label": "b", "time": 2.0}).encode())  # as by a client of the model
            good.send_bytes(json.dumps({**IMAGE_HALF, "key": 3}).encode() + b"\nimage")
            while not found:
                found += listener.poll()
        assert [(sample.id, sample.image, sample.label) for sample in found] == [("r", b"image", "b")]
        assert listener.count("seen") == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can be another account")
def test_another_account_gets_no_images(monkeypatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = Path("/tmp") / f"enginery-test-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
        "print('ready', flush=True); print(s.accept()[0].recv(9), flush=True)"
    )
    command = ["/usr/bin/python3", "-c", code, str(folder / "s")]
    stranger = subprocess.Popen(command, user=65534, stdout=subprocess.PIPE, text=True)
    try:
        assert stranger.stdout.readline() == "ready\n"
        monkeypatch.setenv(SHADOW_VARIABLE, str(folder / "s"))
        sampler = Sampler(1.0, {"name": "m"})
        assert stranger.stdout.readline() == "b''\n", "the connection ends without a word"
        assert not sampler.sample(lambda: "r", [b"image"]).any()
    finally:
        stranger.kill()
        stranger.wait()
        (folder / "s").unlink()
        folder.rmdir()


def test_mistakes(challenger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses("no-artifact"):
        enginery("shadow", tmp_path / "nothing", "--output", tmp_path / "out")
    with refuses("labels-unreadable", "--labels", says="name a CSV file"):
        enginery("shadow", challenger, "--labels", tmp_path / "none.csv", "--output", tmp_path / "out")
    monkeypatch.setenv(SHADOW_VARIABLE, str(tmp_path / ("s" * 120)))
    assert shadow_socket() == tmp_path / ("s" * 120)
    with refuses("cannot-listen", SHADOW_VARIABLE):
        enginery("shadow", challenger, "--output", tmp_path / "out")
