"""Learning rates against numbers worked out by hand and formulae written again in plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config.optimizer import OptimizerConfig
from jaxpar.optim.schedule import learning_rate


def rates(steps: int, until: int | None = None, **fields) -> list[float]:
    schedule = jax.jit(learning_rate(OptimizerConfig(**{"lr": 1.0, "min_lr_ratio": 0.1, **fields}), steps))
    return [float(schedule(jnp.asarray(n))) for n in range(steps if until is None else until)]


GOLDEN = {  # T = 8, W = 2, lr = 1, floor 0.1
    # after warm-up t = 0, 1/6 ... 5/6: 0.1 + 0.45 (1 + cos(pi t)), cos = 1, .8660254, .5, 0, -.5, -.8660254
    "cosine": [0.5, 1.0, 1.0, 0.9397114, 0.775, 0.55, 0.325, 0.1602886],
    "linear": [0.5, 1.0, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25],
    "constant": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    # D = 3: flat until n = 5, then 1 - 0.9 (n - 5) / 3
    "wsd": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.4],
}


@pytest.mark.parametrize("schedule", GOLDEN)
def test_golden(schedule: str) -> None:
    got = rates(8, schedule=schedule, warmup_steps=2, decay_steps=3 if schedule == "wsd" else None)
    np.testing.assert_allclose(got, GOLDEN[schedule], rtol=1e-6)


def test_cosine_is_the_annealing_of_torch() -> None:
    # torch.optim.lr_scheduler.CosineAnnealingLR: eta_min + (eta_max - eta_min) (1 + cos(pi n / T_max)) / 2
    wanted = [3e-5 + (3e-4 - 3e-5) * (1 + math.cos(math.pi * n / 50)) / 2 for n in range(50)]
    np.testing.assert_allclose(rates(50, lr=3e-4), wanted, rtol=1e-6)


@pytest.mark.parametrize("schedule", GOLDEN)
def test_stays_at_the_floor_after_the_end(schedule: str) -> None:
    wanted = 1.0 if schedule == "constant" else 0.1
    np.testing.assert_allclose(rates(8, until=12, schedule=schedule, warmup_steps=2)[8:], wanted, rtol=1e-6)


@pytest.mark.parametrize("schedule", GOLDEN)
@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (1, 10), (10, 10), (0, 1), (1, 1)])
def test_warmup_of_none_one_and_all(schedule: str, warmup: int, total: int) -> None:
    got = rates(total, schedule=schedule, warmup_steps=warmup)
    assert np.isfinite(got).all()
    assert min(got) > 0
    assert got[max(0, warmup - 1)] == 1.0  # the peak is reached, and with no warm-up or one step of it at once
    np.testing.assert_allclose(got[:warmup], [(n + 1) / warmup for n in range(warmup)], rtol=1e-6)


@pytest.mark.parametrize("schedule", GOLDEN)
def test_warmup_longer_than_the_run(schedule: str) -> None:
    with pytest.raises(ValueError, match=r"warmup_steps = 11 .* train\.steps = 10"):
        learning_rate(OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=11), 10)  # pyright: ignore[reportArgumentType]


def test_warmup_and_decay_longer_than_the_run() -> None:
    with pytest.raises(ValueError, match="decay_steps of at most 6"):
        learning_rate(OptimizerConfig(lr=1.0, schedule="wsd", warmup_steps=4, decay_steps=7), 10)


def test_wsd_decays_over_a_tenth_by_default() -> None:
    got = rates(40, schedule="wsd", warmup_steps=4)
    np.testing.assert_allclose(got[4:], [1.0] * 33 + [0.775, 0.55, 0.325], rtol=1e-6)


def test_function_of_the_step_alone() -> None:
    schedule = jax.jit(learning_rate(OptimizerConfig(lr=3e-4, warmup_steps=5), 30))
    straight = [np.asarray(schedule(jnp.asarray(n))) for n in range(30)]
    resumed = jax.jit(learning_rate(OptimizerConfig(lr=3e-4, warmup_steps=5), 30))
    for n in reversed(range(13, 30)):
        assert np.asarray(resumed(jnp.asarray(n))).tobytes() == straight[n].tobytes()
    assert straight[0].dtype == np.float32
