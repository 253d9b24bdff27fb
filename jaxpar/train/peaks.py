"""Peak matmul rates of GPUs, for MFU: dense bfloat16 with float32 accumulation, without sparsity.

MFU is always against this peak, also for a float32 run. Read on 2026-11-30 from NVIDIA's data sheets (the sparse figures
there are twice these): A100 https://www.nvidia.com/en-us/data-center/a100/, H100 https://www.nvidia.com/en-us/data-center/h100/,
H200 https://www.nvidia.com/en-us/data-center/h200/, B200 https://www.nvidia.com/en-us/data-center/dgx-b200/, L4, L40S alike.
"""

# (part of JAX's device_kind, FLOP/s); the first that is contained wins, so longer names come first.
PEAK_FLOPS_PER_S: tuple[tuple[str, float], ...] = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("B100", 1.75e15),
    ("GH200", 989.4e12),
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)


def peak_flops_per_s(device_kind: str) -> float | None:
    """Peak of one device; None where the kind is not in the table (a CPU, say)."""
    return next((peak for part, peak in PEAK_FLOPS_PER_S if part in device_kind), None)
