"""A real server's requests beside the baseline of validation: what drifted, and what is refused."""

import dataclasses
import io
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, ImageEnhance

from components.common.data.baseline import STATISTICS, WINDOW, baseline_file, example_name, read_baseline
from enginery.serving.repository import RepositoryConfig, write_repository
from tests.pipelines.servers import free_port
from tests.unit.registered import enginery, refuses
from tests.waiting import wait_until

from .conftest import NAME, Running, metrics, serving
from .test_bad_requests import bomb_png


def darker(image: bytes) -> bytes:
    done = io.BytesIO()
    ImageEnhance.Brightness(Image.open(io.BytesIO(image)).convert("RGB")).enhance(0.5).save(done, "PNG")
    return done.getvalue()


def send(running: Running, images: list[bytes], num: int) -> None:
    """So many images, each as often as the others, until the server has counted them."""
    before = sum(counted(running).values())
    chosen = [images[index % len(images)] for index in range(num)]
    for start in range(0, num, 50):
        assert running.infer(chosen[start : start + 50]).status == 200
    wait_until_counted(running, before, num)


def wait_until_counted(running: Running, before: float, num: int) -> None:
    wait_until(lambda: sum(counted(running).values()) >= before + num * len(STATISTICS), seconds=60)


def counted(running: Running) -> dict[str, float]:
    return {key: value for key, value in metrics(running).items() if key.startswith("enginery_drift_images_total{")}


def gauges(running: Running, name: str) -> dict[str, float]:
    found = {key: value for key, value in metrics(running).items() if key.startswith(f"enginery_drift_{name}{{")}
    return {key.split('statistic="')[1].split('"')[0]: value for key, value in found.items()}


def test_a_server_says_what_drifted(triton, source, images, tmp_path: Path) -> None:
    """Validation's own images are as validated, darker ones are not: gauges, command, page and images."""
    kept, html, saved = tmp_path / "kept", tmp_path / "drift.html", tmp_path / "metrics.txt"
    repository = write_repository(source, tmp_path / "models", RepositoryConfig(max_wait_s=60, keep_examples=True))
    baseline = read_baseline(repository.path / baseline_file("int8"))
    with serving(repository.path, tmp_path, "--examples", str(kept)) as running:
        url = f"http://127.0.0.1:{running.metrics}/metrics"
        command = ("drift", repository.path, "--metrics", url)
        with refuses("too-few-images"):
            enginery(*command)
        assert set(gauges(running, "psi").values()) == {0}
        send(running, images, WINDOW)
        assert "as validated" in enginery(*command).output
        psi, limits = gauges(running, "psi"), gauges(running, "psi_threshold")
        assert psi.keys() == limits.keys() == set(STATISTICS)
        assert all(0 < psi[name] < limits[name] for name in STATISTICS)
        saved.write_bytes(running.get("metrics", running.metrics))
        send(running, [darker(image) for image in images], WINDOW)
        for name in ("psi", "js"):
            assert gauges(running, name)["brightness"] > 5 * gauges(running, f"{name}_threshold")["brightness"]
            assert gauges(running, name)["size"] < gauges(running, f"{name}_threshold")["size"]
        with refuses("drifted") as caught:
            enginery(*command, "--since", saved, "--html", html, "--examples", kept)
        assert caught.value.exit_code == 3
        with refuses("counts-fell", "--since"):
            later = tmp_path / "later.txt"
            later.write_bytes(running.get("metrics", running.metrics))
            enginery("drift", repository.path, "--metrics", saved, "--since", later)
        names = {example_name(each.name, index) for each in baseline.statistics for index in range(len(each.counts))}
        assert {file.name for file in kept.glob("[!.]*")} <= names
        for wrong in (b"text", bomb_png(30_000, 30_000)):  # which nobody has checked: the labels model is asked alone
            before = sum(counted(running).values())
            assert running.send("logits", "FP32", [1, 10], bytes(40), f"{NAME}_labels", wrong).status == 200
            wait_until_counted(running, before, 1)
            start = time.time()
            send(running, images, 50)
            # Images are kept as before.
            wait_until(lambda: max(file.stat().st_mtime for file in kept.glob("[!.]*")) >= start, seconds=60)  # noqa: B023
        kept.rename(tmp_path / "gone")  # at once, while the server writes
        for image in 4 * images:  # of which none can be kept any more
            assert running.infer([image]).status == 200
        send(running, images, 50)
    text = html.read_text()
    assert "<h2>Brightness: drifted</h2>" in text
    assert "<h2>Size</h2>" in text
    assert "data:image/jpeg;base64," in text


SERIES = (
    'enginery_drift_images_total{{baseline="{digest}",bin="{bin}",model="digits",statistic="{statistic}"}} {value}\n'
)


@pytest.fixture
def counted_so(exported, tmp_path: Path) -> Callable[..., Path]:
    """Write metrics as of a server, in which every bin has as many images as in validation, times a factor."""

    def write(factor: float = 2, **changed: str) -> Path:
        file = baseline_file("int8")
        given = {"digest": exported.manifest.files[file].digest}
        lines = [
            SERIES.format(**{**given, "statistic": each.name, "bin": f"{index:02}", "value": factor * count, **changed})
            for each in read_baseline(exported.path / file).statistics
            for index, count in enumerate(each.counts)
        ]
        text = 'nv_inference_count{model="digits"} 7\n' + "".join(lines)
        (tmp_path / "metrics.txt").write_text(text)
        return tmp_path / "metrics.txt"

    return write


def test_counts_of_several_servers_are_added(exported, counted_so, tmp_path: Path) -> None:
    file = counted_so(1)
    with refuses("too-few-images"):
        enginery("drift", exported.path, "--metrics", file)
    (timed := tmp_path / "federated.txt").write_text(file.read_text().replace("\n", " 1795960000000\n"))
    done = enginery("drift", exported.path, "--metrics", file, "--metrics", timed, "--json")
    found = json.loads(done.output)
    assert (found["num_images"], found["num_validation_images"], found["precision"]) == (240, 120, "int8")
    assert not any(each["drifted"] for each in found["statistics"])
    for each in found["statistics"]:
        assert all(one["baseline_pct"] == pytest.approx(one["served_pct"]) for one in each["bins"])


def test_a_registered_version_and_a_release_hold_the_baseline(exported, promoted, counted_so, tmp_path: Path) -> None:
    release = tmp_path / "release"
    enginery("release", release, f"{NAME}@candidate")
    for model in (f"{NAME}@candidate", release):
        done = enginery("drift", model, "--metrics", counted_so(), "--json")
        assert json.loads(done.stdout)["baseline_digest"] == exported.manifest.files[baseline_file("int8")].digest


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"digest": "sha256:0"}, "other-baseline"),
        ({"bin": "99"}, "invalid-metrics"),
        ({"bin": "-1"}, "invalid-metrics"),
        ({"statistic": "colour"}, "invalid-metrics"),
        ({"value": "nan"}, "invalid-metrics"),
        ({"value": "-1"}, "invalid-metrics"),
        ({"value": "1e300"}, "invalid-metrics"),
        ({"value": "x" * 10**6}, "invalid-metrics"),
    ],
)
def test_metrics_that_are_no_servers_of_this_model(exported, counted_so, changed, code) -> None:
    with refuses(code) as caught:
        enginery("drift", exported.path, "--metrics", counted_so(**changed))
    assert len(str(caught.value)) < 1000


def test_what_can_not_be_compared(exported, source, counted_so, tmp_path: Path) -> None:
    metrics_file, nothing, large = counted_so(), tmp_path / "nothing.txt", tmp_path / "large.txt"
    nothing.write_text("nv_inference_count 7\n")
    large.write_bytes(b"#" * ((16 << 20) + 1))
    for place, code in (
        (nothing, "no-drift-metrics"),
        (large, "invalid-metrics"),
        (tmp_path / "none.txt", "no-file"),
        (tmp_path, "no-file"),
        (f"http://127.0.0.1:{free_port()}/metrics", "server-unreachable"),
        ("file:///etc/passwd", "server-unreachable"),
        ("http://[::1", "server-unreachable"),
    ):
        with refuses(code, "--metrics"):
            enginery("drift", exported.path, "--metrics", place)
    command = ("drift", exported.path, "--metrics", metrics_file)
    for options, code in (
        (["--precision", "fp32"], "no-such-precision"),
        (["--examples", tmp_path], "no-examples"),
        (["--html", tmp_path / "page.html", "--examples", tmp_path / "none"], "no-examples"),
        (["--html", tmp_path / "none/page.html"], "no-output"),
    ):
        with refuses(code):
            enginery(*command, *options)
    alone = write_repository(dataclasses.replace(source, report=None), tmp_path / "alone", RepositoryConfig())
    assert "STATISTICS" not in (alone.path / "digits_labels/config.pbtxt").read_text()
    for model in (alone.path, source.bundle.path):
        with refuses("no-baseline"):
            enginery("drift", model, "--metrics", metrics_file)
    damaged = shutil.copytree(exported.path, tmp_path / "damaged")
    file = damaged / baseline_file("int8")
    file.write_bytes(file.read_bytes().replace(b"1", b"2"))
    with refuses("damaged-artifact"):
        enginery("drift", damaged, "--metrics", metrics_file)
    with refuses("already-exported", "--examples"):
        enginery("serve", exported.path, "--examples", tmp_path / "kept")
