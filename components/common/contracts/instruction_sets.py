"""The instruction set that INT8 runs with on this CPU, by oneDNN's names.

Without VNNI a CPU adds pairs of products of INT8 in 16 bits. 255 * 127 * 2 does not fit into them, so sums saturate;
weights to +-63 (7 bits) never do: 255 * 63 * 2 = 32,130 (oneDNN developer guide, "Nuances of int8 computations").
"""

import os
import platform
from pathlib import Path

# oneDNN's name -> what /proc/cpuinfo calls what it needs. The widest first. Sets that differ only in floating point,
# such as AVX512_CORE_BF16, multiply INT8 like the one that stands here.
_NEEDS = {
    "AVX512_CORE_AMX": {"amx_int8", "avx512_vnni"},
    "AVX512_CORE_VNNI": {"avx512_vnni", "avx512bw", "avx512dq", "avx512vl"},
    "AVX512_CORE": {"avx512bw", "avx512dq", "avx512vl"},
    "AVX2_VNNI": {"avx_vnni"},
    "AVX2": {"avx2"},
    "SSE41": {"sse4_1"},
}
SATURATING = ("SSE41", "AVX2", "AVX512_CORE")
VARIABLE = "ONEDNN_MAX_CPU_ISA"  # oneDNN's own, which OpenVINO obeys: never more than the CPU has
_OLD_VARIABLE = "DNNL_MAX_CPU_ISA"  # which oneDNN still reads
_LIMITS = {
    "SSE41": ("SSE41",),
    "AVX": ("SSE41",),
    "AVX2": ("AVX2", "SSE41"),
    "AVX2_VNNI": ("AVX2_VNNI", "AVX2", "SSE41"),
    "AVX2_VNNI_2": ("AVX2_VNNI", "AVX2", "SSE41"),
    "AVX512_CORE": ("AVX512_CORE", "AVX2", "SSE41"),
    **dict.fromkeys(
        ("AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16"),
        ("AVX512_CORE_VNNI", "AVX512_CORE", "AVX2", "SSE41"),
    ),
}


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The CPU's features by Linux's names; empty where they are not known."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next(
        (set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set()
    )


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The widest instruction set that INT8 may use here; the machine's architecture where it is not x86-64.

    The narrowest where nothing says what an x86-64 has: what is right there is right on each.
    """
    flags = cpu_flags(cpuinfo)
    limit = os.environ.get(VARIABLE) or os.environ.get(_OLD_VARIABLE, "")
    allowed = _LIMITS.get(limit.upper(), tuple(_NEEDS))
    unknown = "SSE41" if platform.machine() == "x86_64" else platform.machine()
    return next((name for name, needs in _NEEDS.items() if name in allowed and needs <= flags), unknown)


def available() -> tuple[str, ...]:
    """All instruction sets that oneDNN can be limited to on this CPU, the widest first; none where it is not x86-64."""
    flags = cpu_flags()
    return tuple(name for name, needs in _NEEDS.items() if needs <= flags)
