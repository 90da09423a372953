"""benchmarks/train_roofline.py: what it makes of a trace."""

from typing import Any

import pytest

from benchmarks.train_roofline import Limits, kernels_of, measures_of

HALF = "c10::Half"
X, WEIGHT, Y = [8, 16, 32, 32], [64, 16, 3, 3], [8, 64, 32, 32]
# Values of X and Y, and of the weight.
NUM_X, NUM_Y, NUM_WEIGHT = 8 * 16 * 1024, 8 * 64 * 1024, 64 * 16 * 9


def launch(
    number: int, name: str, dims: list[Any], types: list[str], constants: tuple[str, ...] = (), **more: Any
) -> list[dict[str, Any]]:
    """An operator and a kernel of 1 ms."""
    args = {"External id": number, "Input Dims": dims, "Input type": types, "Concrete Inputs": list(constants), **more}
    kernel = {"cat": "kernel", "name": f"kernel of {name}", "dur": 1000, "args": {"External id": number}}
    return [{"cat": "cpu_op", "name": name, "args": args}, kernel]


@pytest.mark.parametrize(
    ("name", "dims", "types", "constants", "num_bytes", "flop"),
    [
        ("aten::cudnn_convolution", [X, WEIGHT], [HALF, HALF], (), 2 * (NUM_X + NUM_Y + NUM_WEIGHT), 1),
        (
            "aten::convolution_backward",
            [Y, X, WEIGHT, []],
            [HALF, HALF, HALF, "ScalarList"],
            ("", "", "", "[False, True, False]"),
            2 * (NUM_X + NUM_Y + NUM_WEIGHT),
            1,
        ),
        ("enginery::batch_statistics", [Y], [HALF], ("",), 2 * NUM_Y, 0),
        (  # a shortcut: two gradients, the result for its mask, x, and the gradient that is written
            "enginery::batch_norm_gradient_sums",
            [Y, Y, Y, Y, [64], [64], [64], [], []],
            [HALF] * 4 + ["float"] * 3 + ["Scalar"] * 2,
            ("", "", "", "", "", "", "", "2", "True"),
            2 * 5 * NUM_Y,
            0,
        ),
        (
            "enginery::batch_norm_gradient_sums",
            [Y, Y, Y, Y, [64], [64], [64], [], []],
            [HALF] * 4 + ["float"] * 3 + ["Scalar"] * 2,
            ("", "", "", "", "", "", "", "1", "False"),
            2 * 2 * NUM_Y,
            0,
        ),
        ("enginery::affine_relu_pool", [Y], [HALF], ("",), 2 * NUM_Y + NUM_Y // 4 * 5, 0),
    ],
)
def test_bytes_and_operations(
    name: str, dims: list[Any], types: list[str], constants: tuple[str, ...], num_bytes: int, flop: int
) -> None:
    backward = ("", "", "", "[True, True, False]")
    known = launch(1, "aten::convolution_backward", [Y, X, WEIGHT, []], [HALF] * 3 + ["ScalarList"], backward)
    trace = {"traceEvents": known[:1] + launch(2, name, dims, types, constants)}
    row = kernels_of(trace, 1, Limits(1e9, 1e15))[0]
    assert row["gigabytes"] == pytest.approx(num_bytes / 1e9)
    assert row["gflop"] == pytest.approx(flop * 2 * NUM_Y * 16 * 9 / 1e9)
    assert row["least_ms"] == pytest.approx(num_bytes / 1e6)  # at 1 GB/s, and arithmetic costs nothing


def test_a_step_is_the_sum_of_its_kernels() -> None:
    both = ("", "", "", "[True, True, False]")
    events = launch(1, "triton_poi_fused_add_1", [[1000]], ["float"], kernel_num_gb=1e-3)
    events += launch(2, "triton_poi_fused_add_1", [[1000]], ["float"], kernel_num_gb=1e-3)
    events += launch(3, "aten::_fused_sgd_", [[[10], [20]]], ["TensorList"])
    events += launch(4, "aten::convolution_backward", [Y, X, WEIGHT, []], [HALF] * 3 + ["ScalarList"], both)
    rows = kernels_of({"traceEvents": events}, 2, Limits(4e9, 1e12))
    measures = measures_of(rows)
    assert measures["step_ms"] == pytest.approx(2.0)  # four kernels of 1 ms in two steps
    assert measures["kernels_of_torch_compile_least_ms"] == pytest.approx(0.25)
    assert measures["the_rest_of_roofline"] == 1  # nothing is known of it
    assert {row["kind"]: row["calls_per_step"] for row in rows}["kernels of torch.compile"] == 1
    bound = next(row for row in rows if row["kind"] == "convolutions backward")
    assert bound["bound_by"] == "memory"
    assert bound["least_ms"] == pytest.approx(2 * 2 * (NUM_X + NUM_Y + NUM_WEIGHT) / 4e9 * 1e3 / 2)
