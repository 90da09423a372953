"""The image of the model server on a CPU: Triton as in NVIDIA's image, from the wheel of PyTriton (the stand-in)."""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from components.common.contracts.manifests import BundleManifest, load
from enginery.release.verify import load_chain
from enginery.serving.repository import RepositoryConfig, write_repository
from enginery.serving.sources import of_chain
from tests.containers.conftest import HARDENED_ALONE, docker, image, mount, running, show, state, wait_for_health
from tests.unit.conftest import proved  # noqa: F401

# Runs inside the container, which has no network: sends one request of all images, and prints the labels.
ASK = """
import json, struct, sys, urllib.request
images = [bytes.fromhex(line) for line in sys.stdin.read().split()]
data = b"".join(struct.pack("<I", len(image)) + image for image in images)
size = {"binary_data_size": len(data)}
tensor = {"name": "IMAGE", "datatype": "BYTES", "shape": [len(images), 1], "parameters": size}
head = json.dumps({"inputs": [tensor]}).encode()
headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
request = urllib.request.Request("http://127.0.0.1:8000/v2/models/digits/infer", head + data, headers)
outputs = json.load(urllib.request.urlopen(request, timeout=60))["outputs"]
print(json.dumps(next(output["data"] for output in outputs if output["name"] == "LABELS")))
"""


@pytest.fixture(scope="module")
def repository(proved, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    source = of_chain(load_chain(*proved.parts.values()), "digits", "1", "int8", {})
    folder = tmp_path_factory.mktemp("served")
    show(folder)
    return write_repository(source, folder / "models", RepositoryConfig(max_wait_s=60)).path


def test_the_validated_predictions(repository: Path, proved) -> None:  # noqa: F811
    images = []
    for shard in proved.dataset.manifest.splits["val"].shards:
        with tarfile.open(proved.dataset.path / shard) as tar:
            images += [tar.extractfile(member).read() for member in tar if not member.name.endswith(".cls")]
    classes = load(proved.parts["bundle"], BundleManifest).manifest.classes
    recorded = np.load(proved.parts["report"] / "predictions.npz")["int8"]
    file = repository.parent / "images.txt"
    file.write_text("\n".join(data.hex() for data in images))
    volumes = ("--volume", f"{repository}:/models:ro", *mount(repository.parent, read_only=True))
    # As a careful user runs it: no network, no capabilities, nothing to write.
    with running("serve", *HARDENED_ALONE, "--shm-size", "256m", *volumes) as name:
        wait_for_health(name)
        done = docker("exec", name, "sh", "-c", f"python3 -c '{ASK}' < {file}")
        labels = np.reshape(json.loads(done.stdout), (-1, 5)).tolist()
        assert labels == [[classes[index] for index in row] for row in recorded]
        docker("stop", "--time", "60", name)
        assert state(name)["ExitCode"] == 0


def test_a_corrupted_repository_is_refused(repository: Path, tmp_path: Path) -> None:
    show(tmp_path)
    shutil.copytree(repository, tmp_path / "models")
    with (tmp_path / "models/digits_model/1/int8_cpu.onnx").open("r+b") as file:
        file.seek(100)
        file.write(b"damage")
    done = docker("run", "--rm", *HARDENED_ALONE, "--shm-size", "256m", "--volume", f"{tmp_path / 'models'}:/models:ro",
                  image("serve"), check=False)  # fmt: skip
    assert done.returncode == 1
    assert "int8_cpu.onnx" in done.stderr
    assert "Put the original back, or write it again with `enginery serve export`" in done.stderr
