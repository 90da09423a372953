"""Client, `enginery predict`, load test and metrics against a real server."""

import base64
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from components.common.contracts.errors import UserError
from components.common.runtimes.selection import select_runtime
from enginery.cli.commands import cli
from enginery.serving.client.client import AsyncClient, Client
from enginery.serving.client.transport import RequestRefused, RetryPolicy, ServerTimeout, ServerUnreachable
from enginery.serving.loadtest.results import LoadTest
from tests.fuzz import requests

from .conftest import NAME, Running, start_serving, wait_until_ready

REPOSITORY = Path(__file__).resolve().parents[3]
ONCE = RetryPolicy(timeout_s=20, retry_s=0)


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, served: Running) -> str:
    return f"{request.param}://127.0.0.1:{getattr(served, request.param)}"


@pytest.fixture(scope="module")
def images(proved, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, files = tmp_path_factory.mktemp("images"), []
    for shard in proved.dataset.manifest.splits["val"].shards:
        with tarfile.open(proved.dataset.file(shard)) as tar:
            for member in tar:
                if not member.name.endswith(".cls"):
                    files.append(folder / member.name)
                    files[-1].write_bytes(tar.extractfile(member).read())
    assert len(files) > 5
    return files


def predict(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["predict", *map(str, arguments)], input=stdin)


def test_both_protocols_give_the_validated_answer(url: str, images: list[Path], source) -> None:

    with Client(url, retry=ONCE) as client:
        assert client.is_ready()
        answers = client.classify_all([file.read_bytes() for file in images], top_k=2)
    from components.promote.pyfunc import BundleModel

    model = BundleModel(source.bundle, "int8", "openvino")
    table = model.predict([file.read_bytes() for file in images], {"top_k": 2})
    assert [answer.labels for answer in answers] == [tuple(labels) for labels in table["labels"]]
    shares = np.array([answer.probabilities for answer in answers])
    assert np.allclose(shares, np.array(table["probabilities"].tolist()), atol=1e-6)


def test_tensors_give_the_runners_logits(url: str, source) -> None:
    shapes = source.bundle.manifest.shapes
    tensors = np.random.default_rng(0).standard_normal(shapes.input_shape(3), dtype=np.float32)
    with Client(url, retry=ONCE) as client:
        logits = client.logits(tensors)
        with pytest.raises(RequestRefused):
            client.logits(tensors[:, :, :-1])
    serving = select_runtime(source.bundle, "int8", "openvino")
    assert serving.runner is not None
    assert np.allclose(logits, serving.runner.infer(tensors), atol=1e-5)


def test_a_bad_image_among_good_ones_is_said_and_the_others_are_answered(
    url: str, images: list[Path], tmp_path: Path
) -> None:
    bad, empty = tmp_path / "bad.jpg", tmp_path / "empty.jpg"
    bad.write_text("no image")
    empty.touch()
    done = predict("--url", url, "--json", "--top-k", 1, images[0], tmp_path, images[1])
    assert isinstance(done.exception, UserError)
    assert done.exception.code == "images-without-answer"
    results = json.loads(done.stdout)["results"]
    assert [Path(entry["image"]).name for entry in results] == [images[0].name, "bad.jpg", "empty.jpg", images[1].name]
    assert ["error" in entry for entry in results] == [False, True, True, False]
    assert [len(results[index]["labels"]) for index in (0, 3)] == [1, 1]


def test_the_standard_input_is_an_image_too(url: str, images: list[Path]) -> None:
    done = predict("--url", url, "-", images[1], stdin=images[0].read_bytes())
    assert done.exception is None, done.output
    assert len(re.findall(r"\d+\.\d\d %", done.output)) >= 4


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], "no-images"),
        (["nowhere.jpg"], "no-images"),
        (["-", "-"], "standard-input-twice"),
        (["--url", "ftp://x", "."], "invalid-address"),
        (["--timeout", "nan", "a.jpg"], "invalid-numbers"),
        (["--retry", "inf", "a.jpg"], "invalid-numbers"),
    ],
)
def test_mistakes_are_said_before_anything_is_sent(
    arguments: list[str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jpg").write_bytes(b"x")
    done = predict(*arguments)
    assert isinstance(done.exception, UserError)
    assert done.exception.code == code


def test_what_the_server_does_not_have(url: str, images: list[Path]) -> None:
    unknown = predict("--url", url, "--model", "cats", images[0])
    assert isinstance(unknown.exception, RequestRefused)
    network = predict("--url", url, "--model", f"{NAME}_model", images[0])
    assert isinstance(network.exception, UserError)
    assert network.exception.code == "no-classifier"


def test_a_proxy_of_the_environment_is_not_asked(url: str, images: list[Path]) -> None:
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "enginery.cli.main", "predict", "--url", url, "--retry", "0", str(images[0])],
        cwd=REPOSITORY,
        env={**os.environ, **proxies, "no_proxy": "", "NO_PROXY": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("nobody", ["http://127.0.0.1:1", "http://no.such.host.invalid", "grpc://no.such.host.invalid"])
def test_nobody_there(nobody: str) -> None:
    with Client(nobody, retry=ONCE) as client, pytest.raises(ServerUnreachable):
        client.classify(b"")


def test_nobody_in_time_and_another_protocol(served: Running, images: list[Path]) -> None:
    hasty = RetryPolicy(timeout_s=0.2, retry_s=0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and answers none
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, model=NAME, retry=hasty) as client, pytest.raises(ServerTimeout):
            client.classify(images[0].read_bytes())
    wrong = predict("--url", f"http://127.0.0.1:{served.grpc}", "--retry", 0, images[0])
    assert f"write grpc://127.0.0.1:{served.grpc}" in str(wrong.exception)


def test_a_load_test_counts_what_the_server_did(url: str, tmp_path: Path, images: list[Path]) -> None:
    output = tmp_path / "out"
    arguments = ["--seconds", "1", "--concurrency", "1,8", "--rates", "20,60", "--data", images[0].parent]
    done = CliRunner().invoke(cli, ["loadtest", "--url", url, "--output", *map(str, [output, *arguments])])
    assert done.exception is None, done.output
    result = LoadTest.model_validate_json((output / "loadtest.json").read_text())
    (series,) = result.series
    assert [level.concurrency for level in series.closed] == [1, 8]
    assert [level.request_rate for level in series.open] == [20, 60]
    for level in (*series.closed, *series.open):
        assert level.num_errors == 0
        assert level.p50_ms is not None
        assert level.p99_ms is not None
        assert 0 < level.p50_ms <= level.p99_ms
        # The server counts the warm-up, too, so it saw at least what was answered in the measured time.
        served_images = sum(size * count for size, count in level.batches.items())
        assert served_images >= level.images_per_s * level.duration_s
    assert "<svg" in (output / "loadtest.html").read_text()
    again = CliRunner().invoke(cli, ["loadtest", "--url", url, "--output", str(output)])
    assert isinstance(again.exception, UserError)


def test_comparing_without_the_servers_leave_is_refused_with_the_way_to_it(served: Running, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{served.http}"
    options = ["--seconds", "0.2", "--concurrency", "1", "--rates", "20", "--tensors", "--compare-batching"]
    answered = f'nv_inference_request_success{{model="{NAME}_model",version="1"}}'
    before = metrics(served)[answered]
    done = CliRunner().invoke(cli, ["loadtest", "--url", url, "--output", str(tmp_path / "out"), *options])
    assert metrics(served)[answered] == before  # not after minutes of measuring, which would be lost
    assert isinstance(done.exception, UserError)
    assert done.exception.code == "loading-refused"


def test_a_load_test_says_why_there_was_no_answer(url: str, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/bad.jpg").write_text("no image")
    options = ["--data", tmp_path / "images", "--seconds", "0.2", "--concurrency", "1", "--rates", "20"]
    arguments = ["loadtest", "--url", url, *map(str, options), "--output"]
    done = CliRunner().invoke(cli, [*arguments, str(tmp_path / "first")])
    assert re.search(r"single client's \d+ requests was answered: .*image 0 is not an image", str(done.exception))
    done = CliRunner().invoke(cli, [*arguments, str(tmp_path / "second"), "--latency-budget", "100"])
    assert done.exception is None, done.output
    assert re.search(r"no answer, \d+ times: .*image 0 is not an image", done.output)
    result = LoadTest.model_validate_json((tmp_path / "second/loadtest.json").read_text())
    (count,) = result.failures.values()
    assert count >= sum(level.num_errors for series in result.series for level in (*series.closed, *series.open))


def metrics(served: Running) -> dict[str, float]:
    lines = served.get("metrics", served.metrics).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


CONFIDENCE_COUNT = "enginery_prediction_confidence_count"


@pytest.fixture(scope="module")
def own(triton, exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that nobody else asks, with models that the client may load."""
    running = start_serving(exported.path, tmp_path_factory.mktemp("own"), "--allow-loading")
    try:
        wait_until_ready(running)
        yield running
    finally:
        running.process.terminate()
        running.process.wait(600)


def test_predictions_are_counted_by_label_and_confidence(own: Running, images: list[Path]) -> None:
    """They are handed on once a second."""
    with Client(f"http://127.0.0.1:{own.http}", model=NAME, retry=ONCE) as client:
        answers = client.classify_all([file.read_bytes() for file in images])
    deadline = time.monotonic() + 600
    while True:
        found = {key: value for key, value in metrics(own).items() if key.startswith("enginery_prediction")}
        (handed_on,) = (value for key, value in found.items() if key.startswith(f"{CONFIDENCE_COUNT}{{"))
        if handed_on == len(images):  # which is said last
            break
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    labels = [answer.label for answer in answers]
    for label in set(labels):
        counted = [value for key, value in found.items() if f'label="{label}"' in key]
        assert counted == [labels.count(label)]
    best = [answer.probabilities[0] for answer in answers]
    buckets = {
        float(match[1]): value for key, value in found.items() if (match := re.search(r'_bucket\{le="([^"]+)"', key))
    }
    assert buckets[float("inf")] == len(images)
    for bound, count in buckets.items():
        assert count == sum(share <= bound for share in best)
    (total,) = (value for key, value in found.items() if key.startswith("enginery_prediction_confidence_sum"))
    assert total == pytest.approx(sum(best), rel=1e-5)


FOREIGN_MODEL = """
from pathlib import Path
Path({proof!r}).touch()
class TritonPythonModel: ...
"""


def attack(running: Running, proof: Path, headers: dict[str, str]) -> int:
    """Have the server load a model of the client's own, as a web page can: text/plain needs no preflight."""
    code = base64.b64encode(FOREIGN_MODEL.format(proof=str(proof)).encode()).decode()
    parameters = {"config": json.dumps({"backend": "python"}), "file:1/model.py": code}
    request = urllib.request.Request(
        f"http://127.0.0.1:{running.http}/v2/repository/models/foreign/load",
        json.dumps({"parameters": parameters}).encode(),
        {"Content-Type": "text/plain", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_with_and_without_dynamic_batching_and_then_as_before(
    own: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading is for who has the key alone: nobody else brings code of his own or unloads a model."""
    home = own.log.parent / "home"
    monkeypatch.setenv("ENGINERY_HOME", str(home))
    key_file, proof = home / "loading.key", tmp_path / "proof"
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert [attack(own, proof, headers) for headers in ({}, {"enginery-loading": "0" * 32})] == [403, 403]
    assert not proof.exists()
    with grpc.InferenceServerClient(f"127.0.0.1:{own.grpc}") as client:
        for call in (client.unload_model, client.load_model):
            with pytest.raises(InferenceServerException, match="restricted"):
                call(f"{NAME}_model")
    for url in (f"http://127.0.0.1:{own.http}", f"grpc://127.0.0.1:{own.grpc}"):
        with Client(url) as client, pytest.raises(RequestRefused, match="name the model with --model"):
            client.classify(b"")
    attack(own, proof, {"enginery-loading": key_file.read_text()})
    assert proof.exists()  # so the attack is one: with the key it runs
    before = json.loads(own.get(f"v2/models/{NAME}_model/config"))
    options = ["--seconds", "0.5", "--concurrency", "2", "--rates", "20", "--tensors", "--compare-batching"]
    url = f"grpc://127.0.0.1:{own.grpc}"
    done = CliRunner().invoke(cli, ["loadtest", "--url", url, "--output", str(tmp_path / "out"), *options])
    assert done.exception is None, done.output
    result = LoadTest.model_validate_json((tmp_path / "out/loadtest.json").read_text())
    assert [(series.name, series.batching is None) for series in result.series] == [
        ("dynamic batching", False),
        ("without", True),
    ]
    for series in result.series:
        assert all(level.num_errors == 0 and level.images_per_s > 0 for level in series.closed)
    assert set(result.series[1].closed[0].batches) == {1}
    assert json.loads(own.get(f"v2/models/{NAME}_model/config")) == before


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_damaged_requests(served: Running, protocol: requests.Protocol) -> None:
    """benchmarks/fuzz.py sends more."""
    port = getattr(served, protocol)
    wrong, grown_bytes = requests.run_requests(100, 0, port, NAME, served.process.pid, protocol)
    assert wrong == {}
    assert grown_bytes < 10**9


@pytest.mark.parametrize(
    ("host", "key", "code"),
    [
        ("0.0.0.0", None, "no-loading-key"),
        ("::", None, "no-loading-key"),
        ("127.0.0.1", "short", "invalid-loading-key"),
        ("127.0.0.1", "a=b,logging:c=0123456789", "invalid-loading-key"),
    ],
)
def test_loading_without_a_key_is_for_loopback_alone(exported, monkeypatch, host: str, key: str | None, code) -> None:
    monkeypatch.delenv("ENGINERY_LOADING_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("ENGINERY_LOADING_KEY", key)
    done = CliRunner().invoke(cli, ["serve", str(exported.path), "--allow-loading", "--host", host])
    assert isinstance(done.exception, UserError)
    assert done.exception.code == code


def test_alerts_name_metrics_that_are_there(served: Running) -> None:
    text = (REPOSITORY / "containers/serve/alerts.yaml").read_text()
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    names = {name for rule in rules for name in re.findall(r"\b(?:nv|enginery)_\w+", rule["expr"])}
    assert len(names) > 5
    there = {re.split(r"[{ ]", key)[0] for key in metrics(served)}
    assert names <= there
    assert all("action" in rule["annotations"] for rule in rules if "alert" in rule)


def test_importing_the_client_does_not_import_the_engine_room() -> None:
    script = (
        "import sys, enginery.serving.client.client, enginery.cli.predict, enginery.serving.loadtest.generator\n"
        "heavy = {'torch', 'mlflow', 'openvino', 'tritonclient', 'kfp', 'PIL', 'enginery.serving.server'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_client_of_asyncio_counts_its_retries() -> None:
    import asyncio

    async def go() -> None:
        async with AsyncClient("http://127.0.0.1:1", retry=RetryPolicy(retry_s=600, first_pause_s=0.01)) as client:
            asked = asyncio.create_task(client.classifier())
            async with asyncio.timeout(60):
                while client.num_retries < 2:
                    await asyncio.sleep(0.01)
            assert not asked.done()
            asked.cancel()

    asyncio.run(go())
