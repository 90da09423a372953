"""Client, `enginery predict`, load test and metrics against a real server."""

import base64
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from components.common.contracts.errors import UserError
from components.common.runtimes.selection import select_runtime
from components.promote.pyfunc import BundleModel
from enginery.cli.commands import cli
from enginery.serving.client.client import Client
from enginery.serving.client.transport import (
    RequestRefused,
    RetryPolicy,
    ServerTimeout,
    ServerUnreachable,
    ServingError,
)
from enginery.serving.loadtest.results import LoadTest
from tests.fuzz import requests
from tests.unit.registered import ROOT, enginery, refuses
from tests.waiting import wait_until

from .conftest import NAME, Running, metrics, serving

ONCE = RetryPolicy(timeout_s=20, retry_s=0)
# For load tests, which use the client of other tests: those tell a protocol's fault, too.
ONE_PROTOCOL = pytest.mark.parametrize("url", ["http", pytest.param("grpc", marks=pytest.mark.slow)], indirect=True)


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, served: Running) -> str:
    return f"{request.param}://127.0.0.1:{getattr(served, request.param)}"


def test_both_protocols_give_the_validated_answer(url: str, images: list[bytes], source) -> None:
    shapes = source.bundle.manifest.shapes
    tensors = np.random.default_rng(0).standard_normal(shapes.input_shape(3), dtype=np.float32)
    with Client(url, retry=ONCE) as client:
        assert client.is_ready()
        answers = client.classify_all(images, top_k=2)
        logits = client.logits(tensors)
        with pytest.raises(RequestRefused):
            client.logits(tensors[:, :, :-1])
    table = BundleModel(source.bundle, "int8", "openvino").predict(images, {"top_k": 2})
    assert [answer.labels for answer in answers] == [tuple(labels) for labels in table["labels"]]
    shares = np.array([answer.probabilities for answer in answers])
    assert np.allclose(shares, np.array(table["probabilities"].tolist()), atol=1e-6)
    serving = select_runtime(source.bundle, "int8", "openvino")
    assert np.allclose(logits, serving.runner.infer(tensors), atol=1e-5)


def test_a_bad_image_is_said_and_good_ones_are_answered(url: str, image_files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_text("no image")
    (tmp_path / "empty.jpg").touch()
    good = image_files[:2]
    done = CliRunner().invoke(
        cli, ["predict", "--url", url, "--json", "--top-k", "1", *map(str, (good[0], tmp_path, good[1]))]
    )
    assert isinstance(done.exception, UserError)
    assert done.exception.code == "images-without-answer"
    results = json.loads(done.stdout)["results"]
    assert [Path(entry["image"]).name for entry in results] == [good[0].name, "bad.jpg", "empty.jpg", good[1].name]
    assert [len(entry.get("labels", ())) for entry in results] == [1, 0, 0, 1]
    assert ["error" in entry for entry in results] == [False, True, True, False]


def test_the_standard_input_is_an_image_too(url: str, images: list[bytes], image_files: list[Path]) -> None:
    output = enginery("predict", "--url", url, "-", image_files[1], stdin=images[0]).output
    assert len(re.findall(r"\d+\.\d\d %", output)) >= 4


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
def test_mistakes_are_said_before_anything_is_sent(arguments: list[str], code: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jpg").write_bytes(b"x")
    with refuses(code):
        enginery("predict", *arguments)


def test_what_the_server_does_not_have(url: str, image_files: list[Path]) -> None:
    with pytest.raises(RequestRefused):
        enginery("predict", "--url", url, "--model", "cats", image_files[0])
    with refuses("no-classifier"):
        enginery("predict", "--url", url, "--model", f"{NAME}_model", image_files[0])


def test_a_proxy_of_the_environment_is_not_asked(url: str, image_files: list[Path], monkeypatch) -> None:
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    for name, value in {**proxies, "no_proxy": "", "NO_PROXY": ""}.items():
        monkeypatch.setenv(name, value)
    enginery("predict", "--url", url, "--retry", 0, image_files[0])


def test_nobody_there_or_in_time_and_another_protocol(served: Running, image_files: list[Path]) -> None:
    for nobody in ("http://127.0.0.1:1", "http://no.such.host.invalid", "grpc://no.such.host.invalid"):
        with Client(nobody, retry=ONCE) as client, pytest.raises(ServerUnreachable) as found:
            client.classify(b"")
        assert "ssl:" not in str(found.value)  # of a server without TLS
    hasty = RetryPolicy(timeout_s=0.2, retry_s=0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and answers none
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, model=NAME, retry=hasty) as client, pytest.raises(ServerTimeout):
            client.classify(image_files[0].read_bytes())
    with pytest.raises(ServingError, match=f"write grpc://127.0.0.1:{served.grpc}"):
        enginery("predict", "--url", f"http://127.0.0.1:{served.grpc}", "--retry", 0, image_files[0])


def loadtest(url: str, output: Path, *options: object) -> LoadTest:
    enginery("loadtest", "--url", url, "--output", output, *options)
    return LoadTest.model_validate_json((output / "loadtest.json").read_text())


@ONE_PROTOCOL
def test_a_load_test_counts_what_the_server_did(url: str, tmp_path: Path, image_files: list[Path]) -> None:
    output = tmp_path / "out"
    options = ("--seconds", 0.5, "--concurrency", "1,8", "--rates", "20,60", "--data", image_files[0].parent)
    (series,) = loadtest(url, output, *options).series
    assert [level.concurrency for level in series.closed] == [1, 8]
    assert [level.request_rate for level in series.open] == [20, 60]
    for level in (*series.closed, *series.open):
        assert level.num_errors == 0
        assert 0 < level.p50_ms <= level.p99_ms
        # The server counts the warm-up, too, so it saw at least what was answered in the measured time.
        served_images = sum(size * count for size, count in level.batches.items())
        assert served_images >= level.images_per_s * level.duration_s
    assert "<svg" in (output / "loadtest.html").read_text()
    with pytest.raises(UserError):
        loadtest(url, output)


def test_comparing_without_the_servers_leave_is_refused_with_the_way_to_it(served: Running, tmp_path: Path) -> None:
    options = ("--seconds", 0.2, "--concurrency", 1, "--rates", 20, "--tensors", "--compare-batching")
    answered = f'nv_inference_request_success{{model="{NAME}_model",version="1"}}'
    before = metrics(served)[answered]
    with refuses("loading-refused"):
        loadtest(f"http://127.0.0.1:{served.http}", tmp_path / "out", *options)
    assert metrics(served)[answered] == before  # not after minutes of measuring, which would be lost


@ONE_PROTOCOL
def test_a_load_test_says_why_there_was_no_answer(url: str, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/bad.jpg").write_text("no image")
    options = ("--data", tmp_path / "images", "--seconds", 0.2, "--concurrency", 1, "--rates", 20)
    with pytest.raises(Exception, match=r"single client's \d+ requests was answered: .*image 0 is not an image"):
        loadtest(url, tmp_path / "first", *options)
    output = enginery(
        "loadtest", "--url", url, "--output", tmp_path / "second", *options, "--latency-budget", "100ms"
    ).output
    assert re.search(r"no answer, \d+ times: .*image 0 is not an image", output)
    result = LoadTest.model_validate_json((tmp_path / "second/loadtest.json").read_text())
    (count,) = result.failures.values()
    assert count >= sum(level.num_errors for series in result.series for level in (*series.closed, *series.open))


@pytest.fixture(scope="module")
def own(triton, exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that nobody else asks, with models that the client may load."""
    with serving(exported.path, tmp_path_factory.mktemp("own"), "--allow-loading") as running:
        yield running


def test_predictions_are_counted_by_label_and_confidence(own: Running, images: list[bytes]) -> None:
    with Client(f"http://127.0.0.1:{own.http}", model=NAME, retry=ONCE) as client:
        answers = client.classify_all(images)
    handed_on = "enginery_prediction_confidence_count{"  # which is said last
    wait_until(lambda: [n for key, n in metrics(own).items() if key.startswith(handed_on)] == [len(images)])
    found = {key: value for key, value in metrics(own).items() if key.startswith("enginery_prediction")}
    labels = [answer.label for answer in answers]
    for label in set(labels):
        counted = [value for key, value in found.items() if f'label="{label}"' in key]
        assert counted == [labels.count(label)]
    best = [answer.probabilities[0] for answer in answers]
    buckets = {
        float(match[1]): value for key, value in found.items() if (match := re.search(r'_bucket\{le="([^"]+)"', key))
    }
    assert float("inf") in buckets
    assert buckets == {bound: sum(share <= bound for share in best) for bound in buckets}
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


def test_with_and_without_dynamic_batching_and_then_as_before(own: Running, tmp_path: Path, monkeypatch) -> None:
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
    options = ("--seconds", 0.2, "--concurrency", 2, "--rates", 20, "--tensors", "--compare-batching")
    both = loadtest(f"grpc://127.0.0.1:{own.grpc}", tmp_path / "out", *options).series
    assert [(one.name, one.batching is None) for one in both] == [("dynamic batching", False), ("without", True)]
    for series in both:
        assert all(level.num_errors == 0 and level.images_per_s > 0 for level in series.closed)
    assert set(both[1].closed[0].batches) == {1}
    assert json.loads(own.get(f"v2/models/{NAME}_model/config")) == before


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_damaged_requests(served: Running, protocol: requests.Protocol) -> None:
    port = getattr(served, protocol)
    wrong, _, grown_bytes = requests.run_requests(100, 0, port, NAME, served.process.pid, protocol)
    assert wrong == {}
    assert grown_bytes < 10**9


def test_alerts_name_metrics_that_are_there(served: Running) -> None:
    text = (ROOT / "containers/serve/alerts.yaml").read_text()
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    names = {name for rule in rules for name in re.findall(r"\b(?:nv|enginery)_\w+", rule["expr"])}
    assert len(names) > 5
    there = {re.split(r"[{ ]", key)[0] for key in metrics(served)}
    assert names <= there
    assert all("action" in rule["annotations"] for rule in rules if "alert" in rule)
