"""One golden case: a Hugging Face model or layer with random weights, and what it makes of random input in float64."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import modeling_rope_utils

FLOAT32_AGREES = 1e-5  # the unchanged float32 model against the widened one
# Neither fused nor grouped: the plain code of each model.
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}


@dataclass(frozen=True)
class Case:
    """config: arguments of config_class. layer: `model_class` is one layer, from vectors to vectors, not from tokens to logits."""

    config_class: Callable[..., Any]
    model_class: type[torch.nn.Module]
    config: dict[str, Any]
    rows: int = 2
    positions: int = 32
    layer: bool = False

    @property
    def result(self) -> str:
        """Name of the array that the model computes."""
        return "outputs" if self.layer else "logits"


class Wide:
    """`torch` as one module sees it, with float64 wherever it says float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextlib.contextmanager
def widened(model_class: type[torch.nn.Module]) -> Iterator[None]:
    """The models cast norms, softmax, router scores and rotary angles to float32 whatever their own dtype: here to float64."""
    narrow, modules = torch.Tensor.float, (modeling_rope_utils, sys.modules[model_class.__module__])
    torch.Tensor.float = torch.Tensor.double
    for module in modules:
        vars(module)["torch"] = Wide()
    try:
        yield
    finally:
        torch.Tensor.float = narrow
        for module in modules:
            vars(module)["torch"] = torch


def arrays_of(name: str, case: Case, seed: int) -> dict[str, np.ndarray]:
    """Input, result and weights, as the golden file has them."""
    rng = np.random.default_rng(seed + 1000)
    shape = (case.rows, case.positions)
    if case.layer:
        inputs = {"inputs": _short(rng.standard_normal((*shape, case.config["hidden_size"])))}
    else:
        inputs = {"tokens": rng.integers(0, case.config["vocab_size"], shape).astype(np.int32)}
    (given,) = inputs.values()
    with widened(case.model_class):
        weights = weights_of(model_of(case), seed)
        result = run(case, weights, given, torch.float64)
    gap = float(np.abs(run(case, weights, given, torch.float32) - result).max())
    if gap > FLOAT32_AGREES:
        raise SystemExit(f"{name}: the float32 model and its widened form differ by {gap:.3g}: the widening changes more than rounding")
    print(f"{name}: {case.result} of std {result.std():.2f}; the float32 model is within {gap:.1e}")
    return inputs | {case.result: result} | {f"weights/{key}": values for key, values in weights.items()}


def model_of(case: Case) -> torch.nn.Module:
    return case.model_class(case.config_class(**case.config, **PLAIN))


def weights_of(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """Random values for all that is learned: no scale is one and no bias zero, so that none can be left out unseen."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, tensor in learned(model).items():
        values = rng.standard_normal(tuple(tensor.shape))
        std = 0.2 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5
        mean = 1.0 if tensor.ndim == 1 and not name.endswith("bias") else 0.0
        if name.endswith("e_score_correction_bias"):
            mean = -1.0  # most scores are below 0 with it, so that an expert that is out of the question must rank below 0, not at it
        out[name] = _short(mean + std * values)
    return out


def learned(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter (a tied one once), and the bias of the choice of experts, which is a buffer."""
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    return dict(model.named_parameters()) | biases


def run(case: Case, weights: dict[str, np.ndarray], given: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Logits or outputs in `dtype`."""
    model = model_of(case).to(dtype).eval()
    x = torch.from_numpy(given)
    with torch.no_grad():
        for name, tensor in learned(model).items():
            tensor.copy_(torch.from_numpy(weights[name]))
        return (model(x.to(dtype)) if case.layer else model(x, use_cache=False).logits).numpy()


def _short(values: np.ndarray) -> np.ndarray:
    """Float32 values that float16 holds: half of each is zeros, and the file is half the size."""
    return values.astype(np.float16).astype(np.float32)
