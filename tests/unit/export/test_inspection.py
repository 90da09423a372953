"""Reading the inspector's description of an engine, as TensorRT 8.6.0 wrote it on an H200, and in 10's other words."""

import json
from pathlib import Path

import pytest

from components.common.contracts.records import EngineLayer
from components.export.inspection import UnreadableLayers, parse_layers, summarize

FOLDER = Path(__file__).with_name("inspector")
CONVOLUTIONS = ["/stem/stem.0/Conv", "/block/block.0/Conv", "/block/block.2/Conv"]


def layers_of(name: str) -> list[EngineLayer]:
    return parse_layers((FOLDER / f"tensorrt_8_6_{name}.json").read_text())


def layer(precision: str, *nodes: str, kind: str = "CaskConvolution") -> EngineLayer:
    return EngineLayer(name="a layer", kind=kind, precision=precision, nodes=nodes)


def test_int8_engine():
    layers = layers_of("int8")
    found = summarize(layers, CONVOLUTIONS, own="INT8", file="int8.layers.json")
    assert (found.num_layers, found.num_reformats) == (8, 1)
    assert found.convolutions == {"INT8": 3}
    assert found.exceptions == {}
    fused = next(layer for layer in layers if "/Add" in layer.nodes)
    assert fused.nodes == ("/block/block.2/Conv", "/Add", "/Relu")
    assert next(layer for layer in layers if "/head/head.2/Gemm" in layer.nodes).precision == "INT8"


def test_tf32_is_told_from_fp32():
    found = summarize(layers_of("tf32"), CONVOLUTIONS, own="FP32", file="fp32.layers.json")
    assert found.convolutions == {"TF32": 2, "FP32": 1}
    assert found.exceptions == {"/block/block.0/Conv": "TF32", "/block/block.2/Conv": "TF32"}


def test_a_convolution_fused_with_its_pooling_has_no_kernel_name():
    layers = layers_of("fused_pooling")
    assert layers[1].nodes == ("/conv1/Conv", "/relu/Relu", "/maxpool/MaxPool")
    assert [layer.precision for layer in layers] == ["", "INT8", "INT8"]


@pytest.mark.parametrize(
    ("written", "precision"),
    [
        ("Half", "FP16"),
        ("Float", "FP32"),
        ("Int8", "INT8"),
        ("FP8", "FP8"),
        ("BFloat16", "BF16"),
        ("Int64", ""),
        ("Thirty-two wide channel vectorized row major Int8 format", "INT8"),
        ("Channel major FP16 format where channel % 8 == 0", "FP16"),
        ("Row major linear FP32", "FP32"),
        ("N/A due to dynamic shapes", ""),
    ],
)
def test_words_for_formats(written, precision):
    entry = {"Name": "a", "LayerType": "gemm", "Inputs": [{"Name": "x", "Format/Datatype": written}]}
    (found,) = parse_layers(json.dumps({"Layers": [entry]}))
    assert found.precision == precision


def test_a_layer_of_tensorrt_10():
    entry = {
        "Name": "__myl_Conv_myl0_3",
        "LayerType": "conv",
        "Inputs": [{"Name": "x", "Format/Datatype": "Int8"}, {"Name": "w", "Format/Datatype": "Int8"}],
        "Outputs": [{"Name": "y", "Format/Datatype": "Half"}],
        "TacticName": "sm90_xmma_fprop_implicit_gemm_i8i8_i8i32_f32",
        "Metadata": "[ONNX Layer: /conv1/Conv]\x1f[ONNX Layer: /relu/Relu]\x1f[ONNX Layer: /conv1/Conv]",
    }
    (found,) = parse_layers(json.dumps({"Layers": [entry]}))
    assert (found.precision, found.nodes) == ("INT8", ("/conv1/Conv", "/relu/Relu"))


def test_without_metadata_the_name_tells_the_nodes():
    entry = {"Name": "/a/Conv + /a/Relu", "LayerType": "CaskConvolution", "TacticName": "sm80_xmma_f16f16_f16f16_f16"}
    reformat = {"Name": "Reformatting CopyNode for Input Tensor 0 to /a/Conv + /a/Relu", "LayerType": "Reformat"}
    found = parse_layers(json.dumps({"Layers": [entry, reformat]}))
    assert [layer.nodes for layer in found] == [("/a/Conv", "/a/Relu"), ()]


@pytest.mark.parametrize("content", ["", "no JSON", "{}", "[]", '{"Layers": null}', '{"Layers": [{"Inputs": ["x"]}]}'])
def test_what_no_known_version_says(content):
    with pytest.raises(UnreadableLayers, match="what the engine inspector says can't be read"):
        parse_layers(content)


def test_summary():
    layers = [
        layer("", "/a/Conv", kind="Reformat"),  # its input, not the convolution
        layer("INT8", "/a/Conv", "/a/Relu"),
        layer("FP16", "/b/Conv"),
        layer("INT8", "/c/Conv"),
        layer("", kind="Reformat"),
    ]
    found = summarize(layers, ["/a/Conv", "/b/Conv", "/c/Conv", "/d/Conv"], own="INT8", file="f")
    assert found.convolutions == {"INT8": 2, "FP16": 1, "unknown": 1}
    assert found.exceptions == {"/b/Conv": "FP16", "/d/Conv": "unknown"}
    assert (found.num_layers, found.num_reformats) == (5, 2)


def test_nodes_that_have_no_name_in_the_onnx_file():
    layers = [layer("FP16", "node_of_conv1_out", "node_of_relu1_out"), layer("FP32", "node_of_conv2_out")]
    found = summarize(layers, ["conv1_out", "conv2_out"], own="FP16", file="f")
    assert found.convolutions == {"FP16": 1, "FP32": 1}
    assert found.exceptions == {"conv2_out": "FP32"}
