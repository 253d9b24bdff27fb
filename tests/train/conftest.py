"""One small run in this process, on some of the fake devices."""

from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxpar.build import Parts, build
from jaxpar.config.load import load_config
from jaxpar.core.protocols import Model
from jaxpar.train.display import Quiet
from jaxpar.train.loop import Result, fit
from tests.train.tiny import write_config


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the config."""
    return write_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make(tiny: Path, tmp_path: Path) -> Callable[..., Parts]:
    """make("key=value", ..., devices=2, folder="run") -> parts."""

    def parts(*overrides: str, devices: int = 1, folder: str = "run", model: Model | None = None) -> Parts:
        config = load_config(tiny, [f"run.dir={tmp_path / folder}", *overrides])
        return build(config, model=model, devices=jax.devices()[:devices])

    return parts


@pytest.fixture
def run(make: Callable[..., Parts]) -> Callable[..., Result]:
    """The same, trained."""
    return lambda *overrides, **options: fit(make(*overrides, **options), display=Quiet())
