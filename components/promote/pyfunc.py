"""A bundle as a Python model of MLflow: images in, labels and probabilities out, or sentences in and out."""

import base64
import binascii
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from components.common.contracts.errors import EngineryError, RuntimeUnavailable, UserError
from components.common.contracts.manifests import ALL_FILES, Artifact, BundleManifest, load
from components.common.contracts.records import Precision
from components.common.contracts.transforms import TransformSpec
from components.common.data.evaluation import most_likely, names_class
from components.common.data.image_files import encode_image, upright_size
from components.common.registry.trust import check_chain, read_statements
from components.common.runtimes import RUNTIME_OPTIONS, RUNTIMES, RuntimeOption
from components.common.runtimes.selection import RuntimeSelection, not_measured_here, select_runtime
from components.common.tasks import TASKS, TaskName
from components.common.tasks.answers import Answer, View, answers_of

COLUMN = "image"  # of a table
TAKEN = (
    "give images as bytes of JPEG, PNG, WebP, BMP or TIFF files, base64 text of such bytes, pathlib.Path objects, or "
    f"uint8 arrays [height, width, 3] in RGB: one, a list, or a pandas DataFrame with the column {COLUMN!r}"
)


def encoded_images(sent: Any) -> list[bytes]:
    """The images in what was sent, each as the content of an image file.

    An array becomes a PNG without loss, so that it takes the same way as a file. Text is base64, as in JSON, and never
    a path: a client of a server could otherwise have it open the server's own files.

    Raises:
        UserError: nothing was sent, or something that holds no image; the message says which one.
    """
    items = list(_items(sent))
    if not items:
        raise UserError(f"no image was sent; {TAKEN}", code="no-image")
    return [_encoded(item, image_name(index)) for index, item in enumerate(items)]


def image_name(index: int) -> str:
    """Return the name of one of the images that were sent, for errors."""
    return f"image {index}"


def _items(sent: Any, column: str = COLUMN, taken: str = TAKEN) -> Iterable[Any]:
    if isinstance(sent, pd.DataFrame):
        if column not in sent.columns and len(sent.columns) != 1:
            columns = ", ".join(map(repr, sent.columns)) or "none"
            raise UserError(f"the table has no column {column!r}, its columns: {columns}; {taken}", code="no-column")
        return list(sent[column] if column in sent.columns else sent.iloc[:, 0])
    if isinstance(sent, Mapping):
        if column not in sent:
            message = f"there is no key {column!r}, the keys are {', '.join(map(repr, sent)) or 'none'}; {taken}"
            raise UserError(message, code="no-column")
        return _items(sent[column], column, taken)
    if isinstance(sent, pd.Series | list | tuple):
        return list(sent)
    if isinstance(sent, np.ndarray):
        return _items_of_array(sent, taken)
    return [sent]


def _items_of_array(sent: np.ndarray, taken: str) -> Iterable[Any]:
    if sent.dtype.kind == "S":  # NumPy drops zeros at the end of these
        message = f"an array of {sent.dtype} cuts bytes off; use a list, or an array of dtype object. {taken}"
        raise UserError(message, code="fixed-width-bytes")
    if sent.dtype.kind in "OU":  # of files' contents, base64 texts, paths or arrays
        return sent.reshape(-1).tolist()
    return list(sent) if sent.ndim == 4 else [sent]


def _encoded(item: Any, name: str) -> bytes:
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    if isinstance(item, str):
        try:
            return base64.b64decode("".join(item.split()), validate=True)
        except (binascii.Error, ValueError):
            text = item if len(item) <= 60 else f"{item[:57]}..."
            raise UserError(
                f"{name} is the text {text!r}, which is not base64; to name a file of this machine, give a "
                "pathlib.Path",
                code="not-base64",
            ) from None
    if isinstance(item, Path):
        try:
            return item.read_bytes()
        except OSError as error:
            raise UserError(
                f"{name}: can't read {item}: {error.strerror}; name an image file", code="unreadable-file"
            ) from None
    if isinstance(item, list):  # pixels, as JSON has them
        try:
            item = np.asarray(item)
        except ValueError:
            raise UserError(f"{name} is a list whose rows differ in length; {TAKEN}", code="ragged-list") from None
    if isinstance(item, np.ndarray):
        # pixels: [height, width, 3] of 0..255 in RGB
        if item.ndim != 3 or item.shape[2] != 3 or 0 in item.shape:
            raise UserError(
                f"{name} is an array of shape {item.shape}; pixels are [height, width, 3] in RGB", code="pixel-shape"
            )
        if item.dtype.kind not in "iu":
            message = f"{name} is an array of {item.dtype}; pixels are uint8, 0 to 255, neither scaled nor normalized"
            raise UserError(message, code="pixel-type")
        if item.min() < 0 or item.max() > 255:
            raise UserError(
                f"{name} has pixels from {item.min()} to {item.max()}; they go from 0 to 255", code="pixel-range"
            )
        return encode_image(Image.fromarray(item.astype(np.uint8)), "PNG", compress_level=0)
    raise UserError(f"{name} is a {type(item).__name__}; {TAKEN}", code="not-an-image")


_MOST_DECODED = 32  # images in memory at once, as in validation on a CPU
DEFAULT_TOP_K = 5


def _load_pyfunc(data_path: str, model_config: Mapping[str, Any]) -> "BundleModel | TextModel":
    """Load a bundle: `mlflow.pyfunc.load_model` calls this.

    Args:
        data_path: the bundle.
        model_config: "precision" and "bundle_digest" as promoted, "runtime": auto, tensorrt or openvino, and
            "measured_on", the CPU's instruction sets that the verdict rests on.

    Raises:
        EngineryError: the bundle is not the one that was promoted, or was changed.
        RuntimeUnavailable: nothing here runs it, or no INT8 file of the bundle is fit for this CPU.
    """
    return open_model(Path(data_path), model_config, read_statements(Path(data_path).parent))


def open_model(
    folder: Path, model_config: Mapping[str, Any], statements: Mapping[str, bytes] | None = None
) -> "BundleModel | TextModel":
    """The same of a bundle that may have been checked: `statements` is None where its digest is one that is trusted."""
    temporary = TemporaryDirectory(prefix="enginery-")  # a copy: what was checked can't be swapped any more
    copy = load(folder, BundleManifest).copy_to(Path(temporary.name) / "bundle")
    bundle = load(copy, BundleManifest, verify=ALL_FILES)
    if statements is not None:
        say = logging.getLogger(__name__).warning
        check_chain(f"the bundle {folder}", {"bundle": bundle.digest}, statements, say=say)
    if bundle.digest != model_config["bundle_digest"]:
        raise EngineryError(
            f"{folder} is another bundle than was promoted: its manifest is {bundle.digest}, the model's "
            f"MLmodel file says {model_config['bundle_digest']}. Download the version again",
            code="other-bundle",
        )
    kind = TextModel if bundle.manifest.text is not None else BundleModel
    model = kind(bundle, model_config["precision"], model_config["runtime"])
    model.folder = temporary
    note = not_measured_here(model_config["precision"], model_config.get("measured_on") or ())
    if note and RUNTIMES[model.runtime].depends_on_instruction_set:
        logging.getLogger(__name__).warning(note)
    return model


class BundleModel:
    """One precision of a bundle, loaded. Several threads may call it; they take turns."""

    def __init__(self, bundle: Artifact[BundleManifest], precision: Precision, runtime: RuntimeOption) -> None:
        try:
            from components.common.data.dali_pipelines import ImageBatches
        except ModuleNotFoundError as error:
            raise RuntimeUnavailable(
                f"images are decoded by NVIDIA DALI as in validation, and it does not import ({error}); it needs no "
                "GPU: run `pip install enginery`",
                code="no-decoder",
            ) from None
        _check_runtime(runtime)
        self.task, self.transform = bundle.manifest.task, bundle.manifest.image_transform
        self.classes = bundle.manifest.classes
        self.bundle_digest = bundle.digest
        self.selected: RuntimeSelection = select_runtime(bundle, precision, runtime)
        self._batch_size = min(_MOST_DECODED, bundle.manifest.image_shapes.max_batch)
        self._images = ImageBatches(bundle.manifest.image_transform, self._batch_size)
        self._lock = threading.Lock()

    folder: TemporaryDirectory[str] | None = None  # that goes with the model

    @property
    def runtime(self) -> str:
        """One of RUNTIMES."""
        assert self.selected.runner is not None
        return self.selected.runner.runtime

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """A row per image, in order and with a table's index: see `table`, of other tasks `answer_table`.

        Args:
            model_input: images; `TAKEN` says in which forms.
            params: "top_k": how many classes to name; 0 for all.

        Raises:
            UserError: something that is no image was sent; the message says which one.
        """
        top_k = (params or {}).get("top_k", DEFAULT_TOP_K)
        if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 0:
            message = f"top_k must be a whole number, 0 for all classes or more; got {top_k!r}"
            raise UserError(message, code="invalid-top-k", setting="top_k")
        encoded = encoded_images(model_input)
        if TASKS[self.task].classifies:
            logits = np.concatenate(list(self._outputs(encoded)))  # [images, classes] float32
            found = table(logits, self.classes, int(top_k) or len(self.classes))
        else:
            found = answer_table(self._outputs(encoded), encoded, self.task, self.classes, self.transform)
        return _with_index(found, model_input)

    def _outputs(self, encoded: Sequence[bytes]) -> Iterator[np.ndarray]:
        """The network's outputs, batch after batch."""
        for start in range(0, len(encoded), self._batch_size):
            chunk = encoded[start : start + self._batch_size]
            names = [image_name(start + index) for index in range(len(chunk))]
            with self._lock:  # decoder and runner are for one thread at a time
                assert self.selected.runner is not None
                outputs = self.selected.runner.infer(self._images.load(chunk, names))
            yield outputs


TEXT_COLUMN = "text"  # of a table
TAKEN_TEXT = f"give sentences as text: one, a list, or a pandas DataFrame with the column {TEXT_COLUMN!r}"


class TextModel:
    """One precision of a translator, loaded. Several threads may call it; they take turns."""

    folder: TemporaryDirectory[str] | None = None  # that goes with the model

    def __init__(self, bundle: Artifact[BundleManifest], precision: Precision, runtime: RuntimeOption) -> None:
        from components.common.tasks.translation.runners import open_translator

        _check_runtime(runtime)
        self.bundle_digest = bundle.digest
        self._translator = open_translator(bundle, precision, runtime)
        self._lock = threading.Lock()

    @property
    def runtime(self) -> str:
        """One of RUNTIMES."""
        return self._translator.runtime

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """A row per sentence, in order and with a table's index: its `translation`.

        Args:
            model_input: sentences; `TAKEN_TEXT` says in which forms.
            params: "beam_size": how many beginnings the search keeps; 1 is greedy.

        Raises:
            UserError: something that is no sentence was sent, or one is too long; the message says which one.
        """
        from components.common.tasks.translation.sentences import read_sentence

        beam_size = (params or {}).get("beam_size", 1)
        if isinstance(beam_size, bool) or not isinstance(beam_size, int | np.integer) or not 1 <= beam_size <= 32:
            message = f"beam_size must be a whole number from 1 to 32; got {beam_size!r}"
            raise UserError(message, code="invalid-beam-size", setting="beam_size")
        sent = list(_items(model_input, TEXT_COLUMN, TAKEN_TEXT))
        if not sent:
            raise UserError(f"no sentence was sent; {TAKEN_TEXT}", code="no-sentence")
        for number, item in enumerate(sent, 1):
            if not isinstance(item, str):
                raise UserError(f"sentence {number} is a {type(item).__name__}; {TAKEN_TEXT}", code="not-a-sentence")
        sentences = [read_sentence(item, f"sentence {number}") for number, item in enumerate(sent, 1)]
        with self._lock:
            said = self._translator.translate(sentences, beam_size=int(beam_size))
        return _with_index(pd.DataFrame({"translation": said}), model_input)


def _with_index(found: pd.DataFrame, sent: Any) -> pd.DataFrame:
    """Give answers the index of the table that was sent, by which pandas puts them beside its rows."""
    return found.set_axis(sent.index) if isinstance(sent, pd.DataFrame | pd.Series) else found


def _check_runtime(runtime: str) -> None:
    if runtime not in RUNTIME_OPTIONS:
        message = f"runtime {runtime!r} is unknown; take one of {', '.join(RUNTIME_OPTIONS)}"
        raise UserError(message, code="unknown-runtime", setting="runtime")


def table(logits: np.ndarray, classes: Sequence[str], top_k: int) -> pd.DataFrame:
    """Return the prediction for each image.

    Columns: `label` and its `probability` (0..1); `labels` and `probabilities`, lists of the `top_k` most likely
    classes, the likeliest first, ties in the order of the classes. Logits that name no class, as in validation, have
    None as their label and empty lists.

    Args:
        logits: [images, classes] float32.
        classes: their names.
        top_k: 1 or more.
    """
    rows: list[tuple[str | None, float, list[str], list[float]]] = []
    for row in logits:
        if not names_class(row):
            rows.append((None, float("nan"), [], []))
            continue
        best, shares = most_likely(row, top_k)
        labels = [classes[index] for index in best]
        rows.append((labels[0], float(shares[0]), labels, shares.tolist()))
    return pd.DataFrame(rows, columns=["label", "probability", "labels", "probabilities"])


def answer_table(
    outputs: Iterable[np.ndarray],
    encoded: Sequence[bytes],
    task: TaskName,
    classes: Sequence[str],
    transform: TransformSpec,
) -> pd.DataFrame:
    """Return the answer for each image, in the columns of the task's `answers`.

    Of detection: lists of `classes`, `scores` and `boxes`, [x1, y1, x2, y2] in pixels of the image, the surest first.
    Of segmentation: `classes` with their `shares`, the largest first, and the `mask` of a `region` of the image, a PNG
    of the classes' numbers as base64 text. An output with NaN or infinity answers nothing: empty lists, and no text.

    Args:
        outputs: of the network, [B, ...] float32 each.
        encoded: the images.
        task: what the network is for.
        classes: their names.
        transform: by which images became inputs.
    """
    known, rows = answers_of(task), []
    empty: Answer = {name: None if kind == "text" else [] for name, kind in known.columns.items()}
    for output, data in zip((row for batch in outputs for row in batch), encoded, strict=True):
        view = View.of(upright_size(data), transform)
        rows.append(known.answer(output, classes, view) if np.isfinite(output).all() else empty)
    return pd.DataFrame(rows, columns=list(known.columns))
