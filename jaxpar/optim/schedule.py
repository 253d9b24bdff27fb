"""The learning rate as a function of the step alone: nothing to save, nothing to lose in a restart."""

from collections.abc import Callable

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxpar.config.optimizer import OptimizerConfig

Schedule = Callable[[Array], Float[Array, ""]]


def wsd_decay_steps(config: OptimizerConfig, steps: int) -> int:
    """Length of the final decay of `wsd`: as configured, else a tenth of the run, within what warm-up leaves."""
    return config.decay_steps or min(max(1, steps // 10), max(1, steps - config.warmup_steps))


def check_schedule(config: OptimizerConfig, steps: int) -> None:
    """Raise ValueError where warm-up or decay do not fit into a run of `steps`."""
    if config.warmup_steps > steps:
        raise ValueError(
            f"optimizer.warmup_steps = {config.warmup_steps} is longer than train.steps = {steps}: use at most {steps}, or train longer"
        )
    if config.schedule == "wsd" and config.warmup_steps + (config.decay_steps or 0) > steps:
        raise ValueError(
            f"optimizer.warmup_steps = {config.warmup_steps} and optimizer.decay_steps = {config.decay_steps} together are longer than "
            f"train.steps = {steps}: use decay_steps of at most {steps - config.warmup_steps}"
        )


def learning_rate(config: OptimizerConfig, steps: int) -> Schedule:
    """Learning rate of the update made after `n` updates (n from 0), float32, for any n >= 0.

    With W = warmup_steps, T = steps, r = min_lr_ratio and progress t = clip((n - W) / (T - W), 0, 1):

        n < W       lr (n + 1) / W                      the first update already moves, update W is made at the peak
        cosine      lr (r + (1 - r) (1 + cos(pi t)) / 2)      (SGDR, section 3)
        linear      lr (1 - (1 - r) t)
        constant    lr
        wsd         lr, and over the last D = decay_steps linearly to lr r      (MiniCPM, section 4; linear as in Hägele et al. 2024)

    The floor lr r is reached at n = T, one step after the last. Raises ValueError where warm-up or decay do not fit into T.
    """
    check_schedule(config, steps)
    main = _after_warmup(config, steps)
    warmup = config.warmup_steps

    def at(step: Int[Array, ""]) -> Float[Array, ""]:
        n = jnp.asarray(step, jnp.int32)
        rate = jnp.asarray(main(jnp.maximum(n - warmup, 0).astype(jnp.float32)), jnp.float32)  # exact below 2^24 steps
        if warmup == 0:
            return rate
        rising = (n + 1).astype(jnp.float32) * jnp.float32(config.lr / warmup)
        return jnp.where(n < warmup, jnp.minimum(rising, jnp.float32(config.lr)), rate)

    return at


def _after_warmup(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Schedule over the steps after warm-up. Optax's own divide by the length, so a length of 0 becomes 1."""
    left = max(1, steps - config.warmup_steps)
    floor = config.lr * config.min_lr_ratio
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(config.lr, left, alpha=config.min_lr_ratio)
    if config.schedule == "linear":
        return optax.linear_schedule(config.lr, floor, left)
    if config.schedule == "wsd":
        decay = wsd_decay_steps(config, steps)
        return optax.linear_schedule(config.lr, floor, decay, transition_begin=left - decay)
    return optax.constant_schedule(config.lr)
