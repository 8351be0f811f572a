"""Inside `training/` imports go one way too: a folder or module knows only what stands before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "src" / "bitwright" / "training"
PREFIX = "bitwright.training."

#: First to last: each may import from those before it, and from itself.
ORDER = (
    "record_facts", "loss_scale", "product_recipe", "recipes", "policy", "roles", "policies", "choose", "gradients",
    "gradient_storage", "optimizer", "updates", "forward", "products", "policy_bits", "processes", "data", "planning",
    "asked_policy", "held_parameters", "custody", "parameter_watch", "step_gradients", "run", "lora", "prepare",
    "checkpoints", "fine_tuning", "integrations",
)  # fmt: skip
#: What knows of each other, since a run is made of steps and says what it is.
RUN = ("run", "run_settings", "step", "describe")
MODULES = sorted(path for path in FOLDER.rglob("*.py") if path != FOLDER / "__init__.py")


def unit_of(path: Path) -> str:
    return unit_named(path.relative_to(FOLDER).parts[0].removesuffix(".py"))


def unit_named(name: str) -> str:
    return "run" if name in RUN else name


def imported(tree: ast.AST) -> Iterator[str]:
    """Units of the folder that are imported, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("bitwright.training"):
            if node.module == PREFIX[:-1]:
                yield from (unit_named(alias.name) for alias in node.names)
            else:
                yield unit_named(str(node.module).removeprefix(PREFIX).partition(".")[0])
        elif isinstance(node, ast.Import):
            found = [alias.name.removeprefix(PREFIX) for alias in node.names if alias.name.startswith(PREFIX)]
            yield from (unit_named(name.partition(".")[0]) for name in found)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    before = ORDER[: ORDER.index(unit_of(path)) + 1]
    assert set(imported(ast.parse(path.read_text(encoding="utf-8")))) <= set(before)


def test_every_part_has_its_place() -> None:
    assert {unit_of(path) for path in MODULES} == set(ORDER)
