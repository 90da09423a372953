"""A bundle in MLflow's format: what makes `mlflow.pyfunc.load_model` return a model that runs it."""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from components.common.artifacts import Artifact, BundleManifest
from components.common.mlflow_models import classifier_signature, write_mlmodel
from components.common.records import Precision
from components.promote import pyfunc

BUNDLE = "bundle"  # folder of the bundle in the model


def write_model(
    bundle: Artifact[BundleManifest], precision: Precision, output: Path, measured_on: Sequence[str] = ()
) -> Path:
    """Write the files of an MLflow model into `output`, which holds the bundle as `bundle/`, now or later.

    They name the bundle's digest, so a model loads with this bundle only. Its plans or ONNX files are not touched.

    Args:
        bundle: what runs.
        precision: which of its models.
        output: made if it is new.
        measured_on: the CPU's instruction sets that the verdict rests on.

    Returns:
        `output`.
    """
    output.mkdir(parents=True, exist_ok=True)
    record = bundle.manifest
    write_mlmodel(
        output,
        loader_module=pyfunc.__name__,
        data=BUNDLE,
        config={
            "precision": precision,
            "bundle_digest": bundle.digest,
            "runtime": "auto",
            "measured_on": list(measured_on),
        },
        signature=classifier_signature(pyfunc.DEFAULT_TOP_K),
        requirements=[_requirement()],
        metadata={
            "architecture": record.architecture,
            "bundle_digest": bundle.digest,
            "precision": precision,
            "num_classes": len(record.classes),
            "input": "image files (bytes, base64 text, paths) or uint8 arrays [height, width, 3]",
        },
    )
    return output


def _requirement() -> str:
    """This package, in this version; it brings all that a model needs to run."""
    try:
        return f"enginery=={metadata.version('enginery')}"
    except metadata.PackageNotFoundError:  # a checkout that was not installed
        return "enginery"
