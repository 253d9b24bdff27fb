"""Pretraining through the Python API: python experiments/01_pretrain/run.py CONFIG [key=value ...]

The pattern for a script of your own: hand `build` a model or an optimizer, or call the pieces of `parts` yourself.
"""

import sys

import jaxpar
from jaxpar.train.signals import PREEMPTED


def main(path: str, *overrides: str) -> int:
    config = jaxpar.load_config(path, overrides)
    print(jaxpar.prepare_devices(config))  # before JAX starts: makes fake CPU devices where the config asks for them
    parts = jaxpar.build(config)  # mesh, model, optimizer, data, steps, checkpoints
    result = jaxpar.fit(parts)
    if result.preempted:
        return PREEMPTED
    if config.train.sample_tokens:
        print(jaxpar.sample(parts, result.state.params, config.train.sample_prompt, config.train.sample_tokens))
    print(f"evaluation loss {result.eval_loss}; records in {result.run_dir / 'metrics.jsonl'}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
