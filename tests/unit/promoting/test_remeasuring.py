"""A champion that was measured on other images is measured on these, by the runtime that the machine has."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from components.common.contracts.manifests import (
    Artifact,
    BundleManifest,
    DatasetManifest,
    PromotionManifest,
    ReportManifest,
    VerdictManifest,
    load,
    seal,
)
from components.common.contracts.records import AccuracyReport, AccuracyRow, BenchmarkReport, CalibrationEntry, CpuModel
from components.common.contracts.settings import StepConfig
from components.common.contracts.transforms import ShapeSpec, transform_for
from components.common.registry.model_registry import Registry

from .chains import promote_chain

SIZE = 16


def write_model(file: Path, favourite: int, num_classes: int) -> None:
    """A model that sees nothing: it always says one class."""
    logits = np.zeros((1, num_classes), np.float32)
    logits[0, favourite] = 1.0
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["mean"], axes=[1, 2, 3], keepdims=0),  # [B]
        helper.make_node("Unsqueeze", ["mean", "last"], ["column"]),  # [B, 1]
        helper.make_node("Mul", ["column", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "logits_of_one"], ["logits"]),  # [B, classes]
    ]
    constants = [
        numpy_helper.from_array(np.array([1], np.int64), "last"),
        numpy_helper.from_array(np.zeros((1, num_classes), np.float32), "zero"),
        numpy_helper.from_array(logits, "logits_of_one"),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, SIZE, SIZE])
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", num_classes])
    graph = helper.make_graph(nodes, "constant", [images], [output], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(file))


def chain_on(
    folder: Path, data: Artifact[DatasetManifest], favourite: int, top1_pct: float, split: str = ""
) -> dict[str, Path]:
    """A bundle of such a model, a report on some split, the verdict, and the data set."""
    paths = {name: folder / name for name in ("bundle", "report", "verdict")}
    for path in paths.values():
        path.mkdir(parents=True)
    write_model(paths["bundle"] / "int8.onnx", favourite, len(data.manifest.classes))
    bundle = seal(
        paths["bundle"],
        BundleManifest,
        inputs={"model": "sha256:0", "dataset": data.digest},
        config=StepConfig(),
        architecture="constant",
        classes=data.manifest.classes,
        transform=transform_for(SIZE, resize_ratio=1.0),
        shapes=ShapeSpec(height=SIZE, width=SIZE),
        models={"int8": "int8.onnx"},
        cpu_models=(CpuModel(file="int8.onnx", weight_bits=8, activations="signed", saturates_on=()),),
        engines=(),
        calibration=CalibrationEntry(method="max", num_images=1, split="train", seconds=0),
        num_quantized_layers=1,
        num_quantizable_layers=1,
    )
    labels = np.repeat(np.arange(10), 12).astype(np.int32)
    np.savez(paths["report"] / "predictions.npz", int8=np.full((120, 5), favourite, np.int16), labels=labels)
    row = AccuracyRow(precision="int8", runtime="openvino", top1_pct=top1_pct, num_images=120)
    digests = {"dataset_digest": data.digest, "bundle_digest": bundle.digest}
    accuracy = AccuracyReport(rows=(row,), split_digest=split or data.manifest.splits["val"].digest, **digests)
    report = seal(
        paths["report"],
        ReportManifest,
        inputs={"bundle": bundle.digest, "dataset": data.digest},
        config=StepConfig(),
        accuracy=accuracy,
        benchmark=BenchmarkReport(bundle_digest=bundle.digest, rows=()),
    )
    fields = {"passed": True, "precision": "int8", "checks": ()}
    seal(paths["verdict"], VerdictManifest, inputs={"report": report.digest}, config=StepConfig(), **fields)
    return {**paths, "dataset": data.path}


def register_on_other_images(registry: Registry, paths: dict[str, Path]) -> None:
    """What promote would have registered when it had those images."""
    from components.common.registry.alias_changes import Proposal, change_aliases
    from components.common.registry.version_evaluation import load_standing

    folder = paths["bundle"].parent / "artifacts"  # MLflow's default would be where the tests are run
    run = registry.client.create_run(registry.client.create_experiment("earlier", folder.as_uri()))
    for part in ("bundle", "report", "verdict"):
        registry.client.log_artifacts(run.info.run_id, str(paths[part]), f"model/{part}")
    standing = load_standing(paths["report"], paths["verdict"])
    registry.create_version("m", run.info.run_id, standing.tags)
    made = Proposal(kind="promote", aliases={"champion": "1"}, why="the first", digests=standing.digests)
    change_aliases(registry, "m", lambda situation: made)


@pytest.mark.parametrize(("reported", "becomes"), [(10.0, True), (9.0, False)])
def test_the_number_of_now_counts(
    uri: str,
    registry: Registry,
    tmp_path: Path,
    digits_dataset: Artifact[DatasetManifest],
    reported: float,
    becomes: bool,
) -> None:
    """The champion claims 99 % on other images; on these it has 10 %: it always says the same of ten classes."""
    register_on_other_images(registry, chain_on(tmp_path / "old", digits_dataset, 3, 99.0, split="of other images"))
    told = promote_chain(uri, chain_on(tmp_path / "new", digits_dataset, 4, reported), tmp_path / "promotion")
    comparison = load(tmp_path / "promotion", PromotionManifest).manifest.comparison
    assert comparison is not None, told
    assert comparison.champion_top1_pct == pytest.approx(10.0)
    assert comparison.measured_again == "openvino"
    assert comparison.paired is not None
    assert (comparison.paired.num_lost, comparison.paired.num_gained) == (12, 12)
    assert "(INT8, measured again with openvino) on the same 120 images" in told
    assert (registry.aliases("m")["champion"] == "2") is becomes


def test_other_classes_can_not_be_compared(
    uri: str, registry: Registry, tmp_path: Path, digits_dataset: Artifact[DatasetManifest]
) -> None:
    fewer = digits_dataset.manifest.model_copy(update={"classes": ("a", "b", "c", "d")})
    other = Artifact(path=digits_dataset.path, manifest=fewer, digest=digits_dataset.digest)
    register_on_other_images(registry, chain_on(tmp_path / "old", other, 3, 99.0, split="of other images"))
    told = promote_chain(uri, chain_on(tmp_path / "new", digits_dataset, 4, 10.0), tmp_path / "promotion")
    assert "can't be compared with the champion, version 1: its 4 classes are not the 10 of the data set" in told
    assert "Promote again on a machine that can, or make it champion all the same: enginery promote m 2" in told
    assert registry.aliases("m") == {"candidate": "2", "champion": "1"}
