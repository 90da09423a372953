"""Videos in, labels out: what frames are called, what hostile files can do, and how live streams are kept up with."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import av
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from components.analyze.results import HeldLabel, Latencies, StreamResult, Thumbnails, Timeline
from components.analyze.videos import has_nvdec
from components.common.contracts.errors import UserError
from components.common.contracts.manifests import AnalysisManifest, Artifact, BundleManifest, load
from components.common.contracts.transforms import TransformSpec
from components.common.data.dali_pipelines import FrameBatches, ImageBatches
from components.promote.pyfunc import BundleModel
from enginery.cli.video import video as video_command
from tests.unit.analyze.conftest import PER_DIGIT, SHOWN, Analyze, digit_frames, lines, write_video
from tests.unit.analyze.rtsp import RtspServer
from tests.unit.refusals import refuses

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "libx264"), ("b.mkv", "libx265"), ("c.webm", "libvpx-vp9"), ("d.mp4", "libsvtav1")]
)
def test_frames_get_the_labels_of_the_same_frames_as_images(
    run_analysis: Analyze, bundle: Artifact[BundleManifest], tmp_path: Path, name: str, codec: str
) -> None:
    video = write_video(tmp_path / name, digit_frames(), codec)
    analysis = run_analysis(video)
    with av.open(str(video)) as container:
        stills = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(stills) == len(SHOWN) * PER_DIGIT
    expected = BundleModel(bundle, "int8", "auto").predict(stills, {"top_k": 3})
    found = lines(analysis, "frames.jsonl")
    assert [line["frame"] for line in found] == list(range(len(stills)))
    assert [line["labels"] for line in found] == expected["labels"].tolist()
    np.testing.assert_allclose([line["probabilities"] for line in found], expected["probabilities"].tolist(), atol=1e-6)
    assert [line["time_s"] for line in found] == [round(index / 30, 3) for index in range(len(stills))]
    (stream,) = analysis.manifest.streams
    assert (stream.width, stream.height, stream.num_decoded, stream.problem) == (128, 96, len(stills), "")
    assert stream.codec == {"libx264": "h264", "libx265": "hevc", "libvpx-vp9": "vp9", "libsvtav1": "av1"}[codec]


def test_events_page_and_annotated_video_of_a_folder(run_analysis: Analyze, tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    (folder / "inside").mkdir(parents=True)
    frames = [frame for frame in digit_frames(per_digit=4) for _ in range(4)]
    write_video(folder / "one.mp4", frames)
    write_video(folder / "inside" / "two.mp4", frames[::-1])
    analysis = run_analysis(folder, annotate=True, hold_frames=4, min_probability=0.3)
    assert [stream.name for stream in analysis.manifest.streams] == ["inside/two.mp4", "one.mp4"]
    events = [line for line in lines(analysis, "events.jsonl") if line["stream"] == "one.mp4"]
    assert events[0]["event"] == "opened"
    assert sum(line["event"] == "ended" for line in events) == 1
    held = [line for line in events if line["event"] in ("held", "changed")]
    assert [line["event"] for line in held] == ["held"] + ["changed"] * (len(held) - 1)
    for line in held:
        assert line["frame"] == line["since_frame"] + 3
    page = analysis.file("index.html").read_text()
    assert page.count('class="timeline"') == 2
    assert "data:image/jpeg;base64," in page
    for name in ("0000_two.mp4", "0001_one.mp4"):
        with av.open(str(analysis.file(name))) as container:
            assert sum(1 for _ in container.decode(video=0)) == len(frames)
        assert name in analysis.manifest.files


def test_what_is_broken_is_named_and_the_rest_is_labelled(run_analysis: Analyze, tmp_path: Path) -> None:
    good = write_video(tmp_path / "good.mp4", digit_frames())
    raw = write_video(tmp_path / "raw.264", digit_frames()).read_bytes()
    damaged = tmp_path / "damaged.264"
    noise = np.random.default_rng(0).integers(0, 256, 600, np.uint8).tobytes()
    middle = len(raw) // 2
    damaged.write_bytes(raw[:middle] + noise + raw[middle + 600 :])
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "cut.mp4").write_bytes(good.read_bytes()[:3000])
    (tmp_path / "list.mp4").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{good}\n#EXT-X-ENDLIST\n")
    (tmp_path / "script.mp4").write_text(f"ffconcat version 1.0\nfile {good}\n")
    names = ("good.mp4", "damaged.264", "text.mp4", "empty.mp4", "cut.mp4", "list.mp4", "script.mp4")
    analysis = run_analysis(*(tmp_path / name for name in names))
    seen = {stream.name: stream for stream in analysis.manifest.streams}
    assert seen["good.mp4"].num_labelled == len(SHOWN) * PER_DIGIT
    assert seen["damaged.264"].num_labelled > 0
    for name in names[2:]:
        assert (seen[name].num_labelled, seen[name].codec) == (0, "")
        assert "is no video that can be read" in seen[name].problem


def test_a_video_may_change_its_size(run_analysis: Analyze, tmp_path: Path) -> None:
    small = write_video(tmp_path / "small.264", digit_frames((96, 128)), g="12").read_bytes()
    large = write_video(tmp_path / "large.264", digit_frames((144, 96)), g="12").read_bytes()
    both = tmp_path / "both.264"
    both.write_bytes(small + large)
    analysis = run_analysis(both)
    (stream,) = analysis.manifest.streams
    assert stream.num_labelled == 2 * len(SHOWN) * PER_DIGIT
    assert [(line["width"], line["height"]) for line in lines(analysis, "events.jsonl") if line["event"] == "size"] == [
        (96, 144)
    ]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("nowhere.mp4", "no-video"),
        ("http://127.0.0.1/a.m3u8", "unknown-video-address"),
        ("concat://a.mp4|b.mp4", "unknown-video-address"),
    ],
)
def test_sources_that_are_none(run_analysis: Analyze, source: str, code: str) -> None:
    with pytest.raises(UserError) as refused:
        run_analysis(source)
    assert refused.value.code == code


def test_passwords_of_addresses_are_refused_and_taken_from_netrc(
    run_analysis: Analyze, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="netrc") as refused:
        run_analysis("rtsp://user:geheim-1@127.0.0.1/cam")
    assert "geheim-1" not in str(refused.value)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login viewer password geheim-2\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with RtspServer(digit_frames(), login="viewer:geheim-2") as server:
        analysis = run_analysis(server.url, max_seconds=3.0)
    assert analysis.manifest.streams[0].num_labelled > 0
    for file in analysis.path.iterdir():
        assert b"geheim" not in file.read_bytes()


def test_a_camera_that_stalls_breaks_off_and_comes_back(run_analysis: Analyze) -> None:
    with RtspServer(digit_frames()) as server:

        def trouble() -> None:
            time.sleep(1.5)
            server.paused.set()
            time.sleep(1.6)
            server.paused.clear()
            time.sleep(1.0)
            server.cut()

        threading.Thread(target=trouble, daemon=True).start()
        analysis = run_analysis(server.url, max_seconds=8.0, stall_seconds=0.5)
    (stream,) = analysis.manifest.streams
    events = [line["event"] for line in lines(analysis, "events.jsonl") if line["event"] not in ("held", "changed")]
    assert stream.num_lost >= 1
    assert events[0] == "opened"
    assert "stalled" in events or "lost" in events
    assert events.index("back") > events.index("lost")
    found = lines(analysis, "frames.jsonl")
    assert [line["frame"] for line in found] == sorted({line["frame"] for line in found})
    assert [line["time_s"] for line in found] == sorted(line["time_s"] for line in found)
    assert stream.latency_p99_ms is not None


def test_a_consumer_that_is_too_slow_drops_frames_and_stays_near_now(
    run_analysis: Analyze, monkeypatch: pytest.MonkeyPatch
) -> None:
    import components.analyze.run as steps

    class SlowBatches(steps.FrameBatches):
        def transform(self, frames: list[np.ndarray]) -> np.ndarray:
            time.sleep(0.1 * len(frames))  # 10 frames/s where 30 come
            return super().transform(frames)

    monkeypatch.setattr(steps, "FrameBatches", SlowBatches)
    with RtspServer(digit_frames()) as server:
        analysis = run_analysis(server.url, max_seconds=5.0, queue_frames=2, batch_size=1)
    (stream,) = analysis.manifest.streams
    assert stream.num_dropped > stream.num_labelled > 10
    assert stream.num_labelled + stream.num_dropped <= stream.num_decoded
    assert stream.latency_p99_ms is not None
    assert stream.latency_p99_ms < 1500  # two that wait, one that is under way, on a busy machine


def test_ctrl_c_ends_with_whole_files(bundle: Artifact[BundleManifest], tmp_path: Path) -> None:
    output = tmp_path / "analysis"
    with RtspServer(digit_frames()) as server:
        command = [sys.executable, "-m", "components.analyze", "--bundle", str(bundle.path), "--output", str(output)]
        command += ["--sources", json.dumps([server.url]), "--annotate", "true"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        frames, deadline = output / "frames.jsonl", time.monotonic() + 60
        while time.monotonic() < deadline and not (frames.exists() and frames.stat().st_size):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    analysis = load(output, AnalysisManifest)
    (stream,) = analysis.manifest.streams
    assert len(lines(analysis, "frames.jsonl")) == stream.num_labelled > 0
    with av.open(str(next(output.glob("*.mp4")))) as container:
        assert sum(1 for _ in container.decode(video=0)) == stream.num_labelled


def test_a_class_is_held_once_it_was_likeliest_often_enough() -> None:
    held = HeldLabel(3)
    seen = [held.update(label, number, number / 10) for number, label in enumerate([1, 1, 2, 1, 1, 1, -1, 1, 2, 2, 2])]
    events = {number: event for number, event in enumerate(seen) if event}
    assert events == {
        5: {"label": 1, "since_frame": 3, "since_s": 0.3},
        10: {"label": 2, "since_frame": 8, "since_s": 0.8, "before": 1, "before_s": pytest.approx(0.5)},
    }


def test_what_is_kept_of_hours_stays_small_and_right() -> None:
    timeline, thumbnails, result = Timeline(), Thumbnails(), StreamResult(1)
    pixels = np.zeros((48, 64, 3), np.uint8)
    for second in range(4 * 3600):
        label = second // 3600
        timeline.add(label, second)
        thumbnails.offer(pixels, second, second % 5, 0.5)
        result.keep_event({"event": "held"})
    segments = list(timeline.segments())
    assert [label for label, _, _ in segments] == [0, 1, 2, 3]
    assert [begin for _, begin, _ in segments] == pytest.approx([0, 3600, 7200, 10800], abs=timeline.bin_s)
    assert 8 <= len(thumbnails.kept) <= 16
    assert thumbnails.kept[-1].time_s > 2 * 3600
    assert (len(result.shown_events), result.num_events) == (200, 4 * 3600)


def test_percentiles_of_latencies_are_right_to_two_per_cent() -> None:
    latencies, values = Latencies(), np.random.default_rng(0).lognormal(3, 1, 20_000)
    for value in values:
        latencies.add(float(value))
    for percent in (50, 99):
        assert latencies.percentile_ms(percent) == pytest.approx(np.percentile(values, percent), rel=0.025)
    assert Latencies().percentile_ms(50) is None


@pytest.mark.skipif(has_nvdec(), reason="NVIDIA's decoder is here")
def test_nvdec_is_missing_here(run_analysis: Analyze, tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.mp4", digit_frames(per_digit=1))
    with pytest.raises(UserError) as refused:
        run_analysis(video, decoder="cuda")
    assert "libnvcuvid" in str(refused.value)


def test_the_command_reads_the_standard_input(bundle: Artifact[BundleManifest], tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.mkv", digit_frames())
    command = [sys.executable, "-c", "from enginery.cli.main import main; main()"]
    command += ["video", "-", "--model", str(bundle.path), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ENGINERY_HOME": str(tmp_path / "home")}
    with video.open("rb") as file:
        done = subprocess.run(
            command, stdin=file, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert f"{len(SHOWN) * PER_DIGIT} frames of 1 stream labelled" in done.stdout


def test_frames_are_transformed_as_images_are_to_the_bit() -> None:
    """Of sizes whose scaling and cropping round in every way."""
    spec, random = TransformSpec(resize_size=72, crop_size=64), np.random.default_rng(0)
    frames = [random.integers(0, 256, (*size, 3), np.uint8) for size in ((120, 200), (321, 77), (64, 64), (135, 91))]
    files = [io.BytesIO() for _ in frames]
    for frame, file in zip(frames, files, strict=True):
        Image.fromarray(frame).save(file, "PNG")
    expected = ImageBatches(spec, 4).load([file.getvalue() for file in files], ["image"] * 4)
    np.testing.assert_array_equal(FrameBatches(spec, 4).transform(frames), expected)


def test_a_queue_of_one_frame_keeps_the_newest(run_analysis: Analyze, tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.mp4", digit_frames())
    analysis = run_analysis(video, live="always", queue_frames=1, batch_size=1, max_wait_ms=0)
    (stream,) = analysis.manifest.streams
    assert stream.num_labelled + stream.num_dropped == stream.num_decoded == len(SHOWN) * PER_DIGIT
    assert lines(analysis, "frames.jsonl")[-1]["frame"] == stream.num_decoded - 1


def test_the_command_ends_with_2_where_a_video_could_not_be_read(
    bundle: Artifact[BundleManifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    good = write_video(tmp_path / "good.mp4", digit_frames(per_digit=1))
    (tmp_path / "bad.mp4").write_text("no video")
    arguments = [str(good), str(tmp_path / "bad.mp4"), "--model", str(bundle.path), "--out", str(tmp_path / "out")]
    with refuses("unread-videos"):
        CliRunner().invoke(video_command, arguments, catch_exceptions=False)
    assert (tmp_path / "out" / "index.html").is_file()
    with refuses("no-frames"):
        CliRunner().invoke(video_command, [*arguments[1:4], "--out", str(tmp_path / "none")], catch_exceptions=False)
