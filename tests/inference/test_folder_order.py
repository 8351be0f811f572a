"""Inside `inference/` imports go one way too: a folder or module knows only what stands before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "src" / "bitwright" / "inference"
PREFIX = "bitwright.inference."

#: First to last: each may import from those before it, and from itself.
ORDER = (
    "counters", "modes", "hysteresis", "overflow_watch", "fallback", "run_report", "value_runs", "metrics",
    "planned_model", "emulation", "static", "cache", "packed", "generation", "run_plan",
)  # fmt: skip
MODULES = sorted(path for path in FOLDER.rglob("*.py") if path != FOLDER / "__init__.py")


def unit_of(path: Path) -> str:
    return path.relative_to(FOLDER).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Units of the folder that are imported, wherever the import stands; "" for the folder's own page."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("bitwright.inference"):
            yield str(node.module).removeprefix(PREFIX).partition(".")[0] if node.module != PREFIX[:-1] else ""
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix(PREFIX).partition(".")[0] for a in node.names if a.name.startswith(PREFIX))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    before = ORDER[: ORDER.index(unit_of(path)) + 1]
    assert set(imported(ast.parse(path.read_text(encoding="utf-8")))) <= set(before)


def test_every_part_has_its_place() -> None:
    assert {unit_of(path) for path in MODULES} == set(ORDER)
