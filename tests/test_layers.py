"""The import order of the packages: each imports only from earlier rows, never from a sibling in its own."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxpar

ROOT = Path(jaxpar.__file__).parent

# One row a line, first to last. `jaxpar/x.py` and `jaxpar/x/` are both `x`.
ROWS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("schedule",),
    ("config",),
    ("mesh",),
    ("ops",),
    ("models", "parallel", "optim", "data", "checkpoint", "planner"),
    ("step",),
    ("build",),
    ("train", "hf", "xla", "verify"),
    ("report",),
    ("cli",),
    ("__main__",),
)
ROW = {package: i for i, row in enumerate(ROWS) for package in row}
ARRAYS = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "chex")


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "jaxpar" and len(parts) > 1 else None


def module_name(path: Path) -> str:
    parts = ("jaxpar", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions and under TYPE_CHECKING; relative ones made absolute."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def back_edges(path: Path, module: str) -> list[str]:
    """Imports of one file that go up or sideways, as `file:line: a (row i) -> b (row j)`."""
    here = package_of(module)
    if here is None:
        return []  # jaxpar/__init__.py is above all rows
    found = []
    for line, target in imports(path, module):
        there = package_of(target)
        if target == "jaxpar" or (there is not None and there not in ROW):
            found.append(f"{path}:{line}: {module} imports {target}, which is in no row; import from the package that defines it")
        elif there is not None and there != here and ROW[there] >= ROW[here]:
            found.append(f"{path}:{line}: {module} (row {ROW[here]}, {here}) -> {target} (row {ROW[there]}, {there})")
    return found


def test_every_package_has_a_row():
    packages = {path.stem for path in ROOT.iterdir() if (path.is_dir() and any(path.glob("*.py"))) or path.suffix == ".py"}
    assert packages - {"__init__"} <= set(ROW), "a package outside the table"


def test_imports_go_down():
    found = [edge for path in sorted(ROOT.rglob("*.py")) for edge in back_edges(path, module_name(path))]
    assert not found, "\n" + "\n".join(found)


def test_a_back_edge_is_found(tmp_path):
    path = tmp_path / "bad.py"
    inside = ["from jaxpar.train import loop", "import jaxpar.optim.build", "import jaxpar", "from ..parallel import ring"]
    path.write_text("from jaxpar.core import typing\n\ndef f():\n" + "".join(f"    {line}\n" for line in inside))
    found = back_edges(path, "jaxpar.data.bad")
    assert [edge.split(":")[1] for edge in found] == ["4", "5", "6", "7"]
    assert "jaxpar.data.bad (row 5, data) -> jaxpar.train.loop (row 8, train)" in found[0]


def test_config_and_schedule_import_no_jax():
    modules = [module_name(path) for package in ("config", "schedule") for path in sorted((ROOT / package).rglob("*.py"))]
    assert "jaxpar.config.load" in modules
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nprint([m for m in {ARRAYS!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
