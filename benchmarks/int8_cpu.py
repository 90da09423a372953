"""INT8 on a CPU beside that of peers and FP32: top-1, images/s and seconds of search, by model and instruction set.

    python -m benchmarks.int8_cpu --machine cpu-2core --model digits CHECKPOINT DATASET "" \\
        --model resnet18_224 WEIGHTS DATASET resnet18 --peer nncf NNCF_PYTHON --peer neural_compressor INC_PYTHON

All quantize the same checkpoint with the same calibration images, and choose, if they do, by the same other training
images: `export` as it is, and each of `benchmarks.peers` by the Python of an environment that has its packages. The
same OpenVINO runs all files. Each instruction set of this CPU is a process of its own, limited by oneDNN's variable;
the files take turns, every second time in reverse. A row that the result has already is replaced, the others stay.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np

from benchmarks.peers import PEERS
from benchmarks.results import Results, current_commit, result_options
from components.common.contracts.environment import num_cores
from components.common.contracts.instruction_sets import VARIABLE, available, instruction_set
from components.common.contracts.records import PairedComparison

_BATCH, _TURNS = 16, 21
_RANKS = 6, 16  # of 21 ordered values, from 1: the ends of the 97 % interval of their median


@click.command()
@click.option(
    "--model", "models", nargs=4, multiple=True, required=True, metavar="NAME CHECKPOINT DATASET ARCHITECTURE",
    help="The name in the result, what `components.export` reads, and the architecture of plain weights or ''.",
)  # fmt: skip
@click.option("--peer", "peers", nargs=2, multiple=True, required=True, metavar="NAME PYTHON", help=", ".join(PEERS))
@click.option("--images", default=256, show_default=True, help="Calibration images.")
@click.option("--selection", default=2000, show_default=True, help="Other training images, to choose by.")
@click.option("--validation", default=10_000, show_default=True, help="Validation images, at most.")
@click.option("--seconds", default=1.0, show_default=True, help="Of a turn.")
@click.option("--peer-seconds", default=600.0, show_default=True, help="After which a peer's search is ended.")
@click.option("--limit", multiple=True, help="Instruction sets; all of this CPU without it.")
@click.option("--here", is_flag=True, help="Measure in this process, and print JSON.")
@result_options
def main(
    models: tuple[tuple[str, str, str, str], ...],
    peers: tuple[tuple[str, str], ...],
    limit: tuple[str, ...],
    here: bool,
    results: Results,
    **options: Any,
) -> None:
    if here:
        print(json.dumps([_measure(*model, peers=dict(peers), **options) for model in models]))
        return
    same = [f"--machine={results.machine}"]
    same += [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    same += [word for peer in peers for word in ("--peer", *peer)]
    before = results.earlier("int8_peers")
    commit = current_commit()  # before results change what git has
    runs = {_key(run): {"commit": before["commit"], **run} for run in before["runs"]}
    for model in models:
        for own in limit or [entry for entry in available() if entry != "SSE41"]:
            command = [sys.executable, "-m", "benchmarks.int8_cpu", "--here", *same, "--model", *model]
            environment = {**os.environ, VARIABLE: own}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            (run,) = json.loads(done.stdout.splitlines()[-1])
            print({key: value for key, value in run.items() if key != "turns"}, flush=True)
            runs[_key(run)] = {"commit": commit, **run}
            _write(results, list(runs.values()), options["seconds"])


def _key(run: dict[str, Any]) -> tuple[str, str]:
    return run["model"], run["instruction_set"]


def _write(results: Results, runs: list[dict[str, Any]], seconds: float) -> None:
    measures = {}
    for run in runs:
        for name, peer in run["peers"].items():
            if "int8_over" in peer:
                suffix = f"{name}_{run['model']}_{run['instruction_set'].lower()}"
                measures[f"int8_over_{suffix}"] = peer["int8_over"]
                measures[f"delta_top1_points_over_{suffix}"] = peer["comparison"]["delta_points"]
    ends = [peer for run in runs for peer in run["peers"].values() if "int8_over" in peer]
    first = {
        "int8_over_peers_min": min((peer["int8_over"] for peer in ends), default=0.0),
        "int8_over_peers_high_min": min((peer["int8_over_high"] for peer in ends), default=0.0),
        "drop_lower_points_max": max((peer["comparison"]["drop_lower_points"] for peer in ends), default=0.0),
    }
    notes = (
        f"Batch {_BATCH}; ratios are medians of {_TURNS} turns of {seconds:g} s, low and high the median's 97 % "
        "interval. A peer's comparison is ours against it on the same validation images: lost and gained are images "
        "that it, or ours, alone gets right. drop_lower_points above 0: the peer is more accurate by more than the "
        "one-sided 95 % interval. The worst over models, peers and instruction sets stand first. Seconds of search: "
        "ours is all of `export`, a peer's its call alone. Each row names its commit."
    )
    results.write("int8_peers", measures=first | measures, runs=runs, notes=notes)


def _compile_file(path: Path, hints: dict[str, object]) -> Any:
    import openvino as ov
    from openvino import properties as props

    precision, threads = {props.hint.inference_precision: ov.Type.f32}, {props.inference_num_threads: num_cores()}
    return ov.Core().compile_model(path, "CPU", {**precision, **threads, **hints})


def _measure(
    name: str,
    checkpoint: str,
    dataset: str,
    architecture: str,
    *,
    peers: dict[str, str],
    images: int,
    selection: int,
    validation: int,
    seconds: float,
    peer_seconds: float,
) -> dict[str, Any]:
    """One model on one instruction set: export, quantize by the peers, predict, and time by turns."""
    from components.common.contracts.manifests import BundleManifest, DatasetManifest, load
    from components.common.contracts.settings import resolve
    from components.common.data.evaluation import predict
    from components.common.data.loader import Loader
    from components.common.process.steplog import StepLog
    from components.common.runtimes import openvino
    from components.common.runtimes.selection import fit_model
    from components.export.calibration import split_samples
    from components.export.config import ExportConfig
    from components.export.run import run as export

    data = load(Path(dataset), DatasetManifest)
    settings = {"num_calibration_images": images, "num_selection_images": selection, "tensorrt": "off"}
    config = resolve(ExportConfig, "export", {**settings, "architecture": architecture})
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        export(config, StepLog("export"), model=Path(checkpoint), dataset=Path(dataset), output=Path(folder, "bundle"))
        own_seconds = time.perf_counter() - started
        bundle = load(Path(folder, "bundle"), BundleManifest)
        record = bundle.manifest
        own = fit_model(record.cpu_models)
        files = {"fp32": bundle.file("fp32.onnx"), "int8": bundle.file(own.file)}
        samples = dict(
            zip(("calibration", "selection"), split_samples(config, data, record.transform, None), strict=True)
        )
        arrays = {
            key: np.concatenate([np.asarray(batch.images) for batch in part])[: part.num_images]
            for key, part in samples.items()
            if part is not None
        }
        labels = np.concatenate([np.asarray(batch.labels) for batch in samples["selection"] or ()])
        np.savez(Path(folder, "images.npz"), labels=labels, input_name=record.shapes.input_name, **arrays)
        del arrays
        budget = config.gate.max_drop_points
        found = {
            peer: _quantized_by(peer, python, files["fp32"], Path(folder), budget, peer_seconds)
            for peer, python in peers.items()
        }
        files |= {peer: entry["path"] for peer, entry in found.items() if "path" in entry}
        with patch.object(openvino, "_compile", _compile_file):  # NNCF's file is OpenVINO's own format, not ONNX
            runners = {key: openvino.OpenVINORunner(file, record.shapes) for key, file in files.items()}
        loader = Loader(data, "val", record.transform, batch_size=32, device_id=None)
        num_images = min(validation, data.manifest.splits["val"].num_images)
        top = predict(runners, _first(loader, num_images), num_images, lambda *_: None)
        turns = []
        for turn in range(_TURNS):
            order = list(runners) if turn % 2 else list(runners)[::-1]
            how = {"warmup_s": seconds / 10, "duration_s": seconds, "min_iterations": 1}
            turns.append({key: runners[key].measure(_BATCH, **how).images_per_s for key in order})
    for peer, entry in found.items():
        if entry.pop("path", None) is not None:
            entry |= _ratios(turns, peer)
            entry["comparison"] = _compare(top[peer], top["int8"])
    return {
        "model": name,
        "instruction_set": instruction_set(),
        "architecture": record.architecture,
        "num_images": top["fp32"].num_images,
        "file": own.file,
        "arithmetic": own.arithmetic,
        "method": record.calibration.method,
        "excluded_for_accuracy": len(record.calibration.excluded),
        "placement": [trial.model_dump(mode="json", exclude={"excluded"}) for trial in record.placement.trials]
        if record.placement is not None
        else [],
        "int8_layers": record.num_quantized_layers,
        "layers": record.num_quantizable_layers,
        "search_seconds": own_seconds,
        **{f"top1_{key}_pct": entry.score_pct for key, entry in top.items()},
        **{f"agreement_{key}_pct": entry.agreement_pct(top["fp32"]) for key, entry in top.items()},
        **{f"images_per_s_{key}": statistics.median(turn[key] for turn in turns) for key in files},
        "int8_over_fp32": _ratios(turns, "fp32")["int8_over"],
        "comparison": _compare(top["fp32"], top["int8"]),
        "peers": found,
        "turns": turns,
    }


def _first(loader: Any, num_images: int) -> Any:
    """The batches of the first images."""
    for batch in loader:
        if num_images <= 0:
            break
        num_images -= len(batch.images)
        yield batch


def _quantized_by(
    peer: str, python: str, fp32: Path, folder: Path, budget_points: float, seconds: float
) -> dict[str, Any]:
    """A peer's file and the seconds of its search, or why there is none."""
    output = folder / (f"{peer}.xml" if peer.startswith("nncf") else f"{peer}.onnx")
    command = [python, str(Path(__file__).with_name("peers.py")), peer, str(fp32), str(folder / "images.npz")]
    try:
        done = subprocess.run(
            [*command, str(output), str(budget_points)], stdout=subprocess.PIPE, check=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"had not ended after {seconds:g} s"}
    except subprocess.CalledProcessError as error:
        return {"failed": f"exit status {error.returncode}"}
    return {"path": output, "search_seconds": json.loads(done.stdout.splitlines()[-1])["seconds"]}


def _ratios(turns: list[dict[str, float]], other: str) -> dict[str, float]:
    """Median and interval of our INT8's speed over another's, by turns."""
    ratios = sorted(turn["int8"] / turn[other] for turn in turns)
    low, high = (ratios[rank - 1] for rank in _RANKS)
    return {"int8_over": statistics.median(ratios), "int8_over_low": low, "int8_over_high": high}


def _compare(reference: Any, own: Any) -> dict[str, Any]:
    """Ours against a reference on the same images."""
    lost, gained = int((reference.right & ~own.right).sum()), int((own.right & ~reference.right).sum())
    return PairedComparison.of(len(own.right), lost, gained).model_dump(mode="json")


if __name__ == "__main__":
    main()
