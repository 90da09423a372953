"""analyze: videos and a bundle -> what their frames show."""

import json
from pathlib import Path

from components.analyze.answers import FrameAnswers
from components.analyze.config import AnalyzeConfig
from components.analyze.labelling import FileSink, label
from components.analyze.page import page
from components.analyze.processes import label_by_processes, num_processes
from components.analyze.videos import find_videos
from components.common.contracts.environment import keep_streams_apart
from components.common.contracts.errors import UserError
from components.common.contracts.manifests import (
    AnalysisManifest,
    Artifact,
    BundleManifest,
    load,
    prepare_directory,
    seal,
    write_atomically,
)
from components.common.process.steplog import StepLog


def run(config: AnalyzeConfig, log: StepLog, *, bundle: Path, output: Path) -> str:
    """Label every frame. See the package's docstring."""
    models = load(bundle, BundleManifest, verify=(".onnx", ".plan"))
    analysis = analyze(config, models, output, log)
    manifest = analysis.manifest
    log.metrics(
        {
            "frames_labelled": sum(stream.num_labelled for stream in manifest.streams),
            "frames_dropped": sum(stream.num_dropped for stream in manifest.streams),
            "packets_corrupt": sum(stream.num_corrupt for stream in manifest.streams),
            "frames_per_s": manifest.frames_per_s,
        }
    )
    for name in ("index.html", "events.jsonl", "summary.json"):
        log.artifact(analysis.file(name))
    log.result(artifacts=[analysis.file("index.html")])
    return outcome(analysis)


def analyze(
    config: AnalyzeConfig, bundle: Artifact[BundleManifest], output: Path, log: StepLog
) -> Artifact[AnalysisManifest]:
    """Label the frames of all videos, and write the analysis.

    Ctrl-C ends it as the end of all videos does.

    Raises:
        UserError: a source can't be named so, or no video could be read.
        RuntimeUnavailable: nothing here runs the precision.
    """
    if bundle.manifest.text is not None:
        raise UserError(
            f"the bundle {bundle.path} translates sentences, and frames are images; name one of images",
            code="other-task",
        )
    keep_streams_apart()  # `enginery video` is no step
    sources = list(enumerate(find_videos(config.sources)))
    prepare_directory(output)
    processes = num_processes(config, bundle, [source for _, source in sources])
    with FileSink(output) as sink:
        if processes == 1:
            labelled = label(config, bundle, output, sources, sink, log)
        else:
            labelled = label_by_processes(config, bundle, output, sources, sink, log, processes)
    records = labelled.records
    if not any(record.num_labelled for record in records):
        problems = "; ".join(dict.fromkeys(record.problem for record in records))
        raise UserError(f"no frame could be read: {problems}", code="no-frames", setting="sources")
    seconds = labelled.ended_s - labelled.began_s
    frames_per_s = sum(record.num_labelled for record in records) / max(seconds, 1e-9)
    summary = {
        "architecture": bundle.manifest.architecture,
        "precision": config.precision,
        "runtime": labelled.runtime,
        "device": labelled.device,
        "seconds": round(seconds, 3),
        "frames_per_s": round(frames_per_s, 2),
        "streams": [record.model_dump(mode="json") for record in records],
    }
    write_atomically(output / "summary.json", json.dumps(summary, indent=1).encode())
    write_atomically(
        output / "index.html", page(summary, records, labelled.results, FrameAnswers(bundle.manifest, config)).encode()
    )
    return seal(
        output,
        AnalysisManifest,
        inputs={"bundle": bundle.digest},
        config=config,
        architecture=bundle.manifest.architecture,
        precision=config.precision,
        classes=bundle.manifest.classes,
        streams=records,
        frames_per_s=frames_per_s,
    )


def outcome(analysis: Artifact[AnalysisManifest]) -> str:
    """One line about an analysis."""
    streams = analysis.manifest.streams
    parts = [
        f"{sum(stream.num_labelled for stream in streams):,} frames of "
        f"{'1 stream' if len(streams) == 1 else f'{len(streams):,} streams'} labelled, "
        f"{analysis.manifest.frames_per_s:,.0f} frames/s"
    ]
    for name, number in (
        ("frames dropped", sum(stream.num_dropped for stream in streams)),
        ("broken packets", sum(stream.num_corrupt for stream in streams)),
        ("not read to the end", sum(bool(stream.problem) for stream in streams)),
    ):
        parts += [f"{number:,} {name}"] if number else []
    return ", ".join(parts)
