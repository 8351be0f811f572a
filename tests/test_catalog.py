"""The folder scanner, on packages written for each test."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Thing

import pytest

from bitwright.catalog import Catalog, nearest_name_hint
from bitwright.errors import BitwrightError, UnknownName

MakeCatalog = Callable[..., Catalog[Thing]]


@pytest.fixture
def make_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCatalog]:
    """Write modules (name → source) into a package of their own, and return its catalog."""

    def make(**modules: str) -> Catalog[Thing]:
        folder = tmp_path / "scanned_things"
        folder.mkdir()
        (folder / "__init__.py").touch()
        for name, source in modules.items():
            header = "from types import SimpleNamespace as Thing\n"
            (folder / f"{name}.py").write_text(header + textwrap.dedent(source), encoding="utf-8")
        return Catalog(kind="thing", package="scanned_things", attribute="THINGS", record_type=Thing)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "scanned_things"]:
        del sys.modules[name]


def test_a_file_is_enough(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog(
        one="THINGS = (Thing(name='apple'), Thing(name='pear'))",
        two="THINGS = (Thing(name='fig'),)",
        _private="raise AssertionError('private modules are not scanned')",
    )
    assert list(catalog) == ["apple", "pear", "fig"] and len(catalog) == 3
    assert catalog["fig"] == Thing(name="fig")
    assert "pear" in catalog and "plum" not in catalog
    assert catalog["fig"] is catalog["fig"]


def test_an_unknown_name_suggests_the_nearest(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog(one="THINGS = (Thing(name='apple'), Thing(name='pear'))")
    with pytest.raises(UnknownName) as caught:
        catalog["aple"]
    assert str(caught.value) == "unknown thing 'aple'; did you mean 'apple'? Known things: apple, pear"
    with pytest.raises(UnknownName, match=r"unknown thing 'zzz'\. Known things: apple, pear"):
        catalog["zzz"]


def test_a_name_that_two_files_claim_names_both(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog(one="THINGS = (Thing(name='fig'),)", two="THINGS = (Thing(name='fig'),)")
    with pytest.raises(
        TypeError, match=r"thing 'fig' is defined twice: in scanned_things\.one and scanned_things\.two"
    ):
        catalog["fig"]


def test_a_record_of_the_wrong_type_is_named(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog(one="THINGS = (Thing(name='fig'), 'pear')")
    with pytest.raises(TypeError, match=r"scanned_things\.one\.THINGS holds 'pear', which is no thing"):
        list(catalog)


@pytest.mark.parametrize("source", ["", "THINGS = ()", "THINGS = [Thing(name='fig')]"])
def test_a_module_without_its_constant_is_named(make_catalog: MakeCatalog, source: str) -> None:
    with pytest.raises(TypeError, match=r"scanned_things\.one must define THINGS, a non-empty tuple of things"):
        len(make_catalog(one=source))


def test_the_hint_is_silent_about_strangers() -> None:
    assert nearest_name_hint("fp8e4m3", ["fp8_e4m3", "int8"]) == "; did you mean 'fp8_e4m3'?"
    assert nearest_name_hint("qqqq", ["fp8_e4m3", "int8"]) == "."


def test_a_record_from_outside_is_added(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog(one="THINGS = (Thing(name='apple'),)")
    catalog.add(Thing(name="plum"), "basket.toml")
    assert list(catalog) == ["apple", "plum"] and catalog["plum"] == Thing(name="plum")


def test_a_second_record_of_a_name_is_refused_and_both_origins_named(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog(one="THINGS = (Thing(name='apple'),)")
    with pytest.raises(
        BitwrightError, match=r"'apple' is defined twice: in scanned_things\.one and basket\.toml; rename"
    ):
        catalog.add(Thing(name="apple"), "basket.toml")
    catalog.add(Thing(name="plum"), "basket.toml")
    with pytest.raises(BitwrightError, match=r"'plum' is defined twice: in basket\.toml and other\.toml"):
        catalog.add(Thing(name="plum"), "other.toml")
    with pytest.raises(TypeError, match=r"other\.toml holds 'fig', which is no thing"):
        catalog.add("fig", "other.toml")  # type: ignore[arg-type]
    assert list(catalog) == ["apple", "plum"]
