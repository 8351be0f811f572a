"""benchmarks/gpu_check.py as far as it goes without a GPU: its dry run, its refusal, and that it sees differences."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_dry_run_finds_no_difference_and_files_nothing() -> None:
    done = run(["benchmarks/gpu_check.py", "--cpu-interpreter"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 with differences or failures" in done.stdout and "results:" not in done.stdout


def test_a_wrong_kernel_and_a_failing_one_are_noticed() -> None:
    code = """
import sys
sys.argv = ["gpu_check.py", "--cpu-interpreter"]
import gpu_check
gpu_check.kernels.round_values = lambda x, number, **settings: x.clone()
def fails(*arguments, **settings):
    raise RuntimeError("no such instruction")
gpu_check.kernels.pack = fails
sys.exit(gpu_check.main())
"""
    done = run(["-c", code])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "num_different" in done.stdout and "no such instruction" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    done = run(["benchmarks/gpu_check.py"])
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stdout
