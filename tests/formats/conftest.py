"""Inputs that several test files share (stratified.py) can be imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
