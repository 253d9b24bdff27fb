"""Peak matmul rates of GPUs, for MFU: dense bfloat16 with float32 accumulation, without sparsity.

MFU is always against this peak, also for a float32 run. A GPU that is not listed has no MFU: a wrong peak is worse than none, so names
are matched as whole words (an A10G is no A10, an RTX A4000 no A40) and cut-down variants are left out.

Sources: the accelerator tables of stas00/ml-engineering and torchtitan's `get_peak_flops`, which quotes NVIDIA's data sheets (half of
what they print, as those figures are with sparsity); A800, H800 and RTX 4090 are recalled from NVIDIA's A800 and H800 data sheets and
the Ada whitepaper, not read again. Checked against these on 2026-11-30.
"""

import re

# (pattern in JAX's device_kind, FLOP/s); the first that is found wins, so the general form comes last.
PEAK_FLOPS_PER_S: tuple[tuple[str, float], ...] = (
    (r"\bGB[23]00\b", 2500e12),  # one GPU, half of a superchip
    (r"\bB[23]00\b", 2250e12),
    (r"\bGH200\b", 989e12),
    (r"\bH200\b(?! NVL)", 989e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH[18]00\b(?! PCIe)", 989e12),  # 1830 MHz x 512 x 2 x 528 tensor cores
    (r"\bA[18]00\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bRTX 4090$", 165.2e12),
    (r"\bMI300X\b", 1307.4e12),
)


def peak_flops_per_s(device_kind: str) -> float | None:
    """Peak of one device; None where the kind is not in the table (a CPU, say)."""
    return next((peak for pattern, peak in PEAK_FLOPS_PER_S if re.search(pattern, device_kind)), None)
