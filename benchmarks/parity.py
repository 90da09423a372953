"""Top-1 of one FP32 model on the loader's images and on torchvision's of the same files.

    python -m benchmarks.parity --checkpoint DIR --dataset DIR --machine h200

Runs the model in PyTorch on the validation split, once for each way to decode and resize: torchvision's transforms of
an image that Pillow decoded, the loader on the CPU and, where there is a GPU, on it with and without the hardware
decoder.
"""

import io
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from benchmarks.results import Results, result_options
from components.common.contracts.environment import num_cores
from components.common.contracts.manifests import Artifact, CheckpointManifest, DatasetManifest, load
from components.common.contracts.statistics import difference_interval, paired_counts
from components.common.contracts.transforms import TransformSpec
from components.common.data.loader import HW_DECODER_LOAD, Loader
from components.common.runtimes.architectures import build_model

_BATCH_SIZE = 128


class _Files(Dataset[Any]):
    """The validation images as torchvision's reference evaluation makes them of the files in the shards."""

    def __init__(self, dataset: Artifact[DatasetManifest], spec: TransformSpec) -> None:
        self.places: list[tuple[Path, int, int, int]] = []  # shard, offset, size, label
        for name in dataset.manifest.splits["val"].shards:
            shard = dataset.path / name
            with tarfile.open(shard) as tar:
                images: dict[str, tuple[int, int]] = {}
                for member in tar:
                    key, extension = member.name.rsplit(".", 1)
                    if extension != "cls":
                        images[key] = (member.offset_data, member.size)
                        continue
                    label = tar.extractfile(member)
                    assert label is not None
                    self.places.append((shard, *images[key], int(label.read())))
        self.transform = v2.Compose(
            [
                v2.Resize(spec.resize_size, interpolation=v2.InterpolationMode(spec.interpolation), antialias=True),
                v2.CenterCrop(spec.crop_size),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(spec.mean, spec.std),
            ]
        )

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        shard, offset, size, label = self.places[index]
        with shard.open("rb") as file:
            file.seek(offset)
            image = Image.open(io.BytesIO(file.read(size))).convert("RGB")
        return self.transform(image), label


@click.command()
@click.option("--checkpoint", required=True, type=click.Path(exists=True, path_type=Path), help="From train.")
@click.option("--dataset", required=True, type=click.Path(exists=True, path_type=Path), help="From preprocess.")
@result_options
def main(checkpoint: Path, dataset: Path, results: Results) -> None:
    weights, data = load(checkpoint, CheckpointManifest), load(dataset, DatasetManifest)
    spec = weights.manifest.transform
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.backends.cudnn.allow_tf32 = False
    model = build_model(weights.manifest.architecture, len(weights.manifest.classes))
    model.load_state_dict(load_file(weights.path / "weights.safetensors"))
    model.to(device).eval()
    reference = DataLoader(_Files(data, spec), batch_size=_BATCH_SIZE, num_workers=num_cores())
    ways: dict[str, Iterable[tuple[torch.Tensor, torch.Tensor]]] = {
        "torchvision": reference,
        "loader_cpu": _batches(Loader(data, "val", spec, batch_size=_BATCH_SIZE)),
    }
    if device.type == "cuda":
        for name, share in (("loader_gpu", 0.0), ("loader_gpu_hw", HW_DECODER_LOAD)):
            ways[name] = _batches(Loader(data, "val", spec, batch_size=_BATCH_SIZE, device_id=0, hw_decoder_load=share))
    right: dict[str, np.ndarray] = {}
    for name, batches in ways.items():
        right[name] = _right(model, batches, device)
        print(f"{name}: {100 * right[name].mean():.2f} %", flush=True)
    measures: dict[str, float] = {"num_images": float(len(right["torchvision"]))}
    for name in ways:
        measures[f"top1_pct_{name}"] = 100 * float(right[name].mean())
        if name != "torchvision":
            low, high = difference_interval(*paired_counts(right["torchvision"], right[name]))
            measures[f"{name}_delta_points"] = measures[f"top1_pct_{name}"] - measures["top1_pct_torchvision"]
            measures |= {f"{name}_delta_low_points": low, f"{name}_delta_high_points": high}
    results.write(
        f"parity_{weights.manifest.architecture}",
        measures=measures,
        runs=[],
        notes=(
            f"{weights.manifest.architecture} in FP32 by PyTorch on the validation split at {spec.crop_size} px. "
            "Differences are the loader's top-1 minus torchvision's on the same files, with intervals of 95 % on "
            "each side (Tango, 1998). loader_gpu decodes without the hardware decoder, "
            f"loader_gpu_hw gives it {HW_DECODER_LOAD:g} of the JPEG files."
        ),
    )


def _batches(loader: Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((batch.images, batch.labels) for batch in loader)


@torch.inference_mode()
def _right(
    model: torch.nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> np.ndarray:
    """True where a prediction is right, [N] bool."""
    right = [model(images.to(device)).argmax(1) == labels.to(device) for images, labels in batches]
    return torch.cat(right).cpu().numpy()


if __name__ == "__main__":
    main()
