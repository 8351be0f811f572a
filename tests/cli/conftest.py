"""The fabricated plan lies with the tests of plan/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
