"""House rules that a machine can check, over every module of the package (CONTRIBUTING.md has them all)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "bitwright"
MODULES = sorted(SOURCE.rglob("*.py"))

#: Names that say nothing of what a file is about.
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "base"}
#: Exceptions that catch defects along with what was meant.
BROAD = {"Exception", "BaseException"}


def short_name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def caught_names(handler: ast.ExceptHandler) -> set[str]:
    """Names of the exceptions that a handler catches; "" for a bare one."""
    match handler.type:
        case None:
            return {""}
        case ast.Tuple(elts=elements):
            return {ast.unparse(element).rpartition(".")[2] for element in elements}
        case other:
            return {ast.unparse(other).rpartition(".")[2]}


def reraises(handler: ast.ExceptHandler) -> bool:
    """Whether a bare `raise` stands in the handler: what is not meant goes on."""
    return any(isinstance(node, ast.Raise) and node.exc is None for node in ast.walk(handler))


def broad_handlers(tree: ast.AST) -> list[int]:
    """Lines of handlers that swallow whatever comes."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and caught_names(node) & {"", *BROAD} and not reraises(node)
    ]


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(name, node) of the public classes and functions of a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.name, node


@pytest.mark.parametrize("path", MODULES, ids=short_name)
def test_a_file_is_named_after_its_idea(path: Path) -> None:
    assert not {part.removesuffix(".py") for part in path.relative_to(SOURCE).parts} & VAGUE_NAMES


@pytest.mark.parametrize("path", MODULES, ids=short_name)
def test_no_handler_swallows_whatever_comes(path: Path) -> None:
    assert broad_handlers(parsed(path)) == []


@pytest.mark.parametrize("path", MODULES, ids=short_name)
def test_a_module_says_what_it_is_about(path: Path) -> None:
    assert ast.get_docstring(parsed(path))


@pytest.mark.parametrize("path", MODULES, ids=short_name)
def test_every_public_class_and_function_is_documented(path: Path) -> None:
    silent = [name for name, node in public_definitions(parsed(path)) if not ast.get_docstring(node)]
    assert silent == []


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("try: f()\nexcept: pass", [2]),
        ("try: f()\nexcept Exception: pass", [2]),
        ("try: f()\nexcept (OSError, builtins.BaseException) as e: g()", [2]),
        ("try: f()\nexcept BaseException:\n    g()\n    raise", []),
        ("try: f()\nexcept OSError: pass", []),
    ],
)
def test_the_rule_on_handlers_tells_good_from_bad(code: str, lines: list[int]) -> None:
    assert broad_handlers(ast.parse(code)) == lines
