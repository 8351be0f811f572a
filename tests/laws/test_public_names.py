"""The package's front page: what `__all__` promises can be fetched, is listed, and nothing else is promised."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bitwright


@pytest.mark.parametrize("name", bitwright.__all__)
def test_every_promised_name_can_be_fetched(name: str) -> None:
    assert getattr(bitwright, name).__name__ == name


def test_all_is_sorted_and_names_each_once() -> None:
    assert bitwright.__all__ == sorted(set(bitwright.__all__))


def test_dir_lists_every_promised_name() -> None:
    assert set(bitwright.__all__) <= set(dir(bitwright))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(bitwright.__file__).read_text(encoding="utf-8"))
    under_type_checking = next(node for node in tree.body if isinstance(node, ast.If))
    seen = [a.name for node in ast.walk(under_type_checking) if isinstance(node, ast.ImportFrom) for a in node.names]
    assert sorted(seen) == bitwright.__all__


def test_any_other_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = bitwright.optimise
