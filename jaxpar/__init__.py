"""jaxpar: the same maths under every layout.

    config = jaxpar.load_config("configs/run/quickstart.yaml", ["mesh.tensor=4"])
    jaxpar.prepare_devices(config)
    result = jaxpar.fit(jaxpar.build(config))

Names are imported when first used, so that `import jaxpar` costs nothing and JAX starts after `prepare_devices`.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.build import Parts, build
    from jaxpar.config.load import load_config
    from jaxpar.config.run import RunConfig
    from jaxpar.core.records import read_records
    from jaxpar.train.devices import prepare_devices
    from jaxpar.train.evaluate import evaluate
    from jaxpar.train.loop import Result, fit
    from jaxpar.train.sample import sample

_HOME = {
    "Parts": "build",
    "Result": "train.loop",
    "RunConfig": "config.run",
    "build": "build",
    "evaluate": "train.evaluate",
    "fit": "train.loop",
    "load_config": "config.load",
    "prepare_devices": "train.devices",
    "read_records": "core.records",
    "sample": "train.sample",
}

__all__ = ["Parts", "Result", "RunConfig", "build", "evaluate", "fit", "load_config", "prepare_devices", "read_records", "sample"]


class _Package(ModuleType):
    """Importing `jaxpar.build` would bind the module over the function of the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "build" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jaxpar.{_HOME[name]}"), name)
    setattr(sys.modules[__name__], name, value)
    return value
