"""Detection and segmentation on one GPU: trained on shapes, exported, validated, beside torchvision's own training.

    enginery data shapes DIR --num-train 40000 --num-val 4000 --image-size 512
    python -m benchmarks.tasks_gpu --data DIR --work WORK --machine h200 detection segmentation

Every step is the command that users run; speeds are those of benchmarks.networks. Nothing else may use the GPU.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import default_loader
from torchvision.io import ImageReadMode, read_image
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Image, Mask

from benchmarks.networks import engines_of, run_step
from benchmarks.results import Results, current_commit, result_options
from components.common.contracts.environment import num_cores
from components.common.contracts.manifests import MANIFEST, CheckpointManifest, load
from components.common.contracts.transforms import IMAGENET_MEAN, IMAGENET_STD

_BATCH_SIZE = 32
_WARM_UP_STEPS = 10
# The learning rate is per 256 images, so 0.0003 here.
_TRAINING = ("--optimizer", "adamw", "--learning-rate", "0.0024", "--weight-decay", "0.05", "--label-smoothing", "0")
_CROPS = ("--augmentation", "{min_area: 0.5, max_aspect_ratio: 1.2}")
NETWORKS = {"detection": "retinanet_resnet50_fpn", "segmentation": "deeplabv3_resnet50"}


@click.command()
@click.argument("tasks", nargs=-1, type=click.Choice(list(NETWORKS)), required=True)
@click.option("--data", required=True, type=click.Path(exists=True, path_type=Path), help="From enginery data shapes.")
@click.option("--work", required=True, type=click.Path(path_type=Path), help="Directory of what is made.")
@click.option("--network", default="", help="Of torchvision, for a single task.  [default: one for each task]")
@click.option("--epochs", default=2, show_default=True, help="Of the training.")
@click.option("--image-size", default=512, show_default=True, help="Side of the square that networks see, in px.")
@click.option("--compile", "compile_mode", default="off", show_default=True, help="train.compile")
@click.option("--opt-batch", default=_BATCH_SIZE, show_default=True, help="That TensorRT tunes its kernels for.")
@click.option("--optimization-level", default=1, show_default=True, help="0 builds fastest, 5 runs fastest.")
@click.option("--mixed-engines", default=1, show_default=True, help="That export builds of blocks in INT8 and FP16.")
@click.option("--reference-seconds", default=20.0, show_default=True, help="Of torchvision's training.")
@result_options
def main(
    tasks: tuple[str, ...],
    data: Path,
    work: Path,
    network: str,
    epochs: int,
    image_size: int,
    compile_mode: str,
    opt_batch: int,
    optimization_level: int,
    mixed_engines: int,
    reference_seconds: float,
    results: Results,
) -> None:
    for task in tasks:
        folder = work / task
        folder.mkdir(parents=True, exist_ok=True)
        name, seconds = network or NETWORKS[task], {}
        dataset = folder / "dataset"
        if not (dataset / MANIFEST).exists():
            seconds["preprocess"] = run_step("preprocess", None, dataset, "--data", str(data), "--task", task)
        training = ("--architecture", f"{task}/{name}", "--epochs", str(epochs), "--image-size", str(image_size))
        training += ("--resize-ratio", "1", "--global-batch-size", str(_BATCH_SIZE), "--compile", compile_mode)
        training += ("--validation-epochs", str(epochs), *_TRAINING, *_CROPS)
        if not (folder / "checkpoint" / MANIFEST).exists():
            seconds["train"] = run_step("train", dataset, folder / "checkpoint", *training)
        history = load(folder / "checkpoint", CheckpointManifest).manifest.history
        reference = _reference(task, name, data, image_size, reference_seconds)
        print(json.dumps({"task": task, "history": [each.model_dump() for each in history], **reference}), flush=True)
        plans = ("--tensorrt", "on", "--optimization-level", str(optimization_level), "--opt-batch", str(opt_batch))
        plans += ("--max-batch", str(_BATCH_SIZE), "--mixed-engines", str(mixed_engines))
        checkpoint = ("--model", str(folder / "checkpoint"))
        seconds["export"] = run_step("export", dataset, folder / "bundle", *checkpoint, *plans)
        speeds = ("--benchmark-batch-sizes", f"[1, {_BATCH_SIZE}]", "--benchmark-streams", "[1]")
        speeds += ("--benchmark-seconds", "0.3")  # engines_of measures again
        bundle = ("--bundle", str(folder / "bundle"))
        seconds["validate"] = run_step("validate", dataset, folder / "report", *bundle, *speeds)
        engines = engines_of(folder / "bundle", folder / "report", batch_size=_BATCH_SIZE, turns=5, score="score_pct")
        rate = history[-1].train_images_per_s
        row = {
            "task": task,
            "network": name,
            "commit": current_commit(),
            "image_size": image_size,
            "epochs": epochs,
            "compile": compile_mode,
            **engines,
            "train_images_per_s": rate,
            "history": [each.model_dump(mode="json") for each in history],
            **reference,
            "train_over_torchvision": rate / reference["torchvision_train_images_per_s"],
            "seconds": {key: round(value, 1) for key, value in seconds.items()},
        }
        batch = f"b{_BATCH_SIZE}"
        for end in ("b1", batch, f"{batch}_no_copies"):
            row[f"int8_over_fp16_{end}"] = row[f"images_per_s_int8_{end}"] / row[f"images_per_s_fp16_{end}"]
        results.write(
            f"tasks_{task}" if opt_batch == _BATCH_SIZE else f"tasks_{task}_opt_batch_{opt_batch}",
            measures={key: value for key, value in row.items() if isinstance(value, float)},
            runs=[row],
            notes="From random weights. Scores are mAP@[.5:.95] and mIoU on validation images. TensorRT at "
            f"optimization level {optimization_level}, kernels tuned for {opt_batch} at once; speeds are medians of "
            "turns of all engines, with copies but where a name ends in no_copies. torchvision's training: its "
            "references' steps, AMP, a process per core decodes.",
        )


def _reference(task: str, name: str, data: Path, image_size: int, seconds: float) -> dict[str, Any]:
    """Rate of torchvision's references/detection or references/segmentation, with --amp, without its logging."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    samples = _Shapes(data / "train", _TRANSFORMS[task](image_size), with_boxes=task == "detection")
    loader: DataLoader[Any] = DataLoader(
        samples,
        _BATCH_SIZE,
        shuffle=True,
        num_workers=num_cores(),
        drop_last=True,
        collate_fn=lambda batch: tuple(zip(*batch, strict=True)),
        pin_memory=device.type == "cuda",
        multiprocessing_context="fork",
    )
    step = _STEPS[task](name, image_size, device)
    batches = _endless(loader)
    for images, labels in itertools.islice(batches, _WARM_UP_STEPS):
        step(images, labels)
    _synchronize(device)
    started, num_images = time.perf_counter(), 0
    for images, labels in batches:
        step(images, labels)
        num_images += len(images)
        if time.perf_counter() - started > seconds:
            break
    _synchronize(device)
    rate = num_images / (time.perf_counter() - started)
    return {"torchvision_train_images_per_s": rate, "torchvision_images": num_images}


Step = Callable[[Any, Any], None]


def _detector_step(name: str, image_size: int, device: torch.device) -> Step:
    from torchvision.models import detection

    model = getattr(detection, name)(
        weights=None, weights_backbone=None, num_classes=6, min_size=image_size, max_size=image_size
    )
    model.to(device).train()
    update = _update(model, device)

    def step(images: Any, labels: Any) -> None:
        images = [image.to(device) for image in images]
        targets = [{key: value.to(device) for key, value in each.items()} for each in labels]
        with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = sum(model(images, targets).values())
        update(loss)

    return step


def _segmenter_step(name: str, image_size: int, device: torch.device) -> Step:
    from torchvision.models import segmentation

    model = getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=6).to(device).train()
    update = _update(model, device)

    def step(images: Any, labels: Any) -> None:
        images, masks = torch.stack(images).to(device), torch.stack([each["masks"] for each in labels]).to(device)
        with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images)["out"], masks.long(), ignore_index=255)
        update(loss)

    return step


_STEPS = {"detection": _detector_step, "segmentation": _segmenter_step}


def _update(model: torch.nn.Module, device: torch.device) -> Callable[[Any], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)
    scaler = torch.GradScaler(device.type, enabled=device.type == "cuda")

    def update(loss: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return update


def _detection_transforms(image_size: int) -> v2.Transform:
    del image_size  # the network resizes
    floats = v2.ToDtype(torch.float32, scale=True)
    return v2.Compose([v2.RandomHorizontalFlip(), v2.ToImage(), floats, v2.SanitizeBoundingBoxes(), v2.ToPureTensor()])


def _segmentation_transforms(image_size: int) -> v2.Transform:
    return v2.Compose(
        [
            v2.RandomResize(image_size // 2, image_size * 2),
            v2.RandomHorizontalFlip(),
            v2.RandomCrop(image_size, pad_if_needed=True, fill={Mask: 255, "others": 0}),
            v2.ToImage(),
            v2.ToDtype({Image: torch.float32, Mask: torch.int64, "others": None}, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            v2.ToPureTensor(),
        ]
    )


_TRANSFORMS = {"detection": _detection_transforms, "segmentation": _segmentation_transforms}


class _Shapes(Dataset[Any]):
    """Images as enginery data shapes writes them, with their boxes or masks."""

    def __init__(self, folder: Path, transforms: v2.Transform, *, with_boxes: bool) -> None:
        content = json.loads((folder / "annotations.json").read_text())
        self._folder, self._transforms, self._with_boxes = folder, transforms, with_boxes
        self._images: list[dict[str, Any]] = content["images"]
        self._objects: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in self._images}
        for each in content["annotations"]:
            self._objects[each["image_id"]].append({"box": each["bbox"], "label": each["category_id"]})

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, place: int) -> Any:
        entry = self._images[place]
        image = default_loader(str(self._folder / "images" / entry["file_name"]))
        if self._with_boxes:
            objects = self._objects[entry["id"]]
            corners = torch.tensor([each["box"] for each in objects], dtype=torch.float32).reshape(-1, 4)
            corners[:, 2:] += corners[:, :2]
            size = (entry["height"], entry["width"])
            boxes = BoundingBoxes(corners, format=BoundingBoxFormat.XYXY, canvas_size=size)
            labels = torch.tensor([each["label"] for each in objects], dtype=torch.int64)
            return self._transforms(image, {"boxes": boxes, "labels": labels})
        mask = (self._folder / "masks" / entry["file_name"]).with_suffix(".png")
        return self._transforms(image, {"masks": Mask(read_image(str(mask), ImageReadMode.GRAY)[0])})


def _endless(loader: "DataLoader[Any]") -> Iterator[Any]:
    while True:
        yield from loader


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
    os._exit(0)  # the reference's workers may take their time to go
