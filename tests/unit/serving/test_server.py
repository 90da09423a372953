"""A real Triton on the CPU: the validated predictions, both protocols, and how it starts and ends."""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from tritonclient import grpc

from components.common.contracts.manifests import BundleManifest, load
from components.common.data.dali_pipelines import ImageBatches
from components.common.data.evaluation import most_likely
from components.common.registry.keys import signing_key
from components.common.registry.trust import VERDICT, sign_verdict
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.selection import fit_model
from enginery.serving.installation import HOME_VARIABLE, find_triton
from enginery.serving.repository import RepositoryConfig, write_repository
from enginery.serving.server import Ports, Server
from tests.unit.registered import enginery, refuses, write_keys
from tests.waiting import wait_until

from .conftest import (
    NAME,
    Running,
    encoded,
    free_ports,
    kept_busy,
    metrics,
    serving,
    start_serving,
    wait_until_pending,
    wait_until_ready,
)


def test_the_server_gives_the_validated_predictions(served, proved, images) -> None:
    """Image by image from many threads, so that batches form as they come, and several in one request."""
    recorded = np.load(proved.parts["report"] / "predictions.npz")["int8"]
    names = [[proved.dataset.manifest.classes[index] for index in row] for row in recorded]
    with ThreadPoolExecutor(16) as pool:
        alone = [answer.output("LABELS") for answer in pool.map(lambda image: served.infer([image]), images)]
    batches = [served.infer(images[start : start + 50]).output("LABELS") for start in range(0, len(images), 50)]
    together = [labels for batch in batches for labels in np.reshape(batch, (-1, 5)).tolist()]
    assert alone == together == names


def test_pixels_and_probabilities_are_those_of_validation(served, proved, images) -> None:
    bundle = load(proved.parts["bundle"], BundleManifest)
    expected = ImageBatches(bundle.manifest.transform, 8).load(images[:8], list("abcdefgh"))
    pixels = served.infer(images[:8], f"{NAME}_preprocess").output("images")
    np.testing.assert_array_equal(np.array(pixels, np.float32).reshape(expected.shape), expected)  # bit for bit
    model = bundle.file(fit_model(bundle.manifest.cpu_models).file)
    logits = OpenVINORunner(model, bundle.manifest.shapes).infer(expected)
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
    found = metrics(served)
    assert f'nv_inference_request_success{{model="{NAME}",version="1"}}' in found
    assert any(name.startswith("nv_inference_queue_duration_us") for name in found)
    text = served.log.read_text()
    # The first images go through the models before the server's metrics are there, and that is no warning.
    assert "no bound on waiting requests" not in text
    for line in (f"http://127.0.0.1:{served.http}\n", f"127.0.0.1:{served.grpc}\n", f":{served.metrics}/metrics\n"):
        assert line in text


@pytest.mark.parametrize(
    ("options", "key", "code"),
    [
        (["--metrics-port", "8000"], None, "equal-ports"),
        (["--grpc-port", "{taken}"], None, "cannot-listen"),
        (["--host", "no.such.host.invalid"], None, "cannot-listen"),
        (["--host", "a" * 300], None, "cannot-listen"),
        (["--host", ""], None, "cannot-listen"),
        (["--host", "192.0.2.1"], None, "cannot-listen"),  # of documentation, nobody's
        (["--top-k", "5"], None, "already-exported"),
        (["--precision", "fp32", "--name", "other", "--max-wait", "1"], None, "already-exported"),
        (["--allow-loading", "--host", "0.0.0.0"], None, "no-loading-key"),
        (["--allow-loading", "--host", "::"], None, "no-loading-key"),
        (["--allow-loading"], "short", "invalid-loading-key"),
        (["--allow-loading"], "a=b,logging:c=0123456789", "invalid-loading-key"),
    ],
)
def test_what_is_refused_before_the_server_starts(triton, exported, monkeypatch, options, key, code) -> None:
    monkeypatch.delenv("ENGINERY_LOADING_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("ENGINERY_LOADING_KEY", key)
    with socket.create_server(("127.0.0.1", 0)) as taken, refuses(code) as caught:
        enginery("serve", exported.path, *(word.format(taken=taken.getsockname()[1]) for word in options))
    if code == "already-exported":
        assert all(option in str(caught.value) for option in options[::2])
    for port in (["--http-port", "70000"], ["--grpc-port", "0"]):
        assert enginery("serve", exported.path, *port).exit_code == 2


NO_PROXY = {**dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9"), "no_proxy": ""}


def check_address(running: Running, address: str) -> None:
    """The server is where it says, though a proxy that leads nowhere is set."""
    assert f"http://{address}:{running.http}\n" in running.log.read_text()
    for port, path in ((running.http, "v2/health/ready"), (running.metrics, "metrics")):
        with urllib.request.urlopen(f"http://{address}:{port}/{path}", timeout=600) as response:
            assert response.status == 200
    assert grpc.InferenceServerClient(f"{address}:{running.grpc}").is_server_ready()


def test_a_folder_for_triton_that_nobody_may_write(triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, "/sys")  # closed to root, too
    with refuses("not-writable", HOME_VARIABLE):
        enginery("serve", "install")


@pytest.mark.slow  # by name below; how an address becomes the server's above
def test_the_host_is_ipv6(triton, exported, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    with serving(exported.path, tmp_path, "--host", "::1", **NO_PROXY) as running:
        check_address(running, "[::1]")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_answers_what_has_begun(triton, promoted, images, tmp_path: Path, number: signal.Signals) -> None:
    """The model comes from the registry, by its alias, into a folder that is gone afterwards, as a killed one's is."""
    left = tmp_path / "home/serve/left"
    (left / "models").mkdir(parents=True)
    os.utime(left, (0, 0))
    with serving(f"{NAME}@candidate", tmp_path, MLFLOW_TRACKING_URI=promoted) as running:
        processes = psutil.Process(running.process.pid).children(recursive=True)
        assert any("tritonserver" in process.name() for process in processes)
        with ThreadPoolExecutor(12) as pool, kept_busy(running, 2):
            begun = [pool.submit(running.infer, images[:4]) for _ in range(12)]
            wait_until_pending(running, 12)
            running.process.send_signal(number)
        assert [request.result().status for request in begun] == [200] * 12
        assert running.process.wait(600) == 0
        psutil.wait_procs(processes, timeout=60)
        assert [process for process in processes if process.is_running()] == []
        assert list(Path("/dev/shm").glob(f"enginery_{running.process.pid}_*")) == []
        assert "Traceback" not in running.log.read_text()
    assert list((tmp_path / "home/serve").iterdir()) == []


def test_overload_is_refused_at_once_and_nothing_is_left_of_a_killed_triton(triton, proved, images, tmp_path) -> None:
    """Of more than the 128 that may wait some are answered, the rest gets a 503 that says so, and then all is well.

    It is killed under load: its models are then telling it things. Until then it is known by the name of its host.
    """
    options = ("--name", NAME, "--max-wait", "60", "--host", "localhost")
    with serving(proved.parts["bundle"], tmp_path, *options, **NO_PROXY) as running:
        check_address(running, "127.0.0.1")
        with ThreadPoolExecutor(150) as pool:
            with kept_busy(running):  # so that all of them wait, however fast this machine decodes
                sent = pool.map(lambda _: running.infer(images[:16]), range(150))
                wait_until_pending(running, 150)
            answers = list(sent)
        refused = [answer for answer in answers if answer.status != 200]
        assert 0 < len(refused) < 75
        assert {answer.status for answer in refused} == {503}
        assert all("the server is overloaded, try again later" in answer.error for answer in refused)
        assert running.infer(images[:1]).status == 200
        assert re.findall(r"^[EW]\d{4}.*|Traceback", running.log.read_text(), re.M) == []
        processes = psutil.Process(running.process.pid).children(recursive=True)
        server = next(process for process in processes if "tritonserver" in process.name())
        with ThreadPoolExecutor(8) as pool:
            begun = [pool.submit(running.infer, images[:1]) for _ in range(400)]
            begun[200].result()
            server.kill()
            pool.shutdown(cancel_futures=True)
        assert psutil.wait_procs(processes, timeout=60)[1] == []
        assert running.process.wait(600) == 1


def test_a_server_that_aborts_while_it_starts_is_started_again(triton, exported) -> None:
    """As it does where a busy machine gives its Python models no processor for 5 seconds."""
    server = Server.start(find_triton(), exported.path, Ports(**free_ports()))
    try:
        aborted = server.process
        aborted.send_signal(signal.SIGABRT)
        server.wait_until_ready()
        assert (aborted.returncode, server.process.poll()) == (-signal.SIGABRT, None)
    finally:
        server.kill()


def test_what_triton_says_of_models_that_it_refuses_is_shown(triton, exported, tmp_path: Path) -> None:
    shutil.copytree(exported.path, tmp_path / "models")
    for file in (tmp_path / "models").glob("*/config.pbtxt"):
        file.write_text(file.read_text().replace("max_batch_size", "max_batch_sizes"))
    server = Server.start(find_triton(), tmp_path / "models", Ports(**free_ports()))
    with refuses("server-not-started") as caught:
        server.wait_until_ready()
    assert 'no field named "max_batch_sizes".; Poll failed for model directory' in str(caught.value)
    assert "text_format.cc" not in str(caught.value)


def abort(running: Running) -> None:
    children = psutil.Process(running.process.pid).children()
    next(child for child in children if "tritonserver" in child.name()).send_signal(signal.SIGABRT)


def test_a_server_that_a_request_crashes_is_started_again(triton, exported, images, tmp_path: Path) -> None:
    """Triton divides by the size of an element, which text has none of."""
    with serving(exported.path, tmp_path) as running:
        processes = psutil.Process(running.process.pid).children(recursive=True)
        data = encoded(images[:1])
        image = {"name": "IMAGE", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(data)}}
        top1 = {"name": "LABELS", "parameters": {"classification": 1}}
        head = json.dumps({"inputs": [image], "outputs": [top1]}).encode()
        with pytest.raises(ConnectionError):
            running.post(NAME, head + data, {"Inference-Header-Content-Length": str(len(head))})
        wait_until_ready(running, "ready again")
        said = next(line for line in running.log.read_text().splitlines() if "the server crashed" in line)
        assert "(signal 8: " in said
        assert "CUDA" not in said
        assert psutil.wait_procs(processes, timeout=60)[1] == []
        assert running.infer(images[:1]).status == 200
        running.process.terminate()
        assert running.process.wait(600) == 0
        assert list(Path("/dev/shm").glob(f"enginery_{running.process.pid}_*")) == []


@pytest.mark.slow
def test_a_server_that_crashes_is_started_again_as_often(triton, exported, images, tmp_path: Path) -> None:
    with serving(exported.path, tmp_path) as running:
        for times in (1, 2, 3):
            abort(running)
            wait_until_ready(running, "ready again", times)
        assert running.infer(images[:1]).status == 200


@pytest.mark.slow
def test_the_server_ends_with_its_killed_parent(triton, exported, tmp_path: Path) -> None:
    with serving(exported.path, tmp_path) as running:
        processes = psutil.Process(running.process.pid).children(recursive=True)
        running.process.kill()
        assert psutil.wait_procs(processes, timeout=60)[1] == []
    with serving(exported.path, tmp_path):
        assert list(Path("/dev/shm").glob(f"enginery_{running.process.pid}_*")) == []  # what the killed one left


@pytest.mark.slow
def test_a_signed_repository_that_is_changed_while_it_is_served(triton, source, images, tmp_path: Path) -> None:
    """Behind a trust policy: it serves what was checked, whatever happens to the folder meanwhile."""
    private, public = write_keys(tmp_path / "ci")
    keys = {"ci": {"public_key": public.read_text(), "signs": ["verdict", "model"], "expires": "2999-01-01"}}
    (tmp_path / "trust.yaml").write_text(yaml.safe_dump({"keys": keys}))
    policy = {"ENGINERY_TRUST_POLICY": str(tmp_path / "trust.yaml")}
    statements = {VERDICT: sign_verdict(source.digests, True, signing_key(private))}
    signed = dataclasses.replace(source, statements=statements)
    folder = write_repository(signed, tmp_path / "models", RepositoryConfig(max_wait_s=60), private).path
    (tmp_path / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    running = start_serving(folder, tmp_path, **policy)
    try:
        # Where what was checked gets its name.
        wait_until(lambda: list(tmp_path.glob("home/serve/*/models")), running.log.read_text, process=running.process)
        for file in folder.rglob("model.py"):
            file.unlink()
            file.symlink_to(tmp_path / "foreign.py")
        wait_until_ready(running)
        assert running.infer(images[:1]).status == 200
    finally:
        running.process.terminate()
        running.process.wait(600)
    again = start_serving(folder, tmp_path, **policy)
    assert again.process.wait(600) != 0
    assert f"{NAME}_labels/1/model.py" in again.log.read_text()
    assert not (tmp_path / "ran").exists()
