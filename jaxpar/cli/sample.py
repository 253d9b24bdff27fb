"""`jaxpar sample`: text from the latest checkpoint."""

from typing import Annotated

import typer

from jaxpar.cli.common import ConfigPath, JsonFile, Overrides, latest_state, start, write_json

DEFAULT_TOKENS = 120


def sample(
    path: ConfigPath,
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option(help="Text to go on from; default: train.sample_prompt.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help=f"Tokens to add; default: {DEFAULT_TOKENS}, or as many as fit.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another text.")] = 0,
    json: JsonFile = None,
) -> None:
    """Let the latest checkpoint of CONFIG's run folder write."""
    parts = start(path, overrides)
    state, step = latest_state(parts)
    from jaxpar.train.sample import room_for
    from jaxpar.train.sample import sample as write

    prompt = parts.config.train.sample_prompt if prompt is None else prompt
    count = min(DEFAULT_TOKENS, max(room_for(parts, prompt), 1)) if tokens is None else tokens
    text = write(parts, state.params, prompt, count, temperature, seed)
    print(text)
    write_json(json, {"step": step, "prompt": prompt, "text": text, "temperature": temperature, "seed": seed})
