"""INT8 on a CPU beside NNCF's and FP32: agreement with FP32 and images/s, by instruction set.

    python -m benchmarks.int8_cpu --machine cpu-2core --name digits --checkpoint DIR --dataset DIR

Both quantize the same checkpoint with the same calibration images: `export` as it is, `nncf.quantize` with its
defaults. Each instruction set of this CPU is a process of its own, limited by oneDNN's variable; FP32, NNCF's file and
ours take turns. Needs nncf beside the rest: pip install nncf.
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
from components.common.contracts.instruction_sets import VARIABLE, available, instruction_set

_BATCH, _TURNS, _SECONDS = 16, 41, 0.4


@click.command()
@click.option("--machine", help="Plain name of the machine.")
@click.option("--name", help="Of the network and its data.")
@click.option("--checkpoint", type=Path, required=True, help="What is quantized: see `components.export`.")
@click.option("--architecture", default="", help="Of weights that the checkpoint is, such as resnet18.")
@click.option("--dataset", type=Path, required=True, help="The dataset that it was trained on.")
@click.option("--images", default=256, show_default=True, help="Calibration images.")
@click.option("--limit", multiple=True, help="Instruction sets; all of this CPU without it.")
@click.option("--here", is_flag=True, help="Measure in this process, and print JSON.")
def main(machine: str, name: str, here: bool, limit: tuple[str, ...], **what: Any) -> None:
    if here:
        print(json.dumps(_measure(**what)))
        return
    runs = []
    for own in limit or [entry for entry in available() if entry != "SSE41"]:
        options = [part for key, value in what.items() for part in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "benchmarks.int8_cpu", *options, "--here"]
        done = subprocess.run(command, env={**os.environ, VARIABLE: own}, stdout=subprocess.PIPE, check=True, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        print({key: value for key, value in runs[-1].items() if key != "turns"})
    measures = {
        "int8_over_nncf_images_per_s": min(run["int8_over_nncf"] for run in runs),
        "int8_minus_nncf_agreement_points": min(run["agreement_int8_pct"] - run["agreement_nncf_pct"] for run in runs),
    }
    measures["int8_over_fp32_cpu_b16"] = min(run["int8_over_fp32"] for run in runs)
    for run in runs:
        for key in ("int8_over_nncf", "int8_over_fp32", "agreement_int8_pct", "agreement_nncf_pct"):
            measures[f"{key}_{run['instruction_set'].lower()}"] = run[key]
    notes = (
        f"Batch {_BATCH}; ratios are medians of {_TURNS} turns of {_SECONDS:g} s. Agreement: validation images on "
        "which the class is FP32's. The smallest over the instruction sets stands first."
    )
    write_result(machine, f"int8_cpu_{name}", measures=measures, runs=runs, notes=notes)


def _measure(checkpoint: Path, architecture: str, dataset: Path, images: int) -> dict[str, Any]:
    """One instruction set: export, quantize by NNCF, predict, and time by turns."""
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

    data = load(dataset, DatasetManifest)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"num_calibration_images": images, "tensorrt": "off", "architecture": architecture}
        config = resolve(ExportConfig, "export", settings)
        export(config, StepLog("export"), model=checkpoint, dataset=dataset, output=Path(folder, "bundle"))
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
        with patch.object(openvino, "find_spec", return_value=None):  # NNCF's file is OpenVINO's own format, not ONNX
            runners = {name: openvino.OpenVINORunner(file, record.shapes) for name, file in files.items()}
        loader = Loader(data, "val", record.transform, batch_size=32, device_id=None)
        found = predict(runners, loader, data.manifest.splits["val"].num_images, lambda *_: None)
        turns = [
            {name: runner.measure(_BATCH, warmup_s=0.1, duration_s=_SECONDS, min_iterations=3) for name, runner in
             runners.items()}
            for _ in range(_TURNS)
        ]  # fmt: skip
    speeds = [{name: timing.images_per_s for name, timing in turn.items()} for turn in turns]
    return {
        "instruction_set": instruction_set(),
        "architecture": record.architecture,
        "num_images": found["fp32"].num_images,
        "file": own.file,
        "arithmetic": own.arithmetic,
        "method": record.calibration.method,
        **{f"top1_{name}_pct": entry.top1_pct for name, entry in found.items()},
        **{f"agreement_{name}_pct": found[name].agreement_pct(found["fp32"]) for name in ("int8", "nncf")},
        **{f"images_per_s_{name}": statistics.median(turn[name] for turn in speeds) for name in files},
        "int8_over_nncf": statistics.median(turn["int8"] / turn["nncf"] for turn in speeds),
        "int8_over_fp32": statistics.median(turn["int8"] / turn["fp32"] for turn in speeds),
        "turns": speeds,
    }


if __name__ == "__main__":
    main()
