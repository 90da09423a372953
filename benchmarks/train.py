"""Training speed: a synthetic batch, JPEG shards, torchvision's reference recipe, several GPUs.

    python -m benchmarks.train --machine h200
    python -m benchmarks.train --machine h200-x2 --parts scaling --scaling 1,2
    python -m benchmarks.train --machine cpu-2core --device cpu --architecture resnet18 --image-size 32 \
        --batch-sizes 8 --variants off --precisions bf16 --num-images 64 --seconds 1

Each measurement (a cell) is a process of its own with a time limit, and the result is written after each. A further
call resumes: cells of the same commit, torch and device that the result holds are not measured again (--again does).
The fastest synthetic cell is what shards, torchvision's recipe and several GPUs are measured with or against.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import psutil
import torch

from benchmarks.results import Results, current_commit, result_options
from benchmarks.train_cell import PREFIX, Cell, device_name

_ROOT = Path(__file__).resolve().parents[1]
_PARTS = ("synthetic", "shards", "live", "torchvision", "scaling")
_LEAST_S = 20.0  # of a cell; with less time left none is started
# Of DistributedDataParallel: MB per bucket, static graph, and whether torch.compile splits its graph into the buckets.
_DDP = "25:0:1,25:0:0,100:0:0,25:1:0"


@dataclass(kw_only=True)
class Session:
    """The cells that were measured, and the time that is left for others."""

    name: str
    results: Results
    work: Path
    device: str
    cell_s: float
    ends: float  # time.monotonic()
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_reused: int = 0

    def reuse(self) -> None:
        """Take the cells that an earlier call has measured with the same code, torch and device."""
        found = [run for run in self.results.earlier(self.name)["runs"] if "failed" not in run]
        here = (current_commit(), torch.__version__, device_name(torch.device(self.device)))
        self.cells = {run["label"]: run for run in found if (run["commit"], run["torch"], run["device"]) == here}
        self.num_reused = len(self.cells)

    def measure(self, cell: Cell) -> dict[str, Any] | None:
        """A cell's result, measured unless it is known; None where it failed or no time is left."""
        known = self.cells.get(cell.label)
        if known is not None and known["cell"] == cell.model_dump(exclude={"work"}):
            return known if "failed" not in known else None
        left = self.ends - time.monotonic()
        if left < _LEAST_S:
            print(f"{cell.label}: no time left", flush=True)
            return None
        started = time.monotonic()
        result = run_cell(cell, self.device, min(self.cell_s, left), self.work / "logs")
        result |= {"label": cell.label, "commit": current_commit(), "cell": cell.model_dump(exclude={"work"})}
        self.cells[cell.label] = {**result, "wall_s": round(time.monotonic() - started, 1)}
        print(f"{cell.label}: {brief(result)} ({time.monotonic() - started:.0f} s)", flush=True)
        self.write()
        return None if "failed" in result else result

    def write(self) -> None:
        good = [cell for cell in self.cells.values() if "failed" not in cell]
        devices = sorted({cell["device"] for cell in good})
        again = f" {self.num_reused} cells are of an earlier call with the same code." if self.num_reused else ""
        notes = (
            "Forward, backward and optimizer step of components.train, by the trainer's own clock over whole epochs; "
            "each cell in a process of its own, medians of its turns after warming up. synthetic: one fixed batch on "
            "the device. shards: JPEG of 500x375, or scaled down as asked, through the loader, in turn with the same "
            "process's synthetic batch. "
            "live: the synthetic batch with live metrics, in turn with it without. "
            "torchvision: the reference recipe (DataLoader with the best number of workers, eager bf16 AMP, "
            "channels_last) on the same files, without its logging. scaling: DistributedDataParallel. Cells that "
            f"failed or ran out of time say so.{again}"
        )
        self.results.write(
            self.name,
            measures=measures_of(good),
            runs=list(self.cells.values()),
            notes=f"{notes} On {', '.join(devices)}." if devices else notes,
            versions={"torch": good[0]["torch"]} if good else {},
        )


@click.command()
@click.option("--parts", default="synthetic,shards,torchvision", help=f"Some of {', '.join(_PARTS)}.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--architecture", default="resnet50")
@click.option("--image-size", default=224)
@click.option("--precisions", default="fp16,bf16")
@click.option("--batch-sizes", default="1024,512,256", help="Per process, the most promising first.")
@click.option(
    "--variants",
    default="default,tuned,max-autotune-no-cudagraphs,reduce-overhead,max-autotune,off",
    help="Modes of TrainConfig.compile, the most promising first; +NAME=VALUE adds settings of torch, such as "
    "tuned+cudnn.benchmark_limit=0 or default+triton.cudagraphs=true (see benchmarks/train_cell.py).",
)
@click.option("--seconds", default=5.0, help="Of each turn.")
@click.option("--turns", default=3)
@click.option("--cell-seconds", default=240.0, help="Limit of a cell, with compiling.")
@click.option("--minutes", default=9.0, help="Limit of all: no cell is started later, and none runs longer.")
@click.option("--scaling", default="1,2", help="Numbers of processes of the part scaling.")
@click.option("--ddp", default=_DDP, help="BUCKET_MB:STATIC_GRAPH:SPLIT_GRAPH, some of them.")
@click.option("--profile/--no-profile", default=True, help="Record what the fastest cell spends its time on.")
@click.option("--num-images", default=20000, type=click.IntRange(min=64), help="Of the parts that read files.")
@click.option("--max-short-side", default=0, help="Of preprocess: scales the packed images down; 0 for not.")
@click.option("--decode-on", type=click.Choice(["gpu", "cpu"]), default="gpu", help="train.decode_on, of shards.")
@click.option("--reference-batch-size", default=256, help="Of torchvision's recipe.")
@click.option("--work", default=Path("/tmp/enginery-train"), type=click.Path(path_type=Path), help="For images, logs.")
@click.option("--again", is_flag=True, help="Measure known cells again.")
@result_options
def main(
    parts: str,
    device: str,
    architecture: str,
    image_size: int,
    precisions: str,
    batch_sizes: str,
    variants: str,
    seconds: float,
    turns: int,
    cell_seconds: float,
    minutes: float,
    scaling: str,
    ddp: str,
    profile: bool,
    num_images: int,
    max_short_side: int,
    decode_on: Literal["gpu", "cpu"],
    reference_batch_size: int,
    work: Path,
    again: bool,
    results: Results,
) -> None:
    if unknown := set(parts.split(",")) - set(_PARTS):
        raise click.UsageError(f"--parts has {', '.join(unknown)}; choose from {', '.join(_PARTS)}")
    folder = work / f"{num_images}-{max_short_side}"
    own: dict[str, Any] = {"name": f"train_{architecture}", "device": device, "cell_s": cell_seconds}
    session = Session(**own, results=results, work=work, ends=time.monotonic() + 60 * minutes)
    if not again:
        session.reuse()
    base = Cell(
        kind="synthetic",
        architecture=architecture,
        image_size=image_size,
        seconds=seconds,
        turns=turns,
        work=str(folder),
        decode_on=decode_on,
    )
    sizes = [int(size) for size in batch_sizes.split(",")]
    matrix = [
        base.model_copy(update={"batch_size": size, "variant": variant, "precision": precision})
        for size, variant, precision in itertools.product(sizes, variants.split(","), precisions.split(","))
    ]
    if "synthetic" in parts:
        for cell in matrix:
            session.measure(cell)
    best = (fastest(session.cells, image_size) or matrix[0]).model_copy(update={"work": str(folder)})
    if "shards" in parts or "torchvision" in parts:
        from benchmarks.loader import make_data

        make_data(folder, num_images, max_short_side)
    if "shards" in parts and "scaling" not in parts:
        session.measure(best.model_copy(update={"kind": "shards", "profile": profile}))
    if "live" in parts:
        session.measure(best.model_copy(update={"kind": "live"}))
    if "torchvision" in parts:
        reference = base.model_copy(update={"kind": "torchvision", "batch_size": reference_batch_size})
        trials = session.measure(reference.model_copy(update={"kind": "workers"}))
        if trials is not None:
            num_workers = max(trials["trials"], key=lambda number: trials["trials"][number])
            session.measure(reference.model_copy(update={"num_workers": int(num_workers)}))
    if "scaling" in parts:
        read = best.model_copy(update={"kind": "shards"}) if "shards" in parts else best
        for number in map(int, scaling.split(",")):
            for cell in scaled(read, number, ddp):
                session.measure(cell)
    session.write()
    print(json.dumps(measures_of([cell for cell in session.cells.values() if "failed" not in cell]), indent=1))


def scaled(best: Cell, number: int, ddp: str) -> list[Cell]:
    """The fastest cell on several GPUs, with each choice of DistributedDataParallel's."""
    if number == 1:
        return [best]
    cells = []
    for choice in ddp.split(","):
        bucket_mb, static_graph, split = (float(value) for value in choice.split(":"))
        changed = {"bucket_mb": bucket_mb, "static_graph": bool(static_graph), "split_graph": bool(split)}
        cells.append(best.model_copy(update={"num_processes": number, **changed}))
    return list({cell.label: cell for cell in cells}.values())


def run_cell(cell: Cell, device: str, limit_s: float, logs: Path) -> dict[str, Any]:
    """Measure in a process of its own, or several. What went wrong is under "failed"."""
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable]
    if cell.num_processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={cell.num_processes}", "--max-restarts=0"]
    command += ["-m", "benchmarks.train_cell", cell.model_dump_json()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    if cell.num_processes > 1:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.setdefault(variable, "lo")
        # Multicast over NVLink needs a fabric manager that shared machines may not have.
        environment.setdefault("NCCL_NVLS_ENABLE", "0")
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // cell.num_processes)))
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = logs / f"{cell.label.replace('/', '_')}.txt"
    with log.open("w") as written, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, cwd=_ROOT, stdout=output, stderr=written)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done within {limit_s:.0f} s"}
        finally:
            end_group(process)
        output.seek(0)
        found = [line for line in output if line.startswith(PREFIX)]
    if code == 0 and found:
        return dict(json.loads(found[-1].removeprefix(PREFIX)))
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return {"failed": (errors or lines or [f"exit code {code}"])[-1][:300], "log": "\n".join(lines[-15:])[-1500:]}


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a cell and what it has started: torchrun's processes, compilers, workers."""
    if process.poll() is None:
        for member in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def brief(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"failed: {result['failed']}"
    if "trials" in result:
        return f"images/s by workers {result['trials']}"
    parts = [
        f"{name} {result[name]['images_per_s']:,.0f}" for name in ("synthetic", "shards", "live") if name in result
    ]
    parts += [f"{result['images_per_s']:,.0f}"] if "images_per_s" in result else []
    waits = [f"waiting {result['shards']['data_wait_share']:.2%}"] if "shards" in result else []
    memory = [f"{result['memory_gb']:.0f} GB"] if "memory_gb" in result else []
    return ", ".join([f"{' and '.join(parts)} images/s", *waits, *memory])


def fastest(cells: dict[str, dict[str, Any]], image_size: int) -> Cell | None:
    """The synthetic cell on one GPU with the highest rate."""
    measured = [cell for cell in cells.values() if is_single(cell) and cell["cell"]["image_size"] == image_size]
    if not measured:
        return None
    return Cell.model_validate(max(measured, key=lambda cell: cell["synthetic"]["images_per_s"])["cell"])


def is_single(cell: dict[str, Any]) -> bool:
    wanted = cell["cell"]["kind"] == "synthetic" and cell["cell"]["num_processes"] == 1
    return wanted and "failed" not in cell


def measures_of(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Return the measures that documents may quote."""
    measures: dict[str, float] = {}
    single = [cell for cell in cells if is_single(cell)]
    rates = {cell["label"]: cell["synthetic"]["images_per_s"] for cell in single}
    if rates:
        best = max(single, key=lambda cell: cell["synthetic"]["images_per_s"])
        measures["train_synthetic_images_per_s"] = rates[best["label"]]
        figures = {"tflops_per_s": "train_tflops_per_s", "peak_pct": "train_peak_pct", "power_w": "train_power_w"}
        for name, key in figures.items():
            if best["synthetic"][name] is not None:
                measures[key] = best["synthetic"][name]
        if "memory_gb" in best:
            measures["train_memory_gb"] = best["memory_gb"]
        for precision in ("fp16", "bf16"):
            own = [rates[cell["label"]] for cell in single if cell["cell"]["precision"] == precision]
            if own:
                measures[f"train_synthetic_images_per_s_{precision}"] = max(own)
        pair = [measures.get(f"train_synthetic_images_per_s_{precision}") for precision in ("bf16", "fp16")]
        if pair[0] and pair[1]:
            measures["train_bf16_over_fp16"] = pair[0] / pair[1]
    for cell in cells:
        if cell["cell"]["kind"] == "live":
            measures["train_live_over_silent"] = cell["live"]["images_per_s"] / cell["synthetic"]["images_per_s"]
    read = {cell["cell"]["num_processes"]: cell for cell in cells if cell["cell"]["kind"] == "shards"}
    shards = read.get(1)
    if shards is not None:
        measures["train_jpeg_images_per_s"] = shards["shards"]["images_per_s"]
        measures["train_jpeg_over_synthetic"] = shards["shards"]["images_per_s"] / shards["synthetic"]["images_per_s"]
        measures["train_data_wait_share"] = shards["shards"]["data_wait_share"]
        for number, cell in read.items():
            if number > 1:
                measures[f"train_jpeg_images_per_s_x{number}"] = rate = cell["shards"]["images_per_s"]
                measures[f"train_jpeg_scaling_x{number}"] = rate / number / measures["train_jpeg_images_per_s"]
                measures[f"train_data_wait_share_x{number}"] = cell["shards"]["data_wait_share"]
    reference = next((cell for cell in cells if cell["cell"]["kind"] == "torchvision"), None)
    if reference is not None:
        measures["train_reference_script_images_per_s"] = reference["images_per_s"]
        if shards is not None:
            measures["train_over_reference_script"] = shards["shards"]["images_per_s"] / reference["images_per_s"]
    several = [cell for cell in cells if cell["cell"]["num_processes"] > 1]
    alone_too = [*single, *read.values()]
    for number in sorted({cell["cell"]["num_processes"] for cell in several}):
        own = [cell for cell in several if cell["cell"]["num_processes"] == number]
        best = max(own, key=lambda cell: cell["synthetic"]["images_per_s"])
        measures[f"train_images_per_s_x{number}"] = best["synthetic"]["images_per_s"]
        same = ("variant", "precision", "batch_size")
        alone = [cell for cell in alone_too if all(cell["cell"][name] == best["cell"][name] for name in same)]
        alone = [cell for cell in alone if cell["cell"]["num_processes"] == 1]
        if alone:
            measures[f"train_scaling_x{number}"] = (
                best["synthetic"]["images_per_s"] / number / alone[0]["synthetic"]["images_per_s"]
            )
            measures["train_scaling"] = measures[f"train_scaling_x{number}"]
    return {**measures, **{f"{label}_images_per_s": rate for label, rate in rates.items()}}


if __name__ == "__main__":
    main()
