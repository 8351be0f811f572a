"""The Triton backend where no GPU is: its kernels interpreted, its kernels compiled, and what it says without Triton.

Whether kernels are interpreted is settled when Triton is imported, so that each of the three has a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitwright import formats
from bitwright.errors import MissingExtra
from bitwright.quantize.backends import triton as backend

ROOT = Path(__file__).parents[2]
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(arguments: list[str], tmp_path: Path, **environment: str) -> str:
    """Run Python in a new process; what it wrote."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "formats")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=inherited | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def collect(name: str) -> list[str]:
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(Path(__file__).parent / name)]


@NEEDS_TRITON
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    assert " passed" in run(collect("triton_interpreted.py"), tmp_path, TRITON_INTERPRET="1")


@NEEDS_TRITON
@pytest.mark.parametrize("part", ["(nearest_even or stochastic)", "not test_rounding_agrees"])
def test_the_suite_of_all_backends_in_the_interpreter(part: str, tmp_path: Path) -> None:
    """Other modes take as long again; triton_interpreted.py has them on fewer inputs."""
    chosen = [*collect("test_backends.py"), "-k", f"triton and {part}"]
    assert " passed" in run(chosen, tmp_path, TRITON_INTERPRET="1")


@NEEDS_TRITON
def test_kernels_as_compiled_for_a_gpu(tmp_path: Path) -> None:
    assert " passed" in run(collect("triton_compiled.py"), tmp_path)


@NEEDS_TRITON
def test_triton_is_imported_by_the_first_call_and_asks_for_a_gpu(tmp_path: Path) -> None:
    code = """
import sys
import torch
from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.quantize.backends import triton as backend
assert "triton" not in sys.modules
assert backend.why_not_round(formats.get("bf16"), torch.float32, "up", "ieee") is None
assert "triton" not in sys.modules
try:
    backend.round_values(torch.ones(3), formats.get("bf16"))
except SchemeError as error:
    print(error)
"""
    assert "runs on GPUs, and the tensor is on the CPU" in run(["-c", code], tmp_path)


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    number = formats.get("bf16")
    assert "'triton' is not installed" in str(backend.why_not_round(number, torch.float32, "up", "ieee"))
    with pytest.raises(MissingExtra, match=r"pip install 'bitwright\[triton\]'"):
        backend.round_values(torch.ones(3), number)
