"""A bundle as a Python model of MLflow: images in, labels and probabilities out, as they were validated.

MLflow finds this module by its name in the MLmodel file, in versions registered long ago too: keep the name.
"""

import logging
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from components.common.artifacts import ALL_FILES, Artifact, BundleManifest, load
from components.common.errors import EngineryError, RuntimeUnavailable, UserError
from components.common.evaluation import most_likely
from components.common.records import Precision
from components.common.serving import Runtime, Serving, not_measured_here, serving_runner
from components.common.trust import check_chain, read_statements
from components.promote.images_in import encoded_images, image_name

_MOST_DECODED = 32  # images in memory at once, as in validation on a CPU
DEFAULT_TOP_K = 5


def _load_pyfunc(data_path: str, model_config: Mapping[str, Any]) -> "BundleModel":
    """What `mlflow.pyfunc.load_model` calls.

    Args:
        data_path: the bundle.
        model_config: "precision" and "bundle_digest" as promoted, "runtime": auto, tensorrt or openvino, and
            "measured_on", the CPU's instruction sets that the verdict rests on.

    Raises:
        EngineryError: the bundle is not the one that was promoted, or was changed.
        RuntimeUnavailable: nothing here runs it, or no INT8 file of the bundle is fit for this CPU.
    """
    temporary = TemporaryDirectory(prefix="enginery-")  # a copy: what was checked can't be swapped any more
    copy = shutil.copytree(data_path, Path(temporary.name) / "bundle", symlinks=True)
    bundle = load(copy, BundleManifest, verify=ALL_FILES)
    statements = read_statements(Path(data_path).parent)
    check_chain(
        f"the bundle {data_path}", {"bundle": bundle.digest}, statements, say=logging.getLogger(__name__).warning
    )
    if bundle.digest != model_config["bundle_digest"]:
        raise EngineryError(
            f"{data_path} is another bundle than was promoted: its manifest is {bundle.digest}, the model's "
            f"MLmodel file says {model_config['bundle_digest']}. Download the version again"
        )
    model = BundleModel(bundle, model_config["precision"], model_config["runtime"])
    model.folder = temporary
    runner = model.serving.runner
    note = not_measured_here(model_config["precision"], model_config.get("measured_on") or ())
    if note and runner is not None and runner.runtime == "openvino":
        logging.getLogger(__name__).warning(note)
    return model


class BundleModel:
    """One precision of a bundle, loaded. Several threads may call it; they take turns."""

    def __init__(self, bundle: Artifact[BundleManifest], precision: Precision, runtime: Runtime) -> None:
        try:
            from components.common.image_batches import ImageBatches
        except ModuleNotFoundError as error:
            raise RuntimeUnavailable(
                f"images are decoded by NVIDIA DALI as in validation, and it does not import ({error}); it needs no "
                "GPU: run `pip install enginery`"
            ) from None
        if runtime not in ("auto", "tensorrt", "openvino", "onnxruntime"):
            raise UserError(f"runtime {runtime!r} is unknown; take auto, tensorrt, openvino or onnxruntime")
        self.classes = bundle.manifest.classes
        self.bundle_digest = bundle.digest
        self.serving: Serving = serving_runner(bundle, precision, runtime)
        self._batch_size = min(_MOST_DECODED, bundle.manifest.shapes.max_batch)
        self._images = ImageBatches(bundle.manifest.transform, self._batch_size)
        self._lock = threading.Lock()

    folder: TemporaryDirectory[str] | None = None  # that goes with the model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """A row per image, in order: see `table`.

        Args:
            model_input: images; `images_in.TAKEN` says in which forms.
            params: "top_k": how many classes to name; 0 for all.

        Raises:
            UserError: something that is no image was sent; the message says which one.
        """
        top_k = (params or {}).get("top_k", DEFAULT_TOP_K)
        if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 0:
            raise UserError(f"top_k must be a whole number, 0 for all classes or more; got {top_k!r}")
        encoded = encoded_images(model_input)
        return table(self._logits(encoded), self.classes, int(top_k) or len(self.classes))

    def _logits(self, encoded: Sequence[bytes]) -> np.ndarray:
        """[images, classes] float32."""
        parts = []
        for start in range(0, len(encoded), self._batch_size):
            chunk = encoded[start : start + self._batch_size]
            names = [image_name(start + index) for index in range(len(chunk))]
            with self._lock:  # decoder and runner are for one thread at a time
                assert self.serving.runner is not None
                parts.append(self.serving.runner.infer(self._images.load(chunk, names)))
        return np.concatenate(parts)


def table(logits: np.ndarray, classes: Sequence[str], top_k: int) -> pd.DataFrame:
    """What the model says of each image.

    Columns: `label` and its `probability` (0..1); `labels` and `probabilities`, lists of the `top_k` most likely
    classes, the likeliest first, ties in the order of the classes. Logits with NaN name no class, as in validation:
    the label is None and the lists are empty.

    Args:
        logits: [images, classes] float32.
        classes: their names.
        top_k: 1 or more.
    """
    rows: list[tuple[str | None, float, list[str], list[float]]] = []
    for row in logits:
        if np.isnan(row).any():
            rows.append((None, float("nan"), [], []))
            continue
        best, shares = most_likely(row, top_k)
        labels = [classes[index] for index in best]
        rows.append((labels[0], float(shares[0]), labels, shares.tolist()))
    return pd.DataFrame(rows, columns=["label", "probability", "labels", "probabilities"])
