"""Which differences of two configs stop a resume."""

import copy
from typing import Any

import pytest

from jaxpar.checkpoint import config_changes, config_differences
from tests.checkpoint.helpers import CONFIG


def changed(key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    *sections, last = key.split(".")
    node = config
    for section in sections:
        node = node[section]
    node[last] = value
    return config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 8),
        ("model.num_layers", 5),
        ("data.source", "text"),
        ("data.global_batch_size", 32),  # case RES-05
        ("data.mixture", [{"source": "text", "path": "a"}]),
        ("optimizer.name", "lion"),
        ("param_dtype", "float64"),
        ("unheard_of", 1),
    ],
)
def test_must_match(key: str, value: Any) -> None:
    lines = config_differences(CONFIG, changed(key, value))
    assert lines
    assert all(line.startswith(key) for line in lines)
    assert config_differences(CONFIG, CONFIG) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "other"),
        ("mesh.tensor", 8),
        ("zero_stage", 0),
        ("num_microbatches", 4),
        ("train.steps", 40),
        ("optimizer.lr", 2e-3),
        ("data.path", "moved"),
        ("data.prefetch", 4),
        ("remat", {"policy": "full"}),
    ],
)
def test_may_change_and_is_told(key: str, value: Any) -> None:
    assert config_differences(CONFIG, changed(key, value)) == []
    (line,) = config_changes(CONFIG, changed(key, value))
    assert line.startswith(key)


def test_all_at_once_with_both_values() -> None:
    other = changed("model.num_layers", 5) | {"seed": 8, "zero_stage": 1}
    assert config_differences(CONFIG, other) == [
        "model.num_layers: the checkpoint has 4, this run 5",
        "seed: the checkpoint has 7, this run 8",
    ]


def test_moved_mixture_is_the_same_data() -> None:
    mixtures = [[{"source": "text", "path": path, "weight": 1.0}, {"source": "stdlib", "path": None, "weight": weight}] for path, weight in
                (("a", 2.0), ("b", 2.0), ("a", 3.0))]  # fmt: skip
    configs = [changed("data.mixture", mixture) for mixture in mixtures]
    assert config_differences(configs[0], configs[1]) == []
    assert config_differences(configs[0], configs[2]) == ["data.mixture.1.weight: the checkpoint has 2.0, this run 3.0"]


def test_the_whole_config_has_a_rule() -> None:
    """Every section that may change exists in the config: a renamed one must not fall out of the list unseen."""
    from jaxpar.checkpoint.compat import MAY_CHANGE, MUST_MATCH
    from jaxpar.config.run import RunConfig

    for rule in MAY_CHANGE + MUST_MATCH:
        assert rule.split(".")[0] in RunConfig.model_fields, rule
