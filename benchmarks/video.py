"""How many streams of 720p at 30 frames/s a machine labels, over decoding alone and the model alone.

    python -m benchmarks.video --machine cpu-2core --bundle DIR

Each number comes from files that are read as fast as they can be: `video_over_limit` is the rate of `analyze` over the
lower of the rates of its decoder alone and of its model alone (transform included).
"""

import statistics
import tempfile
import time
from pathlib import Path

import av
import click
import numpy as np

from benchmarks.results import write_result
from components.analyze.config import AnalyzeConfig
from components.analyze.run import analyze
from components.analyze.videos import OpenVideo, find_videos
from components.common.contracts.environment import num_cores
from components.common.contracts.manifests import BundleManifest, load
from components.common.data.dali_pipelines import FrameBatches
from components.common.process.steplog import QuietLog
from components.common.runtimes import runs_plans
from components.common.runtimes.selection import select_runtime

_FPS = 30
_BATCH_SIZE = 32


def write_video(path: Path, num_frames: int, seed: int) -> None:
    """H.264 of 1280x720: textures that move, since a still picture costs its decoder nothing."""
    generator = np.random.default_rng(seed)
    wide = generator.integers(0, 256, (90, 320, 3), np.uint8).repeat(8, 0).repeat(8, 1)  # [720, 2560, 3]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=_FPS)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        stream.options = {"preset": "veryfast", "g": "60"}
        for number in range(num_frames):
            shift = 4 * number % 1280
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(wide[:, shift : shift + 1280]), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def decode_rate(folder: Path, decoder: str) -> float:
    """Frames/s of decoding alone, by as many threads as analyze has."""
    from concurrent.futures import ThreadPoolExecutor

    sources = find_videos((str(folder),))

    def count(index: int) -> int:
        video = OpenVideo(sources[index], decoder=decoder, read_timeout_s=10.0)
        try:
            return sum(1 for _ in video.frames())
        finally:
            video.close()

    began = time.perf_counter()
    with ThreadPoolExecutor(min(len(sources), num_cores())) as pool:
        total = sum(pool.map(count, range(len(sources))))
    return total / (time.perf_counter() - began)


@click.command()
@click.option("--machine", required=True)
@click.option("--bundle", required=True, type=click.Path(path_type=Path))
@click.option("--name", default="video", show_default=True, help="Of the result.")
@click.option("--streams", default=4, show_default=True)
@click.option("--frames", default=300, show_default=True, help="Of each stream.")
@click.option("--decoder", default="auto", show_default=True)
@click.option("--turns", default=3, show_default=True)
def main(machine: str, bundle: Path, name: str, streams: int, frames: int, decoder: str, turns: int) -> None:
    models = load(bundle, BundleManifest)
    selected = select_runtime(models, "int8", "auto")
    assert selected.runner is not None
    batch_size = min(_BATCH_SIZE, models.manifest.shapes.max_batch)
    device_id = 0 if runs_plans(selected.runner.runtime) else None
    transform = FrameBatches(models.manifest.transform, batch_size, device_id)
    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "videos"
        folder.mkdir()
        for index in range(streams):
            write_video(folder / f"{index}.mp4", frames, index)
        still = [np.zeros((720, 1280, 3), np.uint8)] * batch_size
        for turn in range(turns):
            rates = {"decoder": decode_rate(folder, decoder)}
            began, done = time.perf_counter(), 0
            while time.perf_counter() - began < 5.0:
                selected.runner.infer(transform.transform(still))
                done += batch_size
            rates["model"] = done / (time.perf_counter() - began)
            config = AnalyzeConfig(sources=(str(folder),), decoder=decoder, batch_size=batch_size)  # type: ignore[arg-type]
            analysis = analyze(config, models, Path(temporary) / f"analysis{turn}", QuietLog("analyze"))
            rates["analyze"] = analysis.manifest.frames_per_s
            rates["over_limit"] = rates["analyze"] / min(rates["decoder"], rates["model"])
            print({key: round(value, 3) for key, value in rates.items()}, flush=True)
            runs.append(rates)
    measures = {
        f"video_{key}_frames_per_s": statistics.median(run[key] for run in runs) for key in ("decoder", "model")
    }
    measures |= {
        "video_frames_per_s": statistics.median(run["analyze"] for run in runs),
        "video_over_limit": statistics.median(run["over_limit"] for run in runs),
    }
    measures["video_streams_720p30"] = measures["video_frames_per_s"] / _FPS
    write_result(
        machine,
        name,
        measures=measures,
        runs=runs,
        notes=f"{models.manifest.architecture} at {models.manifest.transform.crop_size} px in INT8 by "
        f"{selected.runner.runtime}; {streams} files of {frames} frames, H.264 720p, decoder {decoder}. Decoding "
        "alone, the model alone with its transform, and analyze, in turns; on a CPU decoder and model share the "
        "cores, so that the lower of the two alone can't be reached.",
    )


if __name__ == "__main__":
    main()
