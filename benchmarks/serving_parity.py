"""Compare a served model with the predictions that validate recorded, over the whole validation split.

enginery serve digits-resnet50@champion &
python -m benchmarks.serving_parity digits-resnet50@champion --dataset DIR --machine cpu-2core

DIR is the dataset that the version was validated on. The command's end is 1 where one label differs.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np
from tritonclient import grpc

from benchmarks.results import Results, result_options
from benchmarks.shards import validation_images
from components.common.contracts.errors import UserError
from components.common.contracts.manifests import DatasetManifest, load
from components.common.registry.version_evaluation import PREDICTIONS
from enginery.serving.sources import ModelSource, find_source


def recorded_labels(source: ModelSource) -> list[list[str]]:
    """Labels that validate recorded for each image, the likeliest first."""
    if source.report is None:
        raise UserError("nothing was recorded of a bundle alone; name a registered version or a release")
    with np.load(source.report.path / PREDICTIONS, allow_pickle=False) as arrays:
        top = arrays[source.precision]
    return [[source.bundle.manifest.classes[index] for index in row] for row in top]


def ask(client: grpc.InferenceServerClient, name: str, images: list[bytes]) -> list[list[str]]:
    """The labels of one request's images."""
    tensor = grpc.InferInput("IMAGE", [len(images), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=object).reshape(-1, 1))
    found = client.infer(name, [tensor], client_timeout=120).as_numpy("LABELS")
    return [[label.decode() for label in row] for row in found]


@click.command()
@click.argument("model")
@click.option("--dataset", required=True, type=click.Path(path_type=Path), help="What it was validated on.")
@click.option("--url", default="127.0.0.1:8001", show_default=True, help="The server's gRPC address.")
@click.option("--batch", default=1, show_default=True, help="Images of a request.")
@click.option("--clients", default=32, show_default=True, help="Requests at the same time.")
@result_options
def main(model: str, dataset: Path, url: str, batch: int, clients: int, results: Results) -> None:
    """Ask a running server about every validation image of MODEL, and write serving_parity.json."""
    images = list(validation_images(load(dataset, DatasetManifest)))
    with find_source(model, None) as source:
        expected, name, digest = recorded_labels(source), source.name, source.digests["bundle"]
    client = grpc.InferenceServerClient(url)
    served = client.get_model_config(name).config.parameters["bundle_digest"].string_value
    if served != digest:
        raise UserError(f"the server at {url} serves the bundle {served}, and {model} is {digest}")
    chunks = [images[start : start + batch] for start in range(0, len(images), batch)]
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = [labels for part in pool.map(lambda chunk: ask(client, name, chunk), chunks) for labels in part]
    seconds = time.perf_counter() - started
    same = sum(found[: len(said)] == said[: len(found)] for found, said in zip(answers, expected, strict=True))
    text = f"{name}: {same} of {len(images)} images with the labels that were validated, in the same order"
    click.echo(f"{text} ({len(images) / seconds:,.0f} images/s)")
    measures = {"images": float(len(images)), "same_labels": float(same), "seconds": seconds}
    notes = f"{text}. {batch} images a request, {clients} requests at a time. Bundle {digest}."
    results.write("serving_parity", measures=measures, runs=[], notes=notes)
    sys.exit(same != len(images))


if __name__ == "__main__":
    main()
