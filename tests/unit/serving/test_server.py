"""A real Triton on the CPU: the validated predictions, both protocols, and how it starts and ends."""

import json
import os
import shutil
import signal
import socket
import tarfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import BundleManifest, load
from components.common.data.dali_pipelines import ImageBatches
from components.common.data.evaluation import most_likely
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.selection import fit_model
from enginery.cli.commands import cli
from enginery.serving.installation import find_triton
from enginery.serving.server import Ports, Server
from tests.pipelines.servers import free_port

from .conftest import (
    NAME,
    Running,
    decoding_process,
    start_serving,
    suspended,
    wait_until_pending,
    wait_until_ready,
)


@pytest.fixture(scope="module")
def images(proved) -> list[bytes]:
    """Images of the validation split, in the order of its listing, from the shards themselves."""
    found = []
    for shard in proved.dataset.manifest.splits["val"].shards:
        with tarfile.open(proved.dataset.path / shard) as tar:
            found += [tar.extractfile(member).read() for member in tar if not member.name.endswith(".cls")]
    return found


def names_of(proved) -> list[list[str]]:
    """Labels that `validate` recorded, by image."""
    recorded = np.load(proved.parts["report"] / "predictions.npz")["int8"]
    return [[proved.dataset.manifest.classes[index] for index in row] for row in recorded]


def test_the_server_gives_the_validated_predictions_image_by_image(served, proved, images) -> None:
    """One request each from many threads, so that batches form as they come."""
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda image: served.infer([image]), images))
    assert [answer.output("LABELS") for answer in answers] == names_of(proved)
    assert len(answers) == 120


def test_the_server_gives_them_in_batches_too(served, proved, images) -> None:
    labels = []
    for start in range(0, len(images), 50):
        answer = served.infer(images[start : start + 50])
        labels += np.reshape(answer.output("LABELS"), (-1, 5)).tolist()
    assert labels == names_of(proved)


def test_pixels_and_probabilities_are_those_of_validation(served, proved, images) -> None:
    bundle = load(proved.parts["bundle"], BundleManifest)
    expected = ImageBatches(bundle.manifest.transform, 8).load(images[:8], list("abcdefgh"))
    pixels = served.infer(images[:8], f"{NAME}_preprocess").output("images")
    np.testing.assert_array_equal(np.array(pixels, np.float32).reshape(expected.shape), expected)  # bit for bit
    logits = OpenVINORunner(bundle.file(fit_model(bundle.manifest.cpu_models).file), bundle.manifest.shapes).infer(
        expected
    )
    answer = served.send("images", "FP32", list(expected.shape), expected.tobytes(), f"{NAME}_model")
    np.testing.assert_allclose(np.reshape(answer.output("logits"), logits.shape), logits, rtol=1e-5, atol=1e-5)
    shares = [most_likely(row, 5)[1] for row in logits]
    found = np.reshape(served.infer(images[:8]).output("PROBABILITIES"), (8, 5))
    np.testing.assert_allclose(found, shares, rtol=1e-4, atol=1e-6)


def test_health_metrics_and_what_is_served(served, exported) -> None:
    assert served.get("v2/health/live") == served.get("v2/health/ready") == b""
    parameters = json.loads(served.get(f"v2/models/{NAME}/config"))["parameters"]
    parameters = {key: value["string_value"] for key, value in parameters.items()}
    assert parameters["bundle_digest"] == exported.manifest.inputs["bundle"]
    assert (parameters["precision"], parameters["runtime"], parameters["version"]) == ("int8", "openvino", "1")
    metrics = served.get("metrics", served.metrics).decode()
    assert f'nv_inference_request_success{{model="{NAME}",version="1"}}' in metrics
    assert "nv_inference_queue_duration_us" in metrics
    text = served.log.read_text()
    # The first images go through the models before the server's metrics are there, and that is no warning.
    assert "no bound on waiting requests" not in text
    for line in (f"http://127.0.0.1:{served.http}\n", f"127.0.0.1:{served.grpc}\n", f":{served.metrics}/metrics\n"):
        assert line in text


def test_metrics_that_are_not_there_are_told(triton, exported, images, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Triton was started with another port for them: nothing would be refused."""
    monkeypatch.setattr(Ports, "own_metrics", "http://127.0.0.1:1/metrics")
    ports = Ports(http=free_port(), grpc=free_port(), metrics=free_port())
    server = Server.start(find_triton(), exported.path, ports)
    running = Running(process=server.process, http=ports.http, grpc=ports.grpc, metrics=ports.metrics, log=Path())
    try:
        server.wait_until_ready()
        deadline = time.monotonic() + 600
        while not any("no bound on waiting requests: http://127.0.0.1:1/metrics" in line for line in server.log):
            assert time.monotonic() < deadline, list(server.log)
            assert running.infer(images[:1]).status == 200
    finally:
        server.kill()


def test_a_damaged_repository_is_not_served(triton, exported, tmp_path: Path) -> None:
    folder = shutil.copytree(exported.path, tmp_path / "models")
    (folder / f"{NAME}_labels/1/model.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    running = start_serving(folder, tmp_path)
    assert running.process.wait(600) == 1
    assert "[file-damaged]" in running.log.read_text()
    assert not (tmp_path / "ran").exists()


def test_a_port_in_use_is_named(exported, triton) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(cli, ["serve", str(exported.path), "--grpc-port", str(port)])
    assert isinstance(result.exception, UserError)
    assert result.exception.code == "cannot-listen"
    assert f"127.0.0.1:{port}" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--http-port", "70000"], None),  # click's own refusal
        (["--grpc-port", "0"], None),
        (["--metrics-port", "8000"], "equal-ports"),
        (["--host", "no.such.host.invalid"], "cannot-listen"),
        (["--host", "a" * 300], "cannot-listen"),
        (["--host", ""], "cannot-listen"),
        (["--host", "192.0.2.1"], "cannot-listen"),  # of documentation, nobody's
    ],
)
def test_where_nobody_can_listen(exported, options, code) -> None:
    result = CliRunner().invoke(cli, ["serve", str(exported.path), *options])
    assert result.exit_code != 0
    assert getattr(result.exception, "code", None) == (code or 2)


NO_PROXY = {**dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9"), "no_proxy": ""}


def check_address(running: Running, address: str) -> None:
    """The server is where it says, though a proxy that leads nowhere is set."""
    from tritonclient import grpc

    assert f"http://{address}:{running.http}\n" in running.log.read_text()
    for port, path in ((running.http, "v2/health/ready"), (running.metrics, "metrics")):
        with urllib.request.urlopen(f"http://{address}:{port}/{path}", timeout=600) as response:
            assert response.status == 200
    assert grpc.InferenceServerClient(f"{address}:{running.grpc}").is_server_ready()


@pytest.mark.slow  # by name below; how an address becomes the server's in test_where_nobody_can_listen
def test_the_host_is_ipv6(triton, exported, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    running = start_serving(exported.path, tmp_path, "--host", "::1", **NO_PROXY)
    try:
        wait_until_ready(running)
        check_address(running, "[::1]")
    finally:
        running.process.terminate()
        running.process.wait(600)


def begun_then(number: int, running, images: list[bytes]) -> None:
    """Signal the command with requests in progress, and see everything of it end."""
    processes = psutil.Process(running.process.pid).children(recursive=True)
    assert any("tritonserver" in process.name() for process in processes)
    with ThreadPoolExecutor(12) as pool:
        with suspended(decoding_process(running)):  # two of them fill its batch, so that ten wait
            begun = [pool.submit(running.infer, images[:60]) for _ in range(12)]
            wait_until_pending(running, 10)
            running.process.send_signal(number)
        done = [request for request in begun if request.exception() is None]  # two may have come too late
    assert [request.result().status for request in done] == [200] * len(done)
    assert len(done) >= 10
    assert running.process.wait(600) == 0
    psutil.wait_procs(processes, timeout=60)
    assert [process for process in processes if process.is_running()] == []
    assert list(Path("/dev/shm").glob(f"enginery_{running.process.pid}_*")) == []
    assert "Traceback" not in running.log.read_text()


def test_sigterm_answers_what_has_begun(triton, promoted, images, tmp_path: Path) -> None:
    """The model comes from the registry, by its alias, into a folder that is gone afterwards, as a killed one's is."""
    left = tmp_path / "home/serve/left"
    (left / "models").mkdir(parents=True)
    os.utime(left, (0, 0))
    running = start_serving(f"{NAME}@candidate", tmp_path, MLFLOW_TRACKING_URI=promoted)
    try:
        wait_until_ready(running)
        begun_then(signal.SIGTERM, running, images)
    finally:
        running.process.kill()
    assert list((tmp_path / "home/serve").iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_answers_what_has_begun(triton, exported, images, tmp_path: Path) -> None:
    running = start_serving(exported.path, tmp_path)
    try:
        wait_until_ready(running)
        begun_then(signal.SIGINT, running, images)
    finally:
        running.process.kill()


def test_nothing_is_left_of_a_killed_triton(triton, exported, images, tmp_path: Path) -> None:
    """Under load: its models are then telling it things. Until then it is known by the name of its host."""
    running = start_serving(exported.path, tmp_path, "--host", "localhost", **NO_PROXY)
    try:
        wait_until_ready(running)
        check_address(running, "127.0.0.1")
        processes = psutil.Process(running.process.pid).children(recursive=True)
        server = next(process for process in processes if "tritonserver" in process.name())
        with ThreadPoolExecutor(8) as pool:
            begun = [pool.submit(running.infer, images[:1]) for _ in range(400)]
            begun[200].result()
            server.kill()
            pool.shutdown(cancel_futures=True)
        _, left = psutil.wait_procs(processes, timeout=60)
        assert left == []
        assert running.process.wait(600) == 1
    finally:
        running.process.kill()


@pytest.mark.slow
def test_the_server_ends_with_its_killed_parent(triton, exported, tmp_path: Path) -> None:
    running = start_serving(exported.path, tmp_path)
    try:
        wait_until_ready(running)
        processes = psutil.Process(running.process.pid).children(recursive=True)
    finally:
        running.process.kill()
    _, left = psutil.wait_procs(processes, timeout=60)
    assert left == []
    running.process.wait()
    again = start_serving(exported.path, tmp_path)
    try:
        wait_until_ready(again)
        assert list(Path("/dev/shm").glob(f"enginery_{running.process.pid}_*")) == []  # what the killed one left
    finally:
        os.kill(again.process.pid, signal.SIGTERM)
        again.process.wait(600)
