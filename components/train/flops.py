"""How much arithmetic a training step is, and how much of it a GPU could do."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

# What matrix units reach without sparsity, in TFLOP/s, by NVIDIA's data sheets: (fp16 and bf16, TF32, FP32 without
# them). None where a GPU has no such unit. The first name that is part of the GPU's own counts.
_PEAKS: tuple[tuple[str, tuple[float, float | None, float]], ...] = (
    ("B200", (2250.0, 1100.0, 75.0)),
    ("H200 NVL", (835.0, 417.0, 60.0)),
    ("H200", (989.4, 494.7, 66.9)),
    ("GH200", (989.4, 494.7, 66.9)),
    ("H100 NVL", (835.0, 417.0, 60.0)),
    ("H100 PCIe", (756.0, 378.0, 51.0)),
    ("H100 80GB HBM3", (989.4, 494.7, 66.9)),
    ("A100", (312.0, 156.0, 19.5)),
    ("A30", (165.0, 82.0, 10.3)),
    ("A10G", (70.0, 35.0, 31.2)),
    ("L40S", (362.0, 183.0, 91.6)),
    ("L40", (181.0, 90.5, 90.5)),
    ("L4", (121.0, 60.0, 30.3)),
    ("V100-SXM2", (125.0, None, 15.7)),
    ("V100-PCIE", (112.0, None, 14.0)),
    ("T4", (65.0, None, 8.1)),
)
_NO_BF16 = ("V100", "T4")


def flops_per_image(model: nn.Module, height: int, width: int) -> float | None:
    """Floating-point operations of forward and backward over one image; a multiply-add counts as two.

    Counts convolutions and matrix products, as torch's flop counter does, on tensors without data. Layers that are
    frozen count only what training needs of them. None for a model that can't run without data.
    """
    weights = {name: _without_data(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    images = torch.empty(2, 3, height, width, device="meta")  # BatchNorm wants more than one
    was_training = model.training
    model.train()
    try:
        with FlopCounterMode(display=False) as counter:
            torch.func.functional_call(model, weights, (images,)).sum().backward()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    finally:
        model.train(was_training)
    return counter.get_total_flops() / len(images)


def peak_tflops(gpu_name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """TFLOP/s of a GPU for products of `dtype`, by its data sheet; None where it is not known here."""
    row = next((row for name, row in _PEAKS if _is_named(name, gpu_name)), None)
    if row is None or (dtype == torch.bfloat16 and any(name in gpu_name for name in _NO_BF16)):
        return None
    half, tensor32, plain = row
    if dtype in (torch.float16, torch.bfloat16):
        return half
    return tensor32 if tf32 and tensor32 is not None else plain


def _is_named(name: str, gpu_name: str) -> bool:
    """Whether the words of a name are among those of the GPU's: "L4" is not "L40", nor is "A100" "A1000"."""
    words = gpu_name.replace("NVIDIA ", "").replace("Tesla ", "")
    return words == name or words.startswith((f"{name} ", f"{name}-"))


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
