"""A real Triton on the CPU, serving what was proved."""

import io
import json
import socket
import struct
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from components.common.contracts.manifests import Artifact, RepositoryManifest
from components.common.data.baseline import IMAGE_STATISTICS
from components.serve.repository_check import STATISTICS_TENSOR
from enginery.release.verify import load_chain
from enginery.serving.installation import find_triton, triton_folder
from enginery.serving.repository import RepositoryConfig, write_repository
from enginery.serving.sources import ModelSource, of_chain
from tests.processes import start_python
from tests.waiting import wait_until

NAME = "digits"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer to an HTTP request."""

    status: int
    body: Any

    @property
    def error(self) -> str:
        return self.body["error"]

    def output(self, name: str) -> list[Any]:
        return next(output["data"] for output in self.body["outputs"] if output["name"] == name)


@dataclass(kw_only=True)
class Running:
    """`enginery serve`, ready."""

    process: subprocess.Popen[str]
    http: int
    grpc: int
    metrics: int
    log: Path

    def get(self, path: str, port: int | None = None) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port or self.http}/{path}", timeout=600) as response:
            return response.read()

    def infer(self, images: Sequence[bytes], model: str = NAME) -> Answer:
        """Encoded images, as binary data of KServe's protocol."""
        return self.send("IMAGE", "BYTES", [len(images), 1], encoded(images), model)

    def send(
        self, name: str, datatype: str, shape: list[int], data: bytes, model: str = NAME, *images: bytes
    ) -> Answer:
        """`images`: what a labels model that keeps examples is sent beside the logits."""
        tensors = [(name, datatype, shape, data)]
        if images:
            tensors.append(("IMAGE", "BYTES", [len(images), 1], encoded(images)))
        if model.endswith("_labels"):  # which counts image statistics, too
            tensors.append((STATISTICS_TENSOR, "FP32", [shape[0], len(IMAGE_STATISTICS)], bytes(16 * shape[0])))
        inputs = [
            {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
            for name, datatype, shape, data in tensors
        ]
        head = json.dumps({"inputs": inputs}).encode()
        body = head + b"".join(tensor[3] for tensor in tensors)
        return self.post(model, body, {"Inference-Header-Content-Length": str(len(head))})

    def post(self, model: str, body: bytes, headers: dict[str, str]) -> Answer:
        url = f"http://127.0.0.1:{self.http}/v2/models/{model}/infer"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=600) as response:
                return Answer(status=response.status, body=json.loads(response.read().decode(errors="replace")))
        except urllib.error.HTTPError as error:
            return Answer(status=error.code, body=json.load(error))


def picture(size: tuple[int, int] = (40, 30), form: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, form)
    return buffer.getvalue()


def encoded(images: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(image)) + image for image in images)


def free_ports() -> dict[str, int]:
    """One for each of a server's addresses, no two alike."""
    with ExitStack() as held:
        probes = {
            name: held.enter_context(socket.create_server(("127.0.0.1", 0))) for name in ("http", "grpc", "metrics")
        }
        return {name: probe.getsockname()[1] for name, probe in probes.items()}


def start_serving(source: Path | str, folder: Path, *options: str, **environment: str) -> Running:
    """The command itself; it is not waited for."""
    ports, log = free_ports(), folder / "serve.log"
    words = ("serve", source, *options, *(f"--{name}-port={port}" for name, port in ports.items()))
    variables = {"ENGINERY_HOME": str(folder / "home"), **environment}
    written = {"stdout": log.open("w"), "stderr": subprocess.STDOUT}
    process = start_python("-m", "enginery.cli.main", *words, env=variables, **written)
    return Running(process=process, log=log, **ports)


def wait_until_ready(running: Running, said: str = "/metrics\n", times: int = 1) -> None:
    """Until the last line of a start is in the log, or so many times what is `said`."""
    log = running.log.read_text
    wait_until(lambda: log().count(said) >= times, log, process=running.process)


@contextmanager
def serving(source: Path | str, folder: Path, *options: str, **environment: str) -> Iterator[Running]:
    """`enginery serve`, ready; it ends with the body."""
    running = start_serving(source, folder, *options, **environment)
    try:
        wait_until_ready(running)
        yield running
    finally:
        running.process.terminate()
        running.process.wait(600)


def metrics(running: Running) -> dict[str, float]:
    """Values by name and labels."""
    lines = running.get("metrics", running.metrics).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """Nothing of it runs meanwhile."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@contextmanager
def kept_busy(running: Running, num_images: int = 12) -> Iterator[None]:
    """The process that decodes has images of 64 million pixels at hand meanwhile, each for some tenths of a second.

    It is not suspended: Triton gives up a Python process that shows no sign of life for a second.
    """
    large = picture((8000, 8000), "PNG")
    children = psutil.Process(running.process.pid).children(recursive=True)
    (decoder,) = (child for child in children if any(f"{NAME}_preprocess" in word for word in child.cmdline()))
    begun_s = decoder.cpu_times().user
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.infer, [large] * num_images)
        wait_until(lambda: answer.done() or decoder.cpu_times().user >= begun_s + 0.3)
        assert not answer.done(), answer.result()
        yield
        assert answer.result().status == 200


def wait_until_pending(running: Running, num: int) -> None:
    """Until Triton says that as many requests wait for the decoder."""
    series = f'nv_inference_pending_request_count{{model="{NAME}_preprocess"'
    wait_until(lambda: sum(value for name, value in metrics(running).items() if name.startswith(series)) >= num)


@pytest.fixture(scope="session")
def triton() -> None:
    """The one place where tests with a real server are skipped."""
    if find_triton() is None:
        pytest.skip(f"Triton's server is not in {triton_folder()}: `make install-serve` (Python 3.11 or 3.12)")


@pytest.fixture(scope="session")
def source(proved) -> ModelSource:
    return of_chain(load_chain(*proved.parts.values()), NAME, "1", "int8", {})


@pytest.fixture(scope="session")
def exported(source, tmp_path_factory: pytest.TempPathFactory) -> Artifact[RepositoryManifest]:
    # A busy machine is no overload here: that has a test of its own.
    return write_repository(source, tmp_path_factory.mktemp("served") / "models", RepositoryConfig(max_wait_s=60))


@pytest.fixture(scope="session")
def served(triton, exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all tests that leave it as it is."""
    with serving(exported.path, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def image_files(proved, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Images of the validation split, in the order of its listing, from the shards themselves."""
    folder, files = tmp_path_factory.mktemp("images"), []
    for shard in proved.dataset.manifest.splits["val"].shards:
        with tarfile.open(proved.dataset.file(shard)) as tar:
            for member in tar:
                if not member.name.endswith(".cls"):
                    files.append(folder / member.name)
                    files[-1].write_bytes(tar.extractfile(member).read())
    assert len(files) == 120
    return files


@pytest.fixture(scope="session")
def images(image_files) -> list[bytes]:
    return [file.read_bytes() for file in image_files]
