"""The client of a model server, for asyncio and for synchronous code, and what a server says of its models."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from components.common.contracts.errors import EngineryError, UserError
from enginery.serving.client.transport import (
    RetryPolicy,
    ServerAddress,
    ServingError,
    Transport,
    parse_address,
    with_retries,
)

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}


def find_images(folder: Path) -> list[Path]:
    """Deeply, in the order of their names.

    Raises:
        UserError: there is none.
    """
    found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
    if not found:
        raise UserError(
            f"there is no image in the folder {folder}; images end in {', '.join(sorted(_SUFFIXES))}", code="no-images"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class ClassifierModel:
    """A model from an image file to labels, or to an answer in JSON. Names are the server's."""

    name: str
    image_input: str  # BYTES, one image file
    batched: bool  # the shapes begin with a batch
    labels_output: str = ""  # BYTES [k], the likeliest first
    probabilities_output: str = ""  # FP32 [k]
    answer_output: str = ""  # BYTES [1]; of models that find boxes or masks, which have it alone


@dataclass(frozen=True, kw_only=True)
class NetworkModel:
    """The network itself: normalized tensors to logits."""

    name: str
    input: str  # FP32
    shape: tuple[int, ...]  # of one image, such as (3, 224, 224)
    output: str  # FP32 [classes]
    max_batch_size: int
    config: Mapping[str, Any]  # as Triton has it

    @property
    def batches(self) -> bool:
        """True if the server puts requests together."""
        return "dynamic_batching" in self.config


async def find_classifier(transport: Transport, name: str | None) -> ClassifierModel:
    """The model of this name, or the only one of the server that takes image files.

    Raises:
        UserError: there is none or more than one, or the named one is no such model.
    """
    if name is not None:
        config = await transport.config(name)
        if (model := _classifier(await transport.metadata(name), config)) is None:
            message = f"the model {name} of this server does not take image files to labels; {_WANTED}"
            raise UserError(message, code="no-classifier", setting="model")
        return model
    names = sorted({entry["name"] for entry in await transport.index() if entry.get("state", "READY") == "READY"})
    found = []
    for other in names:
        if (model := _classifier(await transport.metadata(other), await transport.config(other))) is not None:
            found.append(model)
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"this server has {len(found)} models: {', '.join(model.name for model in found)}; choose one with --model",
            code="several-models",
            setting="model",
        )
    message = f"this server has no model that takes image files ({', '.join(names) or 'no models'}); {_WANTED}"
    raise UserError(message, code="no-classifier")


_WANTED = "such a model has one BYTES input and the outputs BYTES and FP32, as `enginery serve` sets it up"


async def find_network(transport: Transport, classifier: str) -> NetworkModel:
    """The network that an image model hands its tensors to, by the steps of its ensemble.

    Raises:
        EngineryError: the ensemble has no such step.
    """
    config = await transport.config(classifier)
    names = [step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", [])] or [classifier]
    for name in names:
        if (model := await network(transport, name)) is not None:
            return model
    raise EngineryError(f"none of the models behind {classifier} ({', '.join(names)}) takes tensors", code="no-network")


async def network(transport: Transport, name: str) -> NetworkModel | None:
    """The model as a network; None where it does not turn one FP32 image tensor into FP32."""
    metadata, config = await transport.metadata(name), await transport.config(name)
    inputs, outputs = metadata.get("inputs", []), metadata.get("outputs", [])
    if len(inputs) != 1 or inputs[0]["datatype"] != "FP32" or not outputs or outputs[0]["datatype"] != "FP32":
        return None
    max_batch_size = int(config.get("max_batch_size", 0))
    shape = tuple(int(size) for size in inputs[0]["shape"][1 if max_batch_size else 0 :])
    if len(shape) != 3 or min(shape) < 1:
        return None
    return NetworkModel(
        name=name,
        input=inputs[0]["name"],
        shape=shape,
        output=outputs[0]["name"],
        max_batch_size=max_batch_size,
        config=config,
    )


def _classifier(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> ClassifierModel | None:
    inputs, outputs = metadata.get("inputs", []), metadata.get("outputs", [])
    if len(inputs) != 1 or inputs[0]["datatype"] != "BYTES":
        return None
    labels = [entry["name"] for entry in outputs if entry["datatype"] == "BYTES"]
    probabilities = [entry["name"] for entry in outputs if entry["datatype"] == "FP32"]
    own = {"labels_output": labels[0], "probabilities_output": probabilities[0]} if labels and probabilities else {}
    if labels == [ANSWER_OUTPUT] and not probabilities:
        own = {"answer_output": ANSWER_OUTPUT}
    if not own or len(labels) > 1 or len(probabilities) > 1:
        return None
    batched = int(config.get("max_batch_size", 0)) > 0
    return ClassifierModel(name=metadata["name"], image_input=inputs[0]["name"], batched=batched, **own)


def _text(sent: bytes | str) -> str:
    """An element of BYTES: a server without the extension for binary data sends it as text of JSON."""
    return sent if isinstance(sent, str) else sent.decode()


ANSWER_OUTPUT = "ANSWER"  # as components/serve/answers.py calls it, which needs the server's Python


Result = TypeVar("Result")
DEFAULT_URL = "http://localhost:8000"
DEFAULT_CONCURRENCY = 16  # requests on their way at the same time, which the server can put into batches


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Classes of one image, the likeliest first."""

    labels: tuple[str, ...]
    probabilities: tuple[float, ...]  # 0..1

    @property
    def label(self) -> str | None:
        """The likeliest class; None where the model named none, as for logits that are no numbers."""
        return self.labels[0] if self.labels else None


class AsyncClient:
    """Asks one model of one server. To be used within one event loop; `async with` closes it.

    Args:
        url: http://HOST:8000 or grpc://HOST:8001.
        model: its name; without one, the server's only model that takes image files.
        retry: time-outs and repetitions.
        loading_key: of the server, for `load`.

    Raises:
        UserError: the address is none.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str | None = None,
        retry: RetryPolicy | None = None,
        loading_key: str = "",
    ) -> None:
        self.address: ServerAddress = parse_address(url)
        self.num_retries = 0  # requests that were sent again, so far
        self._retry = retry or RetryPolicy()
        self._name, self._loading_key = model, loading_key
        self._transport: Transport | None = None
        self._classifier: ClassifierModel | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connections."""
        if self._transport is not None:
            await self._transport.close()
            self._transport = None

    async def classifier(self) -> ClassifierModel:
        """The model, as the server describes it; asked once.

        Raises:
            UserError: the server has no such model.
            ServingError: it can't be asked.
        """
        async with self._lock:
            if self._classifier is None:
                self._classifier = await self._ask(lambda transport: find_classifier(transport, self._name))
            return self._classifier

    async def network(self) -> NetworkModel:
        """The network behind the model; asked each time, since a server may load it again."""
        name = (await self.classifier()).name
        return await self._ask(lambda transport: find_network(transport, name))

    async def parameters(self) -> dict[str, str]:
        """Return the parameters that `enginery serve` wrote: the model's name, version, digests and so on."""
        name = (await self.classifier()).name
        config = await self._ask(lambda transport: transport.config(name))
        return {key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()}

    async def is_ready(self) -> bool:
        """Return True if the server and all its models are ready to answer; asks once.

        Raises:
            ServingError: it can't be asked.
        """
        once = replace(self._retry, retry_s=0)
        return await with_retries(lambda: self._open().ready(), once, self.address, self._note_retry)

    async def classify(self, image: bytes, *, top_k: int = 5) -> Answer:
        """Labels and probabilities of one image.

        Args:
            image: the content of an image file.
            top_k: how many classes at most; the server may name fewer.

        Raises:
            RequestRefused: the server says that this is no image.
            ServingError: no answer; `kind` says why.
        """

        def read(model: ClassifierModel, outputs: Mapping[str, np.ndarray]) -> Answer:
            if model.answer_output:
                raise UserError(f"{model.name} finds boxes or masks, and no classes; use `answer`", code="other-task")
            labels = [_text(label) for label in outputs[model.labels_output].reshape(-1)[:top_k]]
            shares = [float(share) for share in outputs[model.probabilities_output].reshape(-1)[:top_k]]
            named = [pair for pair in zip(labels, shares, strict=True) if pair[0]]
            return Answer(labels=tuple(label for label, _ in named), probabilities=tuple(share for _, share in named))

        return await self._infer(image, read)

    async def answer(self, image: bytes) -> dict[str, Any]:
        """Boxes or masks of one image, as the server's JSON has them: see docs/client.md.

        Raises:
            UserError: the model is a classifier.
            RequestRefused: the server says that this is no image.
            ServingError: no answer; `kind` says why.
        """

        def read(model: ClassifierModel, outputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
            if not model.answer_output:
                raise UserError(f"{model.name} finds classes, and no boxes or masks; use `classify`", code="other-task")
            return dict(json.loads(outputs[model.answer_output].reshape(-1)[0]))

        return await self._infer(image, read)

    async def _infer(self, image: bytes, read: Callable[[ClassifierModel, Mapping[str, np.ndarray]], Result]) -> Result:
        """Apply `read` to the model's outputs; what can't be read is the server's failure."""
        model = await self.classifier()
        content = np.empty((1, 1) if model.batched else (1,), dtype=np.object_)
        content.fill(image)

        async def ask(transport: Transport) -> Result:
            return read(model, await transport.infer(model.name, {model.image_input: content}))

        return await self._ask(ask)

    async def each(
        self,
        images: Iterable[Callable[[], bytes]],
        ask: Callable[[bytes], Awaitable[Result]],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> AsyncIterator[Result | UserError | ServingError]:
        """Answers in the order of the images; what went wrong with one stands in its place.

        Args:
            images: functions that read one image each, called when its turn comes: few are in memory at once.
            ask: `classify` or `answer`.
            concurrency: requests on their way at the same time.
        """
        running: list[asyncio.Task[Result | UserError | ServingError]] = []
        try:
            for read in images:
                running.append(asyncio.create_task(_one(read, ask)))
                if len(running) >= concurrency:
                    yield await running.pop(0)
            while running:
                yield await running.pop(0)
        finally:
            for task in running:
                task.cancel()

    async def logits(self, images: np.ndarray) -> np.ndarray:
        """The network's output for normalized images: [B, 3, H, W] float32 -> [B, classes] float32.

        Raises:
            ServingError: no answer; `kind` says why.
        """
        network = await self.network()
        sent = {network.input: images.astype(np.float32, copy=False)}
        return (await self._ask(lambda transport: transport.infer(network.name, sent)))[network.output]

    async def server(self) -> dict[str, Any]:
        """The server's name, version and extensions."""
        return await self._ask(lambda transport: transport.server())

    async def statistics(self, model: str) -> dict[str, Any]:
        """Return the counters of a model, as in Triton's statistics extension."""
        return await self._ask(lambda transport: transport.statistics(model))

    async def load(self, model: str, config: Mapping[str, Any]) -> None:
        """Have the server load a model again with this configuration, which it keeps until it is given another.

        Raises:
            ServingError: the server does not allow it, or could not.
        """
        await self._ask(lambda transport: transport.load(model, config))

    async def _ask(self, call: Callable[[Transport], Awaitable[Result]]) -> Result:
        return await with_retries(lambda: call(self._open()), self._retry, self.address, self._note_retry)

    def _open(self) -> Transport:
        if self._transport is None:
            self._transport = Transport(self.address, self._loading_key)
        return self._transport

    def _note_retry(self) -> None:
        self.num_retries += 1


async def _one(
    read: Callable[[], bytes], ask: Callable[[bytes], Awaitable[Result]]
) -> Result | UserError | ServingError:
    try:
        return await ask(read())
    except (UserError, ServingError) as error:
        return error


class Client:
    """AsyncClient without asyncio, with the same arguments: its event loop runs in a thread of its own."""

    def __init__(self, url: str = DEFAULT_URL, *, model: str | None = None, retry: RetryPolicy | None = None) -> None:
        self._client = AsyncClient(url, model=model, retry=retry)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="enginery-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections and the thread; a second time does nothing."""
        if self._thread.is_alive():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def is_ready(self) -> bool:
        """See AsyncClient."""
        return self._run(self._client.is_ready())

    def parameters(self) -> dict[str, str]:
        """See AsyncClient."""
        return self._run(self._client.parameters())

    def classify(self, image: bytes, *, top_k: int = 5) -> Answer:
        """See AsyncClient."""
        return self._run(self._client.classify(image, top_k=top_k))

    def answer(self, image: bytes) -> dict[str, Any]:
        """See AsyncClient."""
        return self._run(self._client.answer(image))

    def classify_all(self, images: Sequence[bytes], *, top_k: int = 5) -> list[Answer | UserError | ServingError]:
        """An answer for each image, in order; what went wrong with one stands in its place."""

        async def collect() -> list[Answer | UserError | ServingError]:
            reads = ((lambda image=image: image) for image in images)
            ask = partial(self._client.classify, top_k=top_k)
            return [answer async for answer in self._client.each(reads, ask)]

        return self._run(collect())

    def logits(self, images: np.ndarray) -> np.ndarray:
        """See AsyncClient."""
        return self._run(self._client.logits(images))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
