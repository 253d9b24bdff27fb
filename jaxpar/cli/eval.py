"""`jaxpar eval`: the held-out loss of the latest checkpoint, on the mesh of the command line."""

import math

from jaxpar.cli.common import ConfigPath, JsonFile, Overrides, latest_state, start, write_json


def evaluate(path: ConfigPath, overrides: Overrides = None, json: JsonFile = None) -> None:
    """Evaluate the latest checkpoint of CONFIG's run folder on its held-out set (train.eval_batches batches)."""
    parts = start(path, overrides)
    state, step = latest_state(parts)
    from jaxpar.train.evaluate import evaluate as mean_terms
    from jaxpar.train.experts import experts_note, limits_error, table_row
    from jaxpar.train.metrics import scalars_and_tables

    means = mean_terms(parts, state.params)
    assert means is not None  # nothing asks it to give up
    scalars, tables = scalars_and_tables({f"eval_{name}": value for name, value in means.items()})
    terms = ", ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in scalars.items())
    row = table_row(tables)
    note = experts_note(row, "eval_")
    print(f"step {step}: {terms}; perplexity {math.exp(min(means['loss'], 700)):.4g}{note and '; '}{note}")
    write_json(json, {"step": step, "run_dir": str(parts.run_dir), **scalars, **row})
    if limits := limits_error(parts.config.model.moe, f"evaluation of step {step}", tables, "eval_"):
        raise limits
