"""The error tree is drawn completely at the top of `errors`, and every error a user meets hangs in it."""

from __future__ import annotations

import inspect
import re

import pytest

from bitwright import errors
from bitwright.errors import BitwrightError, MissingExtra

CLASSES = [item for _, item in inspect.getmembers(errors, inspect.isclass) if item.__module__ == errors.__name__]


def drawn_names() -> set[str]:
    assert errors.__doc__ is not None
    return set(re.findall(r"^ +(?:[├└]── |(?=Bitwright))(\w+)", errors.__doc__, flags=re.MULTILINE))


def test_the_tree_names_every_class_and_no_other() -> None:
    assert drawn_names() == {item.__name__ for item in CLASSES}


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_every_class_is_a_bitwright_error_with_a_sentence(error: type[Exception]) -> None:
    assert issubclass(error, BitwrightError)
    assert error.__doc__ and error.__doc__.endswith(".")


def test_a_missing_extra_prints_the_pip_line() -> None:
    error = MissingExtra("pyarrow", "parquet", "reading .parquet files")
    assert str(error).endswith("install it with: pip install 'bitwright[parquet]'")
    assert (error.package, error.extra) == ("pyarrow", "parquet")
