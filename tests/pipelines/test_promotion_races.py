"""Promotions at once, killed ones, killed servers: real processes on SQLite, a server on it, and PostgreSQL."""

import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient

from components.common.registry.audit_log import AuditLog, champions, expected_aliases
from components.common.registry.model_registry import Registry
from components.common.registry.promotions import CHAMPION
from enginery.registry.audit import trace
from tests.processes import start_python

from .servers import door, free_port, postgresql, server, stop


def promoter(uri: str, folder: Path, names: Sequence[str]) -> subprocess.Popen[str]:
    """A process that promotes versions of the folder's model one after the other; "a-070" has a top-1 of 70 %."""
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
    words = ("-m", "tests.unit.registered", uri, folder, folder.name, *names)
    return start_python(*words, env=limits, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def registry_at(uri: str) -> Registry:
    return Registry(MlflowClient(tracking_uri=uri, registry_uri=uri))


@contextmanager
def watched(registry: Registry, model: str) -> Iterator[list[str]]:
    """Every champion that a reader of the alias can see meanwhile, in order."""
    seen: list[str] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            number = registry.aliases(model).get(CHAMPION)
            if number is not None and seen[-1:] != [number]:
                seen.append(number)
            time.sleep(0.1)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def check(registry: Registry, model: str, seen: Sequence[str], *, best_of: Sequence[str] | None = None) -> None:
    """No decision made the champion worse, the log explains every alias, and the best that was promoted is champion."""
    top1 = {version.number: float(version.tags["score_pct"]) for version in registry.versions(model)}
    entries = AuditLog(registry.client, model).read()
    assert expected_aliases(entries, registry.run_ids(model)) == registry.aliases(model)
    assert trace(registry, model).problems == ()
    assert [entry.number for entry in entries] == list(range(1, len(entries) + 1))
    past = [top1[number] for number in champions(entries)]
    assert past == sorted(past)
    assert set(seen) <= set(champions(entries))
    for entry in entries:
        comparison = entry.change.comparison
        if comparison is not None and CHAMPION in entry.change.changes:
            before = entry.change.changes[CHAMPION].before
            assert before == comparison.champion_version  # it was decided against the one that it replaced
            assert comparison.champion_score_pct == top1[before]
    if best_of is not None:
        assert top1[registry.aliases(model)[CHAMPION]] == max(float(name[-3:]) for name in best_of)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("sqlite", marks=pytest.mark.slow),
        pytest.param("server", marks=pytest.mark.slow),
        pytest.param("postgresql", marks=pytest.mark.postgresql),
    ],
)
def uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store in a SQLite file, a server on one, and a server on PostgreSQL."""
    folder, port = tmp_path_factory.mktemp("store"), free_port()
    if request.param == "sqlite":
        store = f"sqlite:///{folder / 'mlflow.db'}"
        MlflowClient(tracking_uri=store).search_experiments(max_results=1)  # makes the tables
        yield store
        return
    with ExitStack() as stack:
        store = stack.enter_context(postgresql()) if request.param == "postgresql" else ""
        stack.enter_context(server(folder, port, store, workers=2))
        yield f"http://127.0.0.1:{port}"


# test_audit_log.py has each order of two changes, one process in place of the other.
def test_many_at_once(uri: str, tmp_path: Path) -> None:
    num_processes, num_rounds = 4, 10 if uri.startswith("sqlite") else 4
    registry, model, draw = registry_at(uri), tmp_path.name, random.Random(7)
    names = [
        [f"p{process}r{number}-{draw.randrange(50, 90):03d}" for number in range(num_rounds)]
        for process in range(num_processes)
    ]
    with watched(registry, model) as seen:
        running = [promoter(uri, tmp_path, own) for own in names]
        for process in running:
            text = process.communicate(timeout=300)[0]
            assert process.returncode == 0, text
    check(registry, model, seen, best_of=[name for own in names for name in own])
    assert len(registry.versions(model)) == num_processes * num_rounds
    promoted = [entry for entry in AuditLog(registry.client, model).read() if entry.change.kind == "promote"]
    assert len(promoted) == num_processes * num_rounds  # won or lost


@pytest.mark.parametrize(
    "uri",
    [pytest.param("sqlite", marks=pytest.mark.slow), pytest.param("postgresql", marks=pytest.mark.postgresql)],
    indirect=True,
)
def test_killed_in_the_middle(uri: str, tmp_path: Path) -> None:
    """Three that promote, of which one is killed at a random moment, again and again. Nobody waits for the dead."""
    registry, model, draw = registry_at(uri), tmp_path.name, random.Random(11)
    with watched(registry, model) as seen:
        for number in range(6 if uri.startswith("sqlite") else 3):
            names = [f"k{number}p{process}-{draw.randrange(50, 90):03d}" for process in range(3)]
            running = [promoter(uri, tmp_path, [name]) for name in names]
            for line in running[0].stdout:
                if "uploading" in line:
                    break
            time.sleep(draw.uniform(0.0, 1.0))
            running[0].send_signal(draw.choice((signal.SIGKILL, signal.SIGTERM)))
            for process in running[1:]:
                text = process.communicate(timeout=600)[0]
                assert process.returncode == 0, text
            running[0].communicate(timeout=600)
        assert promoter(uri, tmp_path, ["last-095"]).wait(600) == 0
    check(registry, model, seen, best_of=["last-095"])


def requests_of_a_promotion(folder: Path, port: int) -> int:
    """Number of pieces that a client sends to promote a version where there is a log and a champion."""
    counted = [0]
    with door(port, lambda number: counted.__setitem__(0, number), lambda: None) as entrance:
        for name in ("first-050", "second-051"):
            before = counted[0]
            done = promoter(f"http://127.0.0.1:{entrance}", folder, [name])
            text = done.communicate(timeout=300)[0]
            assert done.returncode == 0, text
    return counted[0] - before


@pytest.mark.slow
def test_the_server_is_killed_in_the_middle(tmp_path: Path) -> None:
    """kill -9 of the server at chosen requests, the alias' among them; with a new one, promote works again."""
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    with server(tmp_path, port):
        num_requests = requests_of_a_promotion(tmp_path, port)
    moments = sorted({*range(num_requests - 18, num_requests, 4), num_requests // 2})
    num_failed = 0
    for place, moment in enumerate(moments):
        with server(tmp_path, port) as process:

            def at(number: int, moment: int = moment, process: "subprocess.Popen[bytes]" = process) -> None:
                if number == moment:
                    stop(process)

            with door(port, at, lambda: None) as entrance:
                hit = promoter(f"http://127.0.0.1:{entrance}", tmp_path, [f"hit{place}-{60 + place:03d}"])
                text = hit.communicate(timeout=200)[0]
            if hit.returncode != 0:  # it is 0 where all that counts was done before
                assert "can't be reached any more" in text or "API request to" in text
                num_failed += 1
        with server(tmp_path, port):
            again = promoter(uri, tmp_path, [f"again{place}-{60 + place:03d}"])
            text = again.communicate(timeout=300)[0]
            assert again.returncode == 0, text
            registry = registry_at(uri)
            check(registry, tmp_path.name, [])
            assert registry.aliases(tmp_path.name)[CHAMPION] == registry.versions(tmp_path.name)[0].number
    assert num_failed >= 3, f"{num_failed} of {len(moments)}"
    shutil.rmtree(tmp_path / "files")
