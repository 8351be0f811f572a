"""What is asked for little starts fast: importing the package, and the commands that list things, load no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

#: Packages that only their users pay for.
HEAVY = ("torch", "transformers", "matplotlib", "fastapi")

_REPORT = f"""
import sys
print("heavy:", *(name for name in {HEAVY} if name in sys.modules))
"""


def heavy_modules_after(code: str) -> list[str]:
    """Which of HEAVY a fresh interpreter has loaded after running `code`."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", code + _REPORT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.rpartition("heavy:")[2].split()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert heavy_modules_after("import bitwright; dir(bitwright)") == []


@pytest.mark.parametrize("name", ["BitwrightError", "Budget", "Plan", "load_plan", "write_plan"])
def test_plans_are_read_without_anything_heavy(name: str) -> None:
    assert heavy_modules_after(f"import bitwright; bitwright.{name}") == []


@pytest.mark.parametrize("folder", ["errors", "catalog", "formats", "hardware", "plan"])
def test_the_folders_at_the_top_need_no_torch(folder: str) -> None:
    assert heavy_modules_after(f"import bitwright.{folder}") == []


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["optimize", "--help"], ["formats"]], ids=" ".join)
def test_commands_that_only_tell_load_nothing_heavy(arguments: list[str]) -> None:
    code = f"from bitwright.cli import main; assert main({arguments!r}) == 0"
    assert heavy_modules_after(code) == []


def test_the_check_itself_sees_torch() -> None:
    assert "torch" in heavy_modules_after("import torch")
