"""Make the environment of an engine, where it is missing or outdated, and print its python.

    BITWRIGHT_VLLM_PYTHON=$(python benchmarks/engines/python_of.py vllm) python -m pytest tests/export/test_vllm.py

vLLM's takes about 1 GB of downloads and 3.4 GB on disk, and some minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "peers"))
import environments  # noqa: E402

if __name__ == "__main__":
    known = sorted(path.stem.removeprefix("requirements-") for path in HERE.glob("requirements-*.txt"))
    if len(sys.argv) != 2 or sys.argv[1] not in known:
        raise SystemExit(f"usage: python_of.py ENGINE; one of {', '.join(known)}")
    print(environments.python_of(sys.argv[1], HERE))
