"""Choice of the local attention kernel; the names that other packages use are re-exported here."""

from typing import Any

from jaxpar.ops import attention_cudnn, attention_reference, attention_xla
from jaxpar.ops.attention_spec import MASKED, AttentionSpec, DropoutWords, Kernel, Visibility

XLA = Kernel("xla", attention_xla.attend, attention_xla.block_forward, attention_xla.block_backward)
CUDNN = Kernel("cudnn", attention_cudnn.attend, attention_cudnn.block_forward, attention_cudnn.block_backward)
# The ring needs blocks: it shares those of `xla`, whose float64 form is judged against `attend` of this one.
REFERENCE = Kernel("reference", attention_reference.attend, attention_xla.block_forward, attention_xla.block_backward)
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (XLA, CUDNN, REFERENCE)}
GPU_PLATFORMS = ("gpu", "cuda")

__all__ = ["KERNELS", "MASKED", "AttentionSpec", "DropoutWords", "Kernel", "Visibility", "choose_kernel"]


def choose_kernel(name: str, platform: str, dtype: Any, head_dim: int, spec: AttentionSpec, segments: bool) -> tuple[Kernel, str]:
    """The kernel named, and a line for the user that says which and why; `auto`: cuDNN on a GPU where it applies, else XLA.

    segments: documents of a row are kept apart. ValueError: `cudnn` where it cannot work, or an unknown name.
    """
    if name not in (*KERNELS, "auto"):
        raise ValueError(f"attention: unknown kernel {name!r}: one of auto, {', '.join(KERNELS)}")
    if name in ("xla", "reference"):
        return KERNELS[name], f"attention kernel: {name}"
    reasons = attention_cudnn.check(dtype, head_dim, spec.dropout, spec.softcap)
    if platform not in GPU_PLATFORMS:
        reasons.insert(0, f"the platform is {platform}")
    elif (why := attention_cudnn.missing()) is not None:
        reasons.insert(0, why)
    if not reasons:
        masks = ", documents kept apart by a bias [rows, 1, queries, keys] in memory" if segments else ""
        return CUDNN, f"attention kernel: cudnn (flash{masks})"
    if name == "cudnn":
        raise ValueError(f"attention: cudnn cannot be used: {'; '.join(reasons)}. Set attention: xla, or auto to take what fits")
    return XLA, f"attention kernel: xla (not cudnn: {'; '.join(reasons)})"
