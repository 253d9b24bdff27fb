"""`jaxpar doctor`: versions, devices, optional parts and how to get them; the schema of config files."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

from jaxpar.cli.common import JsonFile, Overrides, prepare, write_json
from jaxpar.core.words import versions

# (what it is for, modules of which one must be there, how to get it)
OPTIONAL = (
    ("NVIDIA GPUs", ("jax_cuda12_plugin", "jax_cuda13_plugin"), "pip install 'jaxpar[cuda12]' (or cuda13)"),
    ("TensorBoard events (log.tensorboard)", ("tensorboardX",), "pip install 'jaxpar[log]'"),
    ("tokenizer.json files (data.tokenizer)", ("tokenizers",), "pip install 'jaxpar[hf]'"),
    ("safetensors files", ("safetensors",), "pip install 'jaxpar[hf]'"),
    (".jsonl.zst files (data.source: jsonl)", ("zstandard",), "pip install 'jaxpar[zstd]'"),
    ("plots", ("matplotlib",), "pip install 'jaxpar[plot]'"),
)


def doctor(
    path: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Also check this config, on its devices.")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of config files (for editors) and nothing else.")] = False,
    json_file: JsonFile = None,
) -> None:
    """What is installed, which devices are seen, what optional parts would need."""
    if schema:
        from jaxpar.config.load import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    found = versions()
    print("\n".join(f"{name:<18}{number}" for name, number in found.items()))
    extras = {what: any(importlib.util.find_spec(module) for module in modules) for what, modules, _ in OPTIONAL}
    print("\noptional:")
    for what, _, install in OPTIONAL:
        print(f"  {what}: {'yes' if extras[what] else f'no; {install}'}")
    hosts = devices_by_host(path, overrides)
    print("\ndevices:")
    for host, names in hosts.items():
        print(f"  process {host}: {len(names)}: {', '.join(names)}")
    write_json(json_file, {"versions": found, "optional": extras, "devices": hosts})


def devices_by_host(path: Path | None, overrides: list[str] | None) -> dict[int, list[str]]:
    """Devices of each process; with a config, those that it would get, after checking that its mesh fits them."""
    from jaxpar.train.devices import accelerators

    if missing := accelerators()[1]:
        print(f"\n{missing}")
    config = None
    if path is not None:
        from jaxpar.config.load import load_config

        config = load_config(path, overrides or [])
        prepare(config)
    import jax

    if config is not None:
        from jaxpar.config.checks import check
        from jaxpar.config.errors import ConfigError

        if problems := check(config, len(jax.devices())):
            raise ConfigError(problems, str(path))
        print(f"{path}: fits")
    hosts: dict[int, list[str]] = {}
    for device in jax.devices():
        hosts.setdefault(device.process_index, []).append(f"{device.device_kind} {device.id}")
    return hosts
