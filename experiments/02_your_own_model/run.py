"""Trains the model of `model.py` on any mesh: python run.py CONFIG [key=value ...]."""

import sys

import jaxpar


def main(path: str, *overrides: str) -> None:
    config = jaxpar.load_config(path, overrides)
    print(jaxpar.prepare_devices(config))
    from model import Recurrent  # after the devices are chosen: it imports JAX

    jaxpar.fit(jaxpar.build(config, model=Recurrent(config.model)))


if __name__ == "__main__":
    main(*sys.argv[1:])
