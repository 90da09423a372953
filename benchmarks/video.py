"""Streams of 720p at 30 frames/s that a machine labels, what limits it, and if frames are labelled as images.

    python -m benchmarks.video --machine cpu-2core --bundle DIR --dataset DIR

Each rate comes from files that are read as fast as they can be, by the decoder on the CPU and by NVDEC where that is.
`video_over_limit` is the rate of `analyze` over the lower of the rates of decoder and model, each measured alone, the
decoder by as many processes and threads. `video_over_sum` is that over all parts one after the other, the limit where
they share the cores of a CPU. With a dataset, a video of all its validation images is labelled, and the same decoded
frames as images, in the way of `predict`.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import av
import click
import numpy as np
import psutil
import torch
from PIL import ImageOps

from benchmarks.results import Results, result_options
from benchmarks.shards import validation_images
from components.analyze.config import AnalyzeConfig
from components.analyze.labelling import MOST_FRAMES, num_readers
from components.analyze.processes import num_processes, shares_of
from components.analyze.run import analyze
from components.analyze.videos import OpenVideo, VideoSource, find_videos, has_nvdec, rgb_images
from components.common.contracts.environment import keep_streams_apart, num_cores
from components.common.contracts.manifests import (
    AnalysisManifest,
    Artifact,
    BundleManifest,
    DatasetManifest,
    load,
)
from components.common.data.dali_pipelines import FrameBatches
from components.common.data.image_files import rgb
from components.common.process.steplog import QuietLog
from components.common.runtimes import runs_plans
from components.common.runtimes.runner import Runner
from components.common.runtimes.selection import select_runtime
from components.promote.pyfunc import BundleModel

Decoder = Literal["cpu", "cuda"]
Read = Literal["decoded", "frames"]
_DECODERS: tuple[Decoder, ...] = ("cpu", "cuda") if has_nvdec() else ("cpu",)
_barrier: Any = None  # of processes that decode, so that they begin together
_FPS = 30
_MODEL_S = 5.0  # that the transform and the model are measured alone
_LEAST_SIDE = 128  # px; NVDEC takes no smaller ones than about 48


def write_video(path: Path, frames: Iterable[np.ndarray], width: int, height: int, **options: str) -> None:
    """H.264 of [H, W, 3] uint8 frames."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=_FPS)
        stream.width, stream.height, stream.pix_fmt, stream.options = width, height, "yuv420p", options
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


def textures(num_frames: int) -> Iterator[np.ndarray]:
    """720p that moves, since a still picture costs its decoder nothing."""
    wide = np.random.default_rng(0).integers(0, 256, (90, 320, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    for number in range(num_frames):
        shift = 4 * number % 1280
        yield np.ascontiguousarray(wide[:, shift : shift + 1280])  # wide: [720, 2560, 3]


def decode_rate(
    sources: Sequence[VideoSource], decoder: Decoder, read: Read, on_gpu: bool, num_processes: int
) -> float:
    """Frames/s of OpenVideo's `read` alone, by as many processes and threads as analyze has."""
    cores, context = sorted(os.sched_getaffinity(0)), get_context("spawn")
    shares = [[source for _, source in share] for share in shares_of(list(enumerate(sources)), num_processes)]
    jobs = [(share, cores[number::num_processes], decoder, read, on_gpu) for number, share in enumerate(shares)]
    if num_processes == 1:
        done = [_decode(*jobs[0])]
    else:
        barrier = context.Barrier(num_processes)
        with ProcessPoolExecutor(num_processes, context, _meet_at, (barrier,)) as pool:
            done = list(pool.map(_decode, *zip(*jobs, strict=True)))
    totals, began, ended = zip(*done, strict=True)
    return float(sum(totals) / (max(ended) - min(began)))


def _meet_at(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _decode(
    sources: Sequence[VideoSource], cores: Sequence[int], decoder: Decoder, read: Read, on_gpu: bool
) -> tuple[int, float, float]:
    """Frames, and when the first file was opened and the last one closed."""
    os.sched_setaffinity(0, cores)
    readers = min(len(sources), num_readers(on_gpu))
    threads = max(1, num_cores() // readers)

    def count(source: VideoSource) -> int:
        video = OpenVideo(source, decoder=decoder, read_timeout_s=10.0, on_gpu=on_gpu, num_threads=threads)
        try:
            return sum(1 for _ in getattr(video, read)())
        finally:
            video.close()

    if on_gpu:
        torch.zeros(1, device="cuda")
    if _barrier is not None:
        _barrier.wait()
    began = time.monotonic()
    with ThreadPoolExecutor(readers) as pool:
        total = sum(pool.map(count, sources))
    return total, began, time.monotonic()


def call_rate(call: Callable[[], object], batch_size: int) -> float:
    """Frames/s of a call that takes a batch."""
    call()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < _MODEL_S:
        call()
        done += batch_size
    return done / (time.perf_counter() - began)


def speed(
    models: Artifact[BundleManifest], runner: Runner, decoders: Sequence[Decoder], folder: Path, output: Path
) -> dict[str, Any]:
    """Rates of each part alone, and of `analyze` by decoder, with what limits it."""
    on_gpu = runs_plans(runner.runtime)
    batch_size = min(MOST_FRAMES["gpu" if on_gpu else "cpu"], models.manifest.image_shapes.max_batch)
    transform = FrameBatches(models.manifest.image_transform, batch_size, 0 if on_gpu else None)
    still: list[Any] = list(textures(batch_size))
    if on_gpu:
        opened = OpenVideo(find_videos((str(folder),))[0], decoder=decoders[-1], read_timeout_s=10.0, on_gpu=True)
        still = [frame.pixels for frame in islice(opened.frames(), batch_size)]
        opened.close()
    images = transform.transform(rgb_images(still))
    alone = {
        "transform": call_rate(lambda: transform.transform(rgb_images(still)), batch_size),
        "model": call_rate(lambda: runner.infer(images), batch_size),
    }
    rates: dict[str, Any] = dict(alone)
    sources = find_videos((str(folder),))
    processes = num_processes(AnalyzeConfig(sources=(str(folder),)), models, sources)
    for decoder in decoders:
        decoded, pixels = (decode_rate(sources, decoder, read, on_gpu, processes) for read in ("decoded", "frames"))
        analyzed = analyzed_by(decoder, models, folder, output / decoder, batch_size=batch_size).manifest.frames_per_s
        limit, rate = min(("decoder", decoded), ("model", alone["model"]), key=lambda item: item[1])
        rates[decoder] = {
            "decoder": decoded,
            "pixels": pixels,
            "analyze": analyzed,
            "limit": limit,
            "over_limit": analyzed / rate,
            "over_sum": analyzed * (1 / pixels + sum(1 / each for each in alone.values())),
        }
    return rates


def analyzed_by(
    decoder: Decoder, models: Artifact[BundleManifest], source: Path, output: Path, **settings: Any
) -> Artifact[AnalysisManifest]:
    """Label a video, or those of a folder."""
    config = AnalyzeConfig(sources=(str(source),), decoder=decoder, **settings)
    return analyze(config, models, output, QuietLog("analyze"))


# Of each frame the classes named with their probabilities (of boxes scores, of masks shares), sorted.
Answers = list[list[tuple[str, float]]]
_NAMED = {"classification": ("labels", "probabilities"), "detection": ("classes", "scores")}
_NAMED["segmentation"] = ("classes", "shares")


def parity(
    models: Artifact[BundleManifest], dataset: Path, decoders: Sequence[Decoder], folder: Path
) -> dict[str, float]:
    """Answers about a video's frames against those of the same frames, decoded on the CPU, as images."""
    side = max(_LEAST_SIDE, models.manifest.image_transform.resize_size + 1) // 2 * 2
    data, video = load(dataset, DatasetManifest), folder / "images.mp4"
    images = (np.asarray(ImageOps.fit(rgb(each), (side, side))) for each in validation_images(data))
    write_video(video, images, side, side, crf="8", g="30")
    answers: dict[str, Answers] = {"images": list(_answers_of_images(models, video))}
    for decoder in decoders:
        analysis = analyzed_by(decoder, models, video, folder / f"images_{decoder}", top_k=1)
        rows = map(json.loads, analysis.file("frames.jsonl").read_text().splitlines())
        answers[decoder] = [_named(models, row) for row in rows]
    measures: dict[str, float] = {"video_images": len(answers["images"])}
    for name, first, second in (("cpu", "images", "cpu"), ("nvdec", "images", "cuda"), ("nvdec_cpu", "cpu", "cuda")):
        if second in answers:
            equal_pct, difference = _compared(answers[first], answers[second])
            measures[f"video_labels_equal_{name}_pct"] = equal_pct
            measures[f"video_probability_difference_{name}"] = difference
    if "cuda" in decoders:
        pairs = zip(_frames(video, "cpu"), _frames(video, "cuda"), strict=True)
        levels = (np.abs(first.astype(np.int16) - second) for first, second in pairs)
        found = [(each.mean(), each.max()) for each in levels]
        measures["video_pixel_difference_nvdec_mean"] = float(np.mean([mean for mean, _ in found]))
        measures["video_pixel_difference_nvdec_max"] = float(max(most for _, most in found))
    return measures


def hour(models: Artifact[BundleManifest], decoder: Decoder, folder: Path) -> dict[str, float]:
    """Memory over an hour of small video that is played as fast as it can be, in the last quarter over the first."""
    video, frame = folder / "hour.mp4", next(textures(1))[:144, :256]
    write_video(video, (np.roll(frame, number, 1) for number in range(3600 * _FPS)), 256, 144, preset="ultrafast")
    process, sizes = psutil.Process(), []
    with ThreadPoolExecutor(1) as pool:
        analysis = pool.submit(analyzed_by, decoder, models, video, folder / "hour")
        while not analysis.done():
            sizes.append(process.memory_info().rss)
            time.sleep(0.5)
    first, last = (max(quarter) for quarter in (sizes[: len(sizes) // 4], sizes[-(len(sizes) // 4) :]))
    return {
        "video_hour_frames": analysis.result().manifest.streams[0].num_labelled,
        "video_hour_memory_mb": last / 1e6,
        "video_hour_growth_mb": (last - first) / 1e6,
    }


def _compared(expected: Answers, actual: Answers) -> tuple[float, float]:
    """Share of frames with the same classes, as often, and in these the largest difference of a class's number."""
    pairs = list(zip(expected, actual, strict=True))
    equal = [(one, other) for one, other in pairs if [name for name, _ in one] == [name for name, _ in other]]
    differences = [abs(a - b) for one, other in equal for (_, a), (_, b) in zip(one, other, strict=True)]
    return 100 * len(equal) / len(pairs), max(differences, default=0.0)


def _named(models: Artifact[BundleManifest], answer: Mapping[str, Any]) -> list[tuple[str, float]]:
    names, numbers = (answer[key] for key in _NAMED[models.manifest.task])
    return sorted(zip(names, numbers, strict=True))


def _frames(video: Path, decoder: Decoder) -> Iterator[np.ndarray]:
    sources = find_videos((str(video),))
    opened = OpenVideo(*sources, decoder=decoder, read_timeout_s=10.0, on_gpu=decoder == "cuda")
    try:
        for frame in opened.frames():
            yield frame.array()
    finally:
        opened.close()


def _answers_of_images(models: Artifact[BundleManifest], video: Path) -> Iterator[list[tuple[str, float]]]:
    model, frames = BundleModel(models, "int8", "auto"), _frames(video, "cpu")
    while chunk := list(islice(frames, 256)):
        yield from (_named(models, row) for row in model.predict(chunk, {"top_k": 1}).to_dict("records"))


@click.command()
@click.option("--bundle", required=True, type=click.Path(path_type=Path), help="Of images.")
@click.option("--dataset", type=click.Path(path_type=Path), help="Of preprocess: also look at its validation images.")
@click.option("--name", default="video", show_default=True, help="Of the result.")
@click.option("--streams", default=4, show_default=True)
@click.option("--frames", default=300, show_default=True, help="Of each stream.")
@click.option("--turns", default=3, show_default=True)
@click.option("--decoder", "decoders", multiple=True, type=click.Choice(["cpu", "cuda"]), default=_DECODERS)
@click.option("--with-hour", is_flag=True, help="Also play an hour of video, and look at the memory.")
@result_options
def main(
    bundle: Path,
    dataset: Path | None,
    name: str,
    streams: int,
    frames: int,
    turns: int,
    decoders: tuple[Decoder, ...],
    with_hour: bool,
    results: Results,
) -> None:
    keep_streams_apart()
    models = load(bundle, BundleManifest)
    selected = select_runtime(models, "int8", "auto")
    assert selected.runner is not None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "videos"
        folder.mkdir()
        write_video(folder / "0.mp4", textures(frames), 1280, 720, preset="veryfast", g="60")
        for index in range(1, streams):  # all decode alike, and one is written once
            (folder / f"{index}.mp4").hardlink_to(folder / "0.mp4")
        measures = parity(models, dataset, decoders, Path(temporary)) if dataset else {}
        if with_hour:
            measures |= hour(models, decoders[-1], Path(temporary))
        runs = []
        for turn in range(turns):  # a run that is stopped leaves the turns before
            runs.append(speed(models, selected.runner, decoders, folder, Path(temporary) / f"turn{turn}"))
            print(json.dumps(runs[-1]), flush=True)
            limits = (f"{each}: {statistics.mode(run[each]['limit'] for run in runs)}" for each in decoders)
            results.write(
                name,
                measures=measures | _medians(runs, decoders),
                runs=runs,
                notes=f"{models.manifest.architecture} at {models.manifest.image_transform.crop_size} px in INT8 by "
                f"{selected.runner.runtime}; {streams} files of {frames} frames, H.264 720p. The slower of decoder and "
                f"model: {'; '.join(limits)}. decoder: decoded frames, on the GPU where NVDEC decodes; pixels: the "
                "same in RGB, of NVDEC its planes, by as many processes as analyze; transform: from there to the "
                "model's input, in one. Each alone, then analyze, in turns; on a CPU they share the cores, so that "
                "over_sum is what counts there.",
            )


def _medians(runs: Sequence[dict[str, Any]], decoders: Sequence[Decoder]) -> dict[str, float]:
    rates = {f"{part}_frames_per_s": [run[part] for run in runs] for part in ("transform", "model")}
    for decoder in decoders:
        for part, name in (("decoder", f"decoder_{decoder}"), ("pixels", f"pixels_{decoder}"), ("analyze", decoder)):
            rates[f"{name}_frames_per_s"] = [run[decoder][part] for run in runs]
    last = [run[decoders[-1]] for run in runs]
    rates["frames_per_s"] = [run["analyze"] for run in last]
    rates |= {part: [run[part] for run in last] for part in ("over_limit", "over_sum")}
    rates["streams_720p30"] = [run["analyze"] / _FPS for run in last]
    return {f"video_{name}": statistics.median(values) for name, values in rates.items()}


if __name__ == "__main__":
    main()
