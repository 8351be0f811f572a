"""Packages whose front page fetches its names when they are used: the page is whole, and statistics load no torch."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PAGES = ["bitwright.quantize", "bitwright.models", "bitwright.training"]


def heavy_after(code: str) -> list[str]:
    """Which of torch and matplotlib a fresh interpreter has loaded after running `code`."""
    report = "\nimport sys; print('heavy:', *(n for n in ('torch', 'matplotlib') if n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code + report],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.rpartition("heavy:")[2].split()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_keeps_what_it_promises(page: str) -> None:
    module = importlib.import_module(page)
    for name in module.__all__:
        assert not isinstance(getattr(module, name), ModuleType), name
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize("page", PAGES)
def test_type_checkers_see_the_same_names(page: str) -> None:
    module = importlib.import_module(page)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    under_type_checking = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {
        alias.name: node.module
        for node in ast.walk(under_type_checking)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == module._HOMES
    assert sorted(homes) == sorted(module.__all__)


def test_a_name_that_a_submodule_has_too_is_the_function() -> None:
    code = """
import bitwright.models.load
import bitwright.quantize.quantize
from bitwright.models import load
from bitwright.quantize import quantize
assert callable(load) and callable(quantize), (load, quantize)
"""
    assert "torch" in heavy_after(code)


def test_policies_load_nothing_heavy() -> None:
    code = """
from bitwright.training import POLICIES, operation_table
assert len(operation_table(POLICIES["nvfp4"])) > 20
"""
    assert heavy_after(code) == []


def test_statistics_load_nothing_heavy() -> None:
    code = """
import numpy as np
import bitwright.cli.formats_histogram
from bitwright.quantize.statistics import measure_statistics
assert measure_statistics(np.ones(3, np.float32)).amax == 1
"""
    assert heavy_after(code) == []
