"""A folder of the package imports only from folders above it: the house has one linear order (ARCHITECTURE.md).

Imports inside functions and under TYPE_CHECKING count like any other: they too say who knows whom. `bitwright/__init__`
stands outside, since it is the page that points to everything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "bitwright"

#: Top to bottom: each may import from what stands before it. The last ones of the list are still to be built.
ORDER = (
    "errors",
    "catalog",
    "fact_file",
    "lazy_page",
    "formats",
    "hardware",
    "quantize",
    "models",
    "plan",
    "inference",
    "search",
    "monitor",
    "comms",
    "training",
    "parallel",
    "doctor",
    "export",
    "report",
    "service",
    "cli",
)

MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def folder_of(path: Path) -> str:
    """The folder of a module, or the module itself where it lies at the top."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_folders(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, folder of bitwright that is imported) for every import statement, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
            module = str(node.module)
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "bitwright" else [module]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "bitwright":
                assert rest, f"line {node.lineno}: `import bitwright` inside the package; name the folder"
                yield node.lineno, rest.partition(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_only_from_above(path: Path) -> None:
    own = folder_of(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wrong = [
        f"line {line}: {own} imports {other}, which stands below it"
        for line, other in imported_folders(tree)
        if other != own and ORDER.index(other) > ORDER.index(own)
    ]
    assert not wrong


def test_every_folder_has_its_place() -> None:
    assert {folder_of(path) for path in MODULES} <= set(ORDER)


def test_the_law_sees_hidden_imports() -> None:
    code = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from bitwright.cli import app
def f():
    import bitwright.search.solve
    from bitwright import report
"""
    assert [folder for _, folder in imported_folders(ast.parse(code))] == ["cli", "search", "report"]
