"""Inputs that several test files share (galleries.py, and stratified.py of the formats) can be imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "formats"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
