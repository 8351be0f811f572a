"""The front page: every name resolves, and times are told without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from bitwright import parallel

SOURCE = Path(__file__).parents[2] / "src"


def test_every_name_is_there() -> None:
    for name in parallel.__all__:
        assert not isinstance(getattr(parallel, name), ModuleType), name


def test_times_need_no_torch() -> None:
    modules = ("gemm_time", "step_time", "serving_time", "memory", "timeline", "advice")
    code = f"import sys, importlib\nfor name in {modules}: importlib.import_module('bitwright.parallel.' + name)\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
