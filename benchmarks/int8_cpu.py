"""INT8 on a CPU beside NNCF's and FP32: agreement with FP32 and images/s, by model and instruction set.

    python -m benchmarks.int8_cpu --machine cpu-2core --model digits CHECKPOINT DATASET "" \\
        --model resnet18_224 WEIGHTS DATASET resnet18

Both quantize the same checkpoint with the same calibration images: `export` as it is, `nncf.quantize` with its
defaults. Each instruction set of this CPU is a process of its own, limited by oneDNN's variable; FP32, NNCF's file and
ours take turns, every second time in reverse. Needs nncf beside the rest: pip install nncf.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from benchmarks.results import write_result
from components.common.contracts.environment import num_cores
from components.common.contracts.instruction_sets import VARIABLE, available, instruction_set
from components.common.contracts.statistics import mcnemar

_BATCH, _TURNS, _SECONDS = 16, 41, 1.0
_RANKS = 14, 28  # of 41 ordered values, from 1: the ends of the 95 % interval of their median


@click.command()
@click.option("--machine", help="Plain name of the machine.")
@click.option(
    "--model", "models", nargs=4, multiple=True, required=True, metavar="NAME CHECKPOINT DATASET ARCHITECTURE",
    help="The name in the result, what `components.export` reads, and the architecture of plain weights or ''.",
)  # fmt: skip
@click.option("--images", default=256, show_default=True, help="Calibration images.")
@click.option("--limit", multiple=True, help="Instruction sets; all of this CPU without it.")
@click.option("--here", is_flag=True, help="Measure in this process, and print JSON.")
def main(
    machine: str, models: tuple[tuple[str, str, str, str], ...], images: int, limit: tuple[str, ...], here: bool
) -> None:
    if here:
        print(json.dumps([_measure(*model, images=images) for model in models]))
        return
    runs = []
    for model in models:
        for own in limit or [entry for entry in available() if entry != "SSE41"]:
            command = [
                sys.executable,
                "-m",
                "benchmarks.int8_cpu",
                "--here",
                "--images",
                str(images),
                "--model",
                *model,
            ]
            environment = {**os.environ, VARIABLE: own}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            runs += json.loads(done.stdout.splitlines()[-1])
            print({key: value for key, value in runs[-1].items() if key != "turns"}, flush=True)
    measures = {
        "int8_over_nncf_images_per_s": min(run["int8_over_nncf"] for run in runs),
        "int8_over_nncf_high": min(run["int8_over_nncf_high"] for run in runs),
        "agreement_p_value": min(run["agreement_p_value"] for run in runs),
        "int8_over_fp32_cpu_b16": min(run["int8_over_fp32"] for run in runs),
    }
    for run in runs:
        for key in ("int8_over_nncf", "int8_over_fp32", "agreement_int8_pct", "agreement_nncf_pct"):
            measures[f"{key}_{run['model']}_{run['instruction_set'].lower()}"] = run[key]
    notes = (
        f"Batch {_BATCH}; ratios are medians of {_TURNS} turns of {_SECONDS:g} s, low and high the median's "
        "95 % interval. Agreement: validation images on which the class is FP32's; its p-value is McNemar's, of the "
        "images on which one of the two files alone agrees. The smallest over models and instruction sets stand first."
    )
    write_result(machine, "int8_cpu", measures=measures, runs=runs, notes=notes)


def _compile_file(path: Path, hints: dict[str, object]) -> Any:
    import openvino as ov
    from openvino import properties as props

    precision, threads = {props.hint.inference_precision: ov.Type.f32}, {props.inference_num_threads: num_cores()}
    return ov.Core().compile_model(path, "CPU", {**precision, **threads, **hints})


def _measure(name: str, checkpoint: str, dataset: str, architecture: str, *, images: int) -> dict[str, Any]:
    """One model on one instruction set: export, quantize by NNCF, predict, and time by turns."""
    import nncf
    import openvino as ov

    from components.common.contracts.manifests import BundleManifest, DatasetManifest, load
    from components.common.contracts.settings import resolve
    from components.common.data.evaluation import predict
    from components.common.data.loader import Loader
    from components.common.process.steplog import StepLog
    from components.common.runtimes import openvino
    from components.common.runtimes.runner import to_numpy
    from components.common.runtimes.selection import fit_model
    from components.export.calibration import split_samples
    from components.export.config import ExportConfig
    from components.export.run import run as export

    data = load(Path(dataset), DatasetManifest)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"num_calibration_images": images, "tensorrt": "off", "architecture": architecture}
        config = resolve(ExportConfig, "export", settings)
        export(config, StepLog("export"), model=Path(checkpoint), dataset=Path(dataset), output=Path(folder, "bundle"))
        bundle = load(Path(folder, "bundle"), BundleManifest)
        record = bundle.manifest
        samples, _ = split_samples(config, data, record.transform, None)
        batches = [to_numpy(batch.images)[index : index + 1] for batch in samples for index in range(len(batch.images))]
        quantized = nncf.quantize(
            ov.Core().read_model(bundle.file("fp32.onnx")), nncf.Dataset(batches), subset_size=len(batches)
        )
        ov.save_model(quantized, Path(folder, "nncf.xml"), compress_to_fp16=False)
        own = fit_model(record.int8_on_cpus)
        files = {"fp32": bundle.file("fp32.onnx"), "nncf": Path(folder, "nncf.xml"), "int8": bundle.file(own.file)}
        with patch.object(openvino, "_compile", _compile_file):  # NNCF's file is OpenVINO's own format, not ONNX
            runners = {name: openvino.OpenVINORunner(file, record.shapes) for name, file in files.items()}
        loader = Loader(data, "val", record.transform, batch_size=32, device_id=None)
        found = predict(runners, loader, data.manifest.splits["val"].num_images, lambda *_: None)
        turns = []
        for turn in range(_TURNS):
            order = list(runners) if turn % 2 else list(runners)[::-1]
            how = {"warmup_s": 0.1, "duration_s": _SECONDS, "min_iterations": 3}
            turns.append({name: runners[name].measure(_BATCH, **how).images_per_s for name in order})
    own_agrees, nncf_agrees = (found[name].top[:, 0] == found["fp32"].top[:, 0] for name in ("int8", "nncf"))
    own_alone, nncf_alone = int((own_agrees & ~nncf_agrees).sum()), int((nncf_agrees & ~own_agrees).sum())
    ratios = sorted(turn["int8"] / turn["nncf"] for turn in turns)
    return {
        "model": name,
        "instruction_set": instruction_set(),
        "architecture": record.architecture,
        "num_images": found["fp32"].num_images,
        "file": own.file,
        "arithmetic": own.arithmetic,
        "method": record.calibration.method,
        **{f"top1_{name}_pct": entry.top1_pct for name, entry in found.items()},
        **{f"agreement_{name}_pct": found[name].agreement_pct(found["fp32"]) for name in ("int8", "nncf")},
        "agrees_int8_alone": own_alone,
        "agrees_nncf_alone": nncf_alone,
        "agreement_p_value": mcnemar(nncf_alone, own_alone)[0],
        **{f"images_per_s_{name}": statistics.median(turn[name] for turn in turns) for name in files},
        "int8_over_nncf": statistics.median(ratios),
        "int8_over_nncf_low": ratios[_RANKS[0] - 1],
        "int8_over_nncf_high": ratios[_RANKS[1] - 1],
        "int8_over_fp32": statistics.median(turn["int8"] / turn["fp32"] for turn in turns),
        "turns": turns,
    }


if __name__ == "__main__":
    main()
