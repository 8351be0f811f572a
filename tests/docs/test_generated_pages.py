"""Pages that are tables of what exists say what exists now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


@pytest.mark.parametrize("name", GENERATOR.PAGES)
def test_the_page_is_current(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == GENERATOR.PAGES[name](), f"docs/{name} is out of date; write it again with: make docs"


@pytest.mark.parametrize("name", GENERATOR.PAGES)
def test_every_row_of_a_table_has_the_columns_of_its_head(name: str) -> None:
    width = None
    for line in (DOCS / name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            width = None
            continue
        columns = line.replace("\\|", "").count("|") - 1
        width = width or columns
        assert columns == width, line


def test_every_table_stands_in_one_page_and_every_mark_names_a_table() -> None:
    marks = [
        name
        for page in DOCS.glob("*.md")
        for name in re.findall(r"<!-- table: (.+?) -->", page.read_text(encoding="utf-8"))
    ]
    assert sorted(marks) == sorted(GENERATOR.TABLES)


def test_no_option_is_listed_without_its_meaning() -> None:
    assert "| None |" not in GENERATOR.commands_page()
