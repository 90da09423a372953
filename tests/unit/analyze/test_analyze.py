"""Videos in, labels out: what frames are called, what hostile files can do, and how live streams are kept up with."""

import base64
import errno
import io
import itertools
import json
import multiprocessing
import os
import platform
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import psutil
import pytest
from av.stream import Disposition
from av.video.reformatter import ColorRange
from click.testing import CliRunner
from mlflow import MlflowClient
from PIL import Image

from components.analyze import component
from components.analyze import page as page_module
from components.analyze import streams as streams_module
from components.analyze.annotation import AnnotatedVideo
from components.analyze.answers import FrameAnswers
from components.analyze.config import AnalyzeConfig
from components.analyze.labelling import NO_FRAME, label
from components.analyze.processes import _PipeSink
from components.analyze.results import HeldClasses, Latencies, StreamResult, Thumbnails, Timeline
from components.analyze.run import outcome
from components.analyze.streams import Streams
from components.analyze.videos import OpenVideo, find_videos, has_nvdec, planes_of, rgb_images
from components.common.contracts.errors import UserError
from components.common.contracts.manifests import AnalysisManifest, Artifact, BundleManifest, load
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import TransformSpec
from components.common.data.dali_pipelines import FrameBatches, ImageBatches
from components.common.process.steplog import StepLog
from components.common.tasks.answers import Answers, answers_of
from components.promote.pyfunc import BundleModel
from enginery.cli.video import video as video_command
from tests.conftest import Bundle
from tests.processes import ROOT, on_small_disk, start_python
from tests.unit.analyze.conftest import PER_DIGIT, SHOWN, Analyze, digit_frames, lines, pictures_of, write_video
from tests.unit.analyze.rtsp import RtspServer
from tests.unit.refusals import refuses
from tests.unit.shapes import Chain
from tests.waiting import wait_until


def test_frames_are_answered_together_as_one_by_one(bundle: Bundle) -> None:
    answers = FrameAnswers(bundle.manifest, AnalyzeConfig(sources=("a.mp4",), top_k=2))
    outputs = np.random.default_rng(0).normal(size=(4, len(bundle.manifest.classes))).astype(np.float32)
    outputs[1] = np.exp(outputs[1]) / np.exp(outputs[1]).sum()  # of a softmax already
    together = answers.answers(outputs, 4 * [(96, 128)])
    assert together == [answers.answer(output, (96, 128)) for output in outputs]
    assert together[1]["probabilities"] == pytest.approx(sorted(outputs[1].tolist())[:-3:-1], abs=1e-6)
    least = outputs[3].argmin()
    outputs[2, 1], outputs[3, least] = np.nan, -np.inf  # of some classes minus infinity is an answer
    nothing = {"labels": [], "probabilities": []}
    found = answers.answers(outputs, 4 * [(96, 128)])
    assert found[:3] == [*together[:2], nothing]
    assert found[3]["labels"] == together[3]["labels"]


@pytest.mark.parametrize(
    ("name", "codec", "size"),
    [
        ("a.mp4", "libx264", (96, 128)),
        ("b.mkv", "libx265", (90, 122)),  # rows that FFmpeg pads
        ("c.webm", "libvpx-vp9", (75, 101)),
        ("d.mp4", "libsvtav1", (96, 128)),
    ],
)
def test_labels_of_frames_are_those_of_images(
    run_analysis: Analyze, bundle: Bundle, tmp_path: Path, name: str, codec: str, size: tuple[int, int]
) -> None:
    video = write_video(tmp_path / name, digit_frames(size), codec)
    analysis = run_analysis(video)
    stills = pictures_of(video)
    assert len(stills) == len(SHOWN) * PER_DIGIT
    expected = BundleModel(bundle, "int8", "auto").predict(stills, {"top_k": 3})
    found = lines(analysis, "frames.jsonl")
    assert [line["frame"] for line in found] == list(range(len(stills)))
    assert [line["labels"] for line in found] == expected["labels"].tolist()
    np.testing.assert_allclose([line["probabilities"] for line in found], expected["probabilities"].tolist(), atol=1e-6)
    assert [line["time_s"] for line in found] == [round(index / 30, 3) for index in range(len(stills))]
    (stream,) = analysis.manifest.streams
    assert (stream.width, stream.height, stream.num_decoded, stream.problem) == (*size[::-1], len(stills), "")
    assert stream.codec == {"libx264": "h264", "libx265": "hevc", "libvpx-vp9": "vp9", "libsvtav1": "av1"}[codec]


@pytest.mark.parametrize("model", ["detector", "segmenter"])
def test_boxes_and_masks_of_frames_are_those_of_images(
    run_analysis: Analyze, request: pytest.FixtureRequest, detection_chain: Chain, tmp_path: Path, model: str
) -> None:
    bundle: Bundle = request.getfixturevalue(model)
    images = sorted((detection_chain.data / "val" / "images").iterdir())[:10]
    frames = [np.asarray(Image.open(image).convert("RGB").resize((192, 144))) for image in images for _ in range(4)]
    video = write_video(tmp_path / "shapes.mp4", frames, crf="12")
    analysis = run_analysis(video, model=bundle, annotate=True, hold_frames=3)
    stills = pictures_of(video)
    answers = BundleModel(bundle, "int8", "auto").predict(stills).to_dict("records")
    found = lines(analysis, "frames.jsonl")
    known = {"stream", "frame", "time_s"}
    assert [{name: line[name] for name in line if name not in known} for line in found] == [
        {name: answer[name] for name in answer if name != "mask"} for answer in answers
    ]
    scores, least = ("scores", 0.3) if model == "detector" else ("shares", 0.01)
    shown = [{c for c, score in zip(line["classes"], line[scores], strict=True) if score >= least} for line in found]
    assert len({frozenset(classes) for classes in shown}) > 1
    (stream,) = analysis.manifest.streams
    assert stream.shares_pct == {
        name: round(100 * sum((name in classes) or (name == "(none)" and not classes) for classes in shown) / 40, 3)
        for name in stream.shares_pct
    }
    held = [line for line in lines(analysis, "events.jsonl") if line["event"] in ("held", "changed")]
    assert len(held) > 1
    for before, line in pairwise([{"classes": []}, *held]):
        rows = shown[line["since_frame"] : line["frame"] + 1]
        assert len(rows) == 3
        assert {*line["classes"]} - {*before["classes"]} <= set.intersection(*rows)
        assert not ({*before["classes"]} - {*line["classes"]}) & set.union(*rows)
    assert_drawn(analysis, stills, answers, answers_of(bundle.manifest.task))


def assert_drawn(
    analysis: Artifact[AnalysisManifest], stills: list[np.ndarray], answers: list[dict[str, Any]], task: Answers
) -> None:
    """The annotated video shows the answers, and so do the page's thumbnails."""
    for picture, still, answer in zip(pictures_of(analysis.file("0000_shapes.mp4")), stills, answers, strict=True):
        wanted = np.asarray(task.drawn(Image.fromarray(still), answer))
        drawn = (wanted != still).any(axis=2)
        drawn[:24] = False  # the bar with text
        if drawn.any():
            near, far = (np.abs(picture[drawn] - each[drawn].astype(int)).mean() for each in (wanted, still))
            assert near < far
    page = analysis.file("index.html").read_text()
    thumbnail = Image.open(io.BytesIO(base64.b64decode(page.split("data:image/jpeg;base64,")[1].partition('"')[0])))
    wanted = np.asarray(task.drawn(Image.fromarray(stills[0]), answers[0])).astype(int)
    assert np.abs(wanted - np.asarray(thumbnail)).mean() < 8
    assert f"0:00.0 {task.summary(answers[0])}" in page


def test_events_page_and_annotated_video_of_a_folder(run_analysis: Analyze, tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    (folder / "inside").mkdir(parents=True)
    frames = [frame for frame in digit_frames(per_digit=4) for _ in range(4)]
    write_video(folder / "one.mp4", frames)
    write_video(folder / "inside" / "two.mp4", frames[::-1])
    analysis = run_analysis(folder, annotate=True, hold_frames=4, min_probability=0.3)
    assert [stream.name for stream in analysis.manifest.streams] == ["inside/two.mp4", "one.mp4"]
    events = [line for line in lines(analysis, "events.jsonl") if line["stream"] == "one.mp4"]
    assert (events[0]["event"], events[-1]["event"]) == ("opened", "ended")
    assert sum(line["event"] == "ended" for line in events) == 1
    held = [line for line in events if line["event"] in ("held", "changed")]
    assert [line["event"] for line in held] == ["held"] + ["changed"] * (len(held) - 1)
    for line in held:
        assert line["frame"] == line["since_frame"] + 3
        assert len(line["classes"]) == 1
    page = analysis.file("index.html").read_text()
    assert page.count('class="timeline"') == 2
    assert "data:image/jpeg;base64," in page
    for name in ("0000_two.mp4", "0001_one.mp4"):
        assert len(pictures_of(analysis.file(name))) == len(frames)
        assert name in analysis.manifest.files
        assert f'href="{name}"' in page


def test_an_annotated_video_that_was_not_written_in_whole_is_none(tmp_path: Path) -> None:
    video, before = AnnotatedVideo(tmp_path / "a.mp4"), resource.getrlimit(resource.RLIMIT_FSIZE)
    for number, pixels in enumerate(digit_frames()):
        video.write(Image.fromarray(pixels), number / 30, "")
    num_bytes = sum(file.stat().st_size for file in tmp_path.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes + 4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            video.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "a.mp4").exists()


def test_an_annotated_video_is_complete_once_its_stream_has_ended(run_analysis: Analyze, tmp_path, monkeypatch) -> None:
    for number in range(8):
        write_video(tmp_path / f"{number}.mp4", digit_frames(per_digit=4))
    num_open = [0]

    class CountedVideo(AnnotatedVideo):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            num_open.append(num_open[-1] + 1)

        def close(self) -> None:
            super().close()
            num_open.append(num_open[-1] - 1)

    monkeypatch.setattr("components.analyze.labelling.AnnotatedVideo", CountedVideo)
    monkeypatch.setattr("components.analyze.labelling.num_readers", lambda _: 1)
    run_analysis(tmp_path, annotate=True, queue_frames=2, batch_size=2)
    assert (max(num_open) <= 4, num_open[-1]) == (True, 0)


def test_what_is_broken_is_named_and_the_rest_is_labelled(run_analysis: Analyze, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(page_module, "_MAX_SHOWN", 5)
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
    assert (seen["good.mp4"].num_corrupt, seen["damaged.264"].num_corrupt > 0) == (0, True)
    for name in names[2:]:
        assert (seen[name].num_labelled, seen[name].codec) == (0, "")
        assert "is no video that can be read" in seen[name].problem
    page = analysis.file("index.html").read_text()  # has room for these five
    assert [name for name in names if name in page] == [*names[2:]]


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4"])
def test_a_file_that_ends_before_its_declared_end_is_told(run_analysis: Analyze, tmp_path: Path, name: str) -> None:
    """Sound that lasts longer than the pictures is no such end."""
    whole, cut = tmp_path / name, tmp_path / f"cut-{name}"
    frames, sound = [], []
    with av.open(str(whole), "w", options={"movflags": "faststart"} if name == "a.mp4" else {}) as container:
        video, audio = container.add_stream("libx264", rate=30), container.add_stream("aac", rate=44_100)
        video.height, video.width, video.pix_fmt = 96, 128, "yuv420p"
        for pixels in digit_frames():
            frames += video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24"))
        frames += video.encode(None)
        for number in range(150):  # 3.5 s
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            silence.sample_rate, silence.pts = 44_100, 1024 * number
            sound += audio.encode(silence)
        container.mux(sorted([*frames, *sound, *audio.encode(None)], key=lambda packet: packet.dts * packet.time_base))
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    analysis = run_analysis(whole, cut)
    first, second = analysis.manifest.streams
    assert (first.num_labelled, first.problem) == (len(frames), "")
    assert 0 < second.num_labelled < len(frames)
    assert re.search(r"breaks off after [0-9.]+ of 3\.5 s", second.problem)
    assert "1 not read to the end" in outcome(analysis)


@pytest.mark.parametrize("matrix", [(0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0), (-1, 0, 0, 1), (0, 1, 1, 0)])
def test_frames_are_turned_and_mirrored_as_their_file_says(tmp_path: Path, matrix: tuple[int, ...]) -> None:
    plain = write_video(tmp_path / "a.mp4", digit_frames(per_digit=1))
    expected = first_frame(plain)
    data = bytearray(plain.read_bytes())
    at = data.index(b"tkhd") + 44
    across, down = np.array(matrix).reshape(2, 2)  # where the picture's axes go
    data[at : at + 20] = struct.pack(">5i", *across << 16, 0, *down << 16)
    plain.write_bytes(data)
    expected = expected if across[0] else expected.transpose(1, 0, 2)
    expected = expected[:: (across + down)[1], :: (across + down)[0]]
    np.testing.assert_array_equal(first_frame(plain), expected)


def first_frame(path: Path) -> np.ndarray:
    with closing(OpenVideo(*find_videos((str(path),)), decoder="cpu", read_timeout_s=1.0)) as video:
        return next(video.frames()).array()


def test_the_cover_of_a_recording_is_no_video(run_analysis: Analyze, tmp_path: Path) -> None:
    frames = [av.VideoFrame.from_ndarray(pixels, format="rgb24") for pixels in digit_frames(per_digit=1)]
    with av.open(str(tmp_path / "song.mp4"), "w") as container:
        sound, cover = container.add_stream("aac", rate=44_100), container.add_stream("mjpeg", rate=30)
        cover.width, cover.height, cover.pix_fmt = frames[0].width, frames[0].height, "yuvj420p"
        cover.disposition = Disposition.attached_pic
        silence = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        silence.sample_rate = 44_100
        for stream, frame in ((cover, frames[0].reformat(format="yuvj420p")), (sound, silence)):
            container.mux([*stream.encode(frame), *stream.encode(None)])
    video = write_video(tmp_path / "a.mp4", digit_frames(per_digit=1))
    song, seen = run_analysis(tmp_path / "song.mp4", video).manifest.streams
    assert (song.num_labelled, seen.num_labelled) == (0, len(frames))
    assert "no video stream" in song.problem


def test_time_continues_where_a_clock_is_set_back(run_analysis: Analyze, tmp_path: Path) -> None:
    once = write_video(tmp_path / "once.ts", digit_frames()).read_bytes()
    (tmp_path / "twice.ts").write_bytes(2 * once)
    found = lines(run_analysis(tmp_path / "twice.ts"), "frames.jsonl")
    assert len(found) == 2 * len(SHOWN) * PER_DIGIT
    steps = np.diff([line["time_s"] for line in found])
    np.testing.assert_allclose(steps, 1 / 30, atol=0.002)


def test_streams_have_names_of_their_own(run_analysis: Analyze, tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.mp4", digit_frames(per_digit=1))
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        (folder / "a.mp4").write_bytes(video.read_bytes())
    strange = Path(os.fsdecode(os.fsencode(folders[0]) + b"/no\xffutf8\x1b.mp4"))
    strange.write_bytes(video.read_bytes())
    analysis = run_analysis(*folders, folders[1] / "a.mp4")  # the last one twice
    expected = [str(folders[0] / "a.mp4"), r"no\udcffutf8\x1b.mp4", str(folders[1] / "a.mp4")]
    assert [stream.name for stream in analysis.manifest.streams] == expected
    assert {line["stream"] for line in lines(analysis, "frames.jsonl")} == {*expected}


def test_what_no_frame_can_be_decoded_of_is_a_problem(run_analysis: Analyze, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("components.analyze.videos._MAX_PIXELS", 96 * 128)
    good = write_video(tmp_path / "good.mp4", digit_frames(per_digit=1))
    large = write_video(tmp_path / "large.mp4", digit_frames((98, 128), per_digit=1))
    long = write_video(tmp_path / "long.mkv", [np.zeros((2, 202, 3), np.uint8)], "ffv1")
    streams = run_analysis(good, large, long).manifest.streams
    expected = [(4, False), (0, True), (0, True)]
    assert [(stream.num_labelled, "larger than 8K" in stream.problem) for stream in streams] == expected


def test_a_reader_that_fails_ends_all(tmp_path: Path) -> None:
    def say(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    video = write_video(tmp_path / "a.mp4", digit_frames(per_digit=1))
    config = resolve(AnalyzeConfig, "analyze", {"sources": [str(video)]})
    with Streams(find_videos(config.sources), config, 1, say) as streams, pytest.raises(OSError, match="No space"):
        streams.take(4)


def test_a_pipe_that_is_silent_is_left_in_time(run_analysis: Analyze, tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.mp4", digit_frames(per_digit=1))
    os.mkfifo(tmp_path / "pipe")
    held_open, began = os.open(tmp_path / "pipe", os.O_RDWR), time.monotonic()
    threading.Timer(20.0, os.close, [held_open]).start()
    analysis = run_analysis(video, tmp_path / "pipe", max_seconds=1.0)
    assert time.monotonic() - began < 15
    assert [(stream.num_labelled, stream.problem) for stream in analysis.manifest.streams] == [(4, ""), (0, NO_FRAME)]
    ended = [line["stream"] for line in lines(analysis, "events.jsonl") if line["event"] == "ended"]
    assert ended == ["a.mp4", "pipe"]


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
    with refuses(code):
        run_analysis(source)


def test_passwords_of_addresses_are_refused_and_taken_from_netrc(run_analysis: Analyze, tmp_path, monkeypatch) -> None:
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
    began = time.time()
    with RtspServer(digit_frames()) as server:

        def trouble() -> None:
            time.sleep(1.5)
            server.paused.set()
            time.sleep(0.9)
            server.paused.clear()
            time.sleep(1.0)
            server.cut()

        threading.Thread(target=trouble, daemon=True).start()
        analysis = run_analysis(server.url, max_seconds=8.0, stall_seconds=0.5)
    (stream,) = analysis.manifest.streams
    events = [line["event"] for line in lines(analysis, "events.jsonl") if line["event"] not in ("held", "changed")]
    assert stream.num_lost >= 1
    assert events[0] == "opened"
    assert events[1:5] == ["stalled", "resumed", "lost", "back"]
    found = lines(analysis, "frames.jsonl")
    assert [line["frame"] for line in found] == sorted({line["frame"] for line in found})
    assert [line["time_s"] for line in found] == sorted(line["time_s"] for line in found)
    times = [datetime.fromisoformat(line["at"]).timestamp() for line in found]
    assert began <= times[0] <= times[-1] <= time.time()
    assert all("at" in line for line in lines(analysis, "events.jsonl"))
    assert stream.latency_p99_ms is not None


def test_a_consumer_that_is_too_slow_drops_frames_and_stays_near_now(run_analysis: Analyze, monkeypatch) -> None:
    import components.analyze.labelling as steps

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
    assert stream.latency_p99_ms < 1500  # two that wait, one that is under way, on a busy machine


def start(bundle: Bundle, folder: Path, *options: str, sources: Sequence[str], **pipes: Any) -> "subprocess.Popen[str]":
    """The step in a process of its own, into `analysis` of a folder."""
    words = ("--bundle", bundle.path, *options, "--output", folder / "analysis", "--sources", json.dumps(sources))
    return start_python("-m", "components.analyze", *words, **pipes)


def test_signals_to_the_group_reach_no_process_that_starts(bundle: Bundle, tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", digit_frames())
    write_video(tmp_path / "b.mp4", digit_frames())
    process = start(bundle, tmp_path, "--num-processes", "2", sources=[str(tmp_path)], start_new_session=True)
    children: list[psutil.Process] = []
    while process.poll() is None and len(children) < 2:
        running = psutil.Process(process.pid).children()
        children = [child for child in running if "spawn_main" in "".join(child.cmdline())]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 or "[no-frames]" in said  # some may have been labelled
    assert "Traceback" not in said
    assert not any(child.is_running() for child in children)


def test_events_of_a_process_are_told_at_once() -> None:
    here, there = multiprocessing.Pipe()
    sink = _PipeSink(there)
    sink.write("frames", "1\n")
    sink.write("events", "2\n")
    assert (here.recv(), here.poll()) == (("events", "2\n"), False)
    sink.flush()
    assert here.recv() == ("frames", "1\n")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_ctrl_c_ends_with_whole_files(bundle: Bundle, tmp_path: Path, num_processes: int) -> None:
    output = tmp_path / "analysis"
    with RtspServer(digit_frames()) as server, RtspServer(digit_frames()) as other:
        options = ("--annotate", "true", "--num-processes", str(num_processes))
        process = start(bundle, tmp_path, *options, sources=[server.url, other.url])
        frames = output / "frames.jsonl"
        wait_until(lambda: frames.exists() and all(each.url in frames.read_text() for each in (server, other)))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    analysis = load(output, AnalysisManifest)
    found = Counter(line["stream"] for line in lines(analysis, "frames.jsonl"))
    assert found == {stream.name: stream.num_labelled for stream in analysis.manifest.streams}
    for stream, video in zip(analysis.manifest.streams, sorted(output.glob("*.mp4")), strict=True):
        assert len(pictures_of(video)) == stream.num_labelled > 0


def test_several_processes_find_what_one_finds(run_analysis: Analyze, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # is taken back
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    (tmp_path / "videos").mkdir()
    for number, size in enumerate([(96, 128), (64, 64), (96, 128), (90, 122)]):
        write_video(tmp_path / "videos" / f"{number}.mp4", digit_frames(size))
    (tmp_path / "videos" / "broken.mp4").write_bytes(b"no video")
    one = run_analysis(tmp_path / "videos", annotate=True)
    one.path.rename(tmp_path / "one")
    one = load(tmp_path / "one", AnalysisManifest)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"  # also without a step, as `enginery video` has it
    several = run_analysis(tmp_path / "videos", annotate=True, num_processes=3)
    assert several.manifest.streams == one.manifest.streams
    assert [bool(stream.problem) for stream in one.manifest.streams] == 4 * [False] + [True]
    for name in ("frames.jsonl", "events.jsonl"):
        found, expected = (
            sorted(lines(analysis, name), key=lambda line: (line["stream"], line["frame"]))
            for analysis in (several, one)
        )
        assert found == expected
    videos = sorted(file.name for file in one.path.glob("*.mp4"))
    assert videos == ["0000_0.mp4", "0001_1.mp4", "0002_2.mp4", "0003_3.mp4"]
    for video in videos:
        assert len(pictures_of(several.path / video)) == len(SHOWN) * PER_DIGIT
    own = re.compile(r"[0-9.,]+ frames/s|in [0-9:.]+:|[0-9]+ cores")
    pages = [own.sub("", analysis.file("index.html").read_text()) for analysis in (several, one)]
    assert pages[0] == pages[1]


def test_nothing_is_read_until_all_processes_are_ready(bundle: Bundle, tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", digit_frames())
    said: list[str] = []
    before: list[str] = []

    def meet() -> None:
        time.sleep(0.5)  # in which a reader would have opened the file
        before.extend(said)

    sink = SimpleNamespace(write=lambda kind, line: said.append(line), flush=lambda: None)
    sources = list(enumerate(find_videos((str(tmp_path),))))
    label(AnalyzeConfig(sources=(str(tmp_path),)), bundle, tmp_path, sources, sink, StepLog("analyze"), meet=meet)
    assert said
    assert not before


def test_a_process_that_is_killed_is_named(run_analysis: Analyze, tmp_path: Path) -> None:
    for number in range(2):
        write_video(tmp_path / f"{number}.mp4", digit_frames())

    def kill_one() -> None:
        wait_until(multiprocessing.active_children)
        multiprocessing.active_children()[0].kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    with refuses("worker-killed", setting="analyze.num_processes"):
        run_analysis(tmp_path, num_processes=2)
    killer.join()
    assert not multiprocessing.active_children()


def test_ctrl_c_ends_a_pipe_that_is_silent(bundle: Bundle, tmp_path: Path) -> None:
    process = start(bundle, tmp_path, sources=["-"], stdin=subprocess.PIPE)
    wait_until((tmp_path / "analysis" / "events.jsonl").exists, process=process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 2
    assert "no-frames" in process.stderr.read()


def test_a_class_is_held_once_it_was_likeliest_often_enough_and_others_until_they_are_missing() -> None:
    events = held_events(["a", "a", "b", "a", "a", "a", "", "", "", "a", "b", "b", "b"], shows_one=True)
    assert events == {
        5: {"classes": ("a",), "since_frame": 3, "since_s": 0.3},
        12: {"classes": ("b",), "since_frame": 10, "since_s": 1.0, "before": ("a",), "before_s": 0.7},
    }
    events = held_events(["a", "ab", "ab", "b", "ab", "a", "b", "b", "b", "", "", "", "b"], shows_one=False)
    assert events == {
        2: {"classes": ("a",), "since_frame": 0, "since_s": 0.0},
        3: {"classes": ("a", "b"), "since_frame": 1, "since_s": 0.1, "before": ("a",), "before_s": 0.1},
        8: {"classes": ("b",), "since_frame": 6, "since_s": 0.6, "before": ("a", "b"), "before_s": 0.5},
        11: {"classes": (), "since_frame": 9, "since_s": 0.9, "before": ("b",), "before_s": 0.3},
    }


def held_events(frames: Sequence[str], *, shows_one: bool) -> dict[int, dict[str, Any]]:
    """By frame. Each letter of a frame is a class that it shows."""
    held = HeldClasses(3, shows_one=shows_one)
    seen = [held.update(shown, number, number / 10) for number, shown in enumerate(frames)]
    return {number: event for number, event in enumerate(seen) if event}


def test_what_is_kept_of_hours_stays_small_and_right() -> None:
    timeline, thumbnails, result = Timeline(), Thumbnails(), StreamResult(1, shows_one=True)
    pixels = np.zeros((48, 64, 3), np.uint8)
    for second in range(4 * 3600):
        timeline.add(["abcd"[second // 3600], *"x" * (second % 3 > 0)], second)
        thumbnails.offer(lambda: pixels, second, [str(second % 5)], "", lambda image: image)
        result.keep_event({"event": "held"})
    segments = list(timeline.segments())
    assert sorted(name for name, _, _ in segments) == ["a", "b", "c", "d", "x"]
    begins = {name: begin for name, begin, _ in segments}
    assert begins == pytest.approx({"a": 0, "b": 3600, "c": 7200, "d": 10800, "x": 0}, abs=timeline.bin_s)
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


def test_the_command_reads_the_standard_input(bundle: Bundle, tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.mkv", digit_frames())
    words = ("-m", "enginery.cli.main", "video", "-", "--model", bundle.path, "--out", tmp_path / "out")
    variables = {"ENGINERY_HOME": str(tmp_path / "home")}
    with video.open("rb") as file:
        process = start_python(*words, env=variables, stdin=file, stdout=subprocess.PIPE)
    printed, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert f"{len(SHOWN) * PER_DIGIT} frames of 1 stream labelled" in printed


def test_frames_are_transformed_as_images_are_to_the_bit() -> None:
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


@pytest.mark.parametrize(("more_bytes", "room"), [(1 << 30, 12), (0, 3)])
def test_more_frames_of_files_wait_where_they_are_small(more_bytes: int, room: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(streams_module, "_MORE_BYTES", more_bytes)
    config = AnalyzeConfig(sources=(str(write_video(tmp_path / "a.mp4", digit_frames())),), queue_frames=3)
    with Streams(find_videos(config.sources), config, 1, lambda *_, **__: None) as streams:
        (state,) = streams.states
        wait_until(lambda: state.num_decoded > room, seconds=20)
        time.sleep(0.1)
        assert (state.num_decoded, len(state.queue)) == (room + 1, room)  # the last waits for room
        assert [frame.number for _, frame in streams.take(room)] == [*range(room)]


def test_frames_of_many_short_files_wait_no_more_than_those_of_long_ones(tmp_path: Path) -> None:
    for number in range(12):
        write_video(tmp_path / f"{number:02}.mp4", digit_frames(per_digit=1))
    config = AnalyzeConfig(sources=(str(tmp_path),), queue_frames=2)  # so that 8 of a file may wait
    with Streams(find_videos(config.sources), config, 1, lambda *_, **__: None) as streams:
        wait_until(lambda: sum(state.num_decoded for state in streams.states) >= 9, seconds=20)
        time.sleep(0.5)
        assert [state.num_decoded for state in streams.states] == [4, 4, 1, *9 * [0]]  # the last waits for room
        taken = 0
        while frames := streams.take(4):
            streams.wrote(frames)
            taken += len(frames)
        assert taken == 12 * 4


def test_the_kfp_component_keeps_a_record_in_mlflow(bundle: Bundle, tmp_path, store: str) -> None:
    video = write_video(tmp_path / "a.mp4", digit_frames(per_digit=1))
    given, written = SimpleNamespace(path=str(bundle.path)), SimpleNamespace(path=str(tmp_path / "analysis"))
    component.analyze.python_func(bundle=given, sources=[str(video)], settings={"every": 2}, analysis=written)
    assert load(Path(written.path), AnalysisManifest).manifest.streams[0].num_labelled == 2
    client = MlflowClient(tracking_uri=store)
    (record,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert record.data.metrics["frames_labelled"] == 2
    assert {file.path for file in client.list_artifacts(record.info.run_id)} >= {"index.html", "events.jsonl"}


def test_the_command_ends_with_2_where_a_video_could_not_be_read(bundle: Bundle, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    good = write_video(tmp_path / "good.mp4", digit_frames(per_digit=1))
    (tmp_path / "bad.mp4").write_text("no video")
    arguments = [str(good), str(tmp_path / "bad.mp4"), "--model", str(bundle.path), "--out", str(tmp_path / "out")]
    with refuses("unread-videos"):
        CliRunner().invoke(video_command, arguments, catch_exceptions=False)
    assert (tmp_path / "out" / "index.html").is_file()
    with refuses("no-frames"):
        CliRunner().invoke(video_command, [*arguments[1:4], "--out", str(tmp_path / "none")], catch_exceptions=False)


def test_files_that_were_not_reached_in_time_are_no_fault(bundle: Bundle, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("components.analyze.labelling.num_readers", lambda _: 1)
    files = [str(write_video(tmp_path / f"{name}.mp4", digit_frames(per_digit=1))) for name in "ab"]
    os.mkfifo(tmp_path / "pipe")
    held_open = os.open(tmp_path / "pipe", os.O_RDWR)
    threading.Timer(10.0, os.close, [held_open]).start()
    sources = [files[0], str(tmp_path / "pipe"), files[1]]
    arguments = [*sources, "--model", str(bundle.path), "--out", str(tmp_path / "out"), "--max-seconds", "1"]
    done = CliRunner().invoke(video_command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    streams = load(tmp_path / "out", AnalysisManifest).manifest.streams
    assert [(stream.num_labelled, stream.problem) for stream in streams] == [(4, ""), (0, NO_FRAME), (0, NO_FRAME)]


def test_nothing_is_waited_for_once_every_queue_is_full(run_analysis: Analyze, tmp_path: Path) -> None:
    video, began = write_video(tmp_path / "a.mp4", digit_frames()), time.monotonic()
    analysis = run_analysis(video, max_wait_ms=10_000, queue_frames=2)
    assert analysis.manifest.streams[0].num_labelled == 6 * 8
    assert time.monotonic() - began < 10  # of one wait


def test_sentences_are_in_no_video(run_analysis: Analyze, translator: Chain, tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.mp4", digit_frames(per_digit=1))
    with refuses("other-task"):
        run_analysis(video, model=load(translator.bundle, BundleManifest))


@pytest.mark.parametrize("pixel_format", ["nv12", "p010le"])
@pytest.mark.parametrize(("space", "is_full"), [*itertools.product([1, 2, 4, 5, 6, 7, 9], [False, True])])
def test_planes_of_gpus_become_the_colours_of_ffmpeg(pixel_format: str, space: int, is_full: bool) -> None:
    coarse = np.random.default_rng(0).integers(0, 256, (9, 16, 3), np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((160, 90), Image.Resampling.BICUBIC))
    color_range = ColorRange.JPEG if is_full else ColorRange.MPEG
    frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
        format="yuv420p", dst_colorspace=space, dst_color_range=color_range
    )
    expected = frame.to_ndarray(format="rgb24").astype(int)
    frame = frame.reformat(format=pixel_format, src_color_range=color_range, dst_color_range=color_range)
    other = np.zeros((2, 2, 3), np.uint8)
    given = [planes_of(frame), planes_of(frame, turns=1, is_mirrored=True), other]
    plain, turned, same = rgb_images(given)
    is_exact = pixel_format == "nv12" and platform.machine() == "x86_64"
    assert np.abs(plain.numpy() - expected).max() <= (0 if is_exact else 3)
    assert (given[0].shape, given[1].shape) == (plain.shape, turned.shape)
    np.testing.assert_array_equal(turned, np.rot90(plain.numpy()[::-1]))
    assert same is other


@pytest.mark.parametrize(("size", "options"), [("12k", ()), ("4k", ("--annotate",))])
def test_a_full_disk_is_named(bundle: Bundle, tmp_path, size: str, options: tuple[str, ...]) -> None:
    video = write_video(tmp_path / "a.mp4", digit_frames(per_digit=20))
    command = [sys.executable, "-m", "enginery.cli.main", "video", str(video), "--model", str(bundle.path)]
    environment = {**os.environ, "ENGINERY_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*on_small_disk(size), *command, *options, "--out", "/mnt/out"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no space left on /mnt" in done.stderr
    assert "[no-space]" in done.stderr
