"""INT8 by a peer, in that peer's own environment: called by `benchmarks.int8_cpu`, imports nothing of this project.

    PYTHON benchmarks/peers.py PEER FP32_ONNX IMAGES_NPZ OUTPUT MAX_DROP_POINTS

PEER is a name in PEERS. IMAGES_NPZ has `calibration` and `selection`, [N, 3, H, W] float32 each, normalized, and
`labels` of the latter. OUTPUT is an OpenVINO .xml or an ONNX file. Prints the seconds of the search as JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def nncf_quantize(fp32: Path, images: Any, output: Path, _: float) -> None:
    """NNCF with its defaults; `transformer` where the network has attention, as its guide says."""
    import nncf
    import openvino as ov

    model = ov.Core().read_model(fp32)
    batches = nncf.Dataset([image[None] for image in images["calibration"]])
    quantized = nncf.quantize(
        model, batches, subset_size=len(images["calibration"]), model_type=_model_type(model, nncf)
    )
    ov.save_model(quantized, output, compress_to_fp16=False)


def nncf_accuracy_control(fp32: Path, images: Any, output: Path, max_drop_points: float) -> None:
    """NNCF with layers in float until top-1 on the selection images is within the budget."""
    import nncf
    import openvino as ov

    labels = images["labels"]

    def top1(compiled: Any, batches: Any) -> tuple[float, None]:
        answers = [compiled(batch)[0].argmax(axis=1)[0] for batch in batches]
        return float(np.mean(np.asarray(answers) == labels)), None

    model = ov.Core().read_model(fp32)
    quantized = nncf.quantize_with_accuracy_control(
        model,
        nncf.Dataset([image[None] for image in images["calibration"]]),
        nncf.Dataset([image[None] for image in images["selection"]]),
        top1,
        max_drop=max_drop_points / 100,
        subset_size=len(images["calibration"]),
        model_type=_model_type(model, nncf),
    )
    ov.save_model(quantized, output, compress_to_fp16=False)


def _model_type(model: Any, nncf: Any) -> Any:
    is_transformer = any(operation.get_type_name() == "Softmax" for operation in model.get_ops())
    return nncf.ModelType.TRANSFORMER if is_transformer else None


def neural_compressor(fp32: Path, images: Any, output: Path, _: float) -> None:
    """Neural Compressor's static quantization as Q/DQ, with weights by channel, which its examples set for networks."""
    from onnx_neural_compressor import data_reader
    from onnx_neural_compressor.quantization import QuantFormat, config, quantize

    class Reader(data_reader.CalibrationDataReader):
        def __init__(self) -> None:
            self.rewind()

        def get_next(self) -> dict[str, Any] | None:
            image = next(self.left, None)
            return None if image is None else {images["input_name"].item(): image[None]}

        def rewind(self) -> None:
            self.left = iter(images["calibration"])

    settings = config.StaticQuantConfig(
        Reader(), quant_format=QuantFormat.QDQ, per_channel=True, calibration_sampling_size=len(images["calibration"])
    )
    quantize(fp32.as_posix(), output.as_posix(), settings)


PEERS: dict[str, Callable[[Path, Any, Path, float], None]] = {
    "nncf": nncf_quantize,
    "nncf_accuracy_control": nncf_accuracy_control,
    "neural_compressor": neural_compressor,
}


if __name__ == "__main__":
    name, fp32_file, images_file, output_file, drop = sys.argv[1:]
    arrays = np.load(images_file)
    loaded = {key: arrays[key] for key in arrays}
    started = time.perf_counter()
    PEERS[name](Path(fp32_file), loaded, Path(output_file), float(drop))
    print(json.dumps({"seconds": time.perf_counter() - started}))
