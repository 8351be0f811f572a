"""A virtual environment for each peer, made once, with pinned versions and nothing but what they import.

    $XDG_CACHE_HOME/bitwright-peers/venv-<peer>       made from requirements-<peer>.txt

pip installs the list as it is, without dependencies of its own choosing: a resolver would fetch another torch, with
gigabytes of CUDA libraries. A torch that is no CPU build is refused; where pip finds none by itself, tell it where
they are (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, or PIP_FIND_LINKS).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent


def cache_folder() -> Path:
    """Where environments, models and runs lie; may be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bitwright-peers"


def python_of(peer: str | None, folder_of_requirements: Path = HERE) -> Path:
    """The interpreter of a peer's environment, which is made where it is missing or outdated; None: this one."""
    if peer is None:
        return Path(sys.executable)
    requirements = folder_of_requirements / f"requirements-{peer}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    folder = cache_folder() / f"venv-{peer}"
    python, stamp = folder / "bin" / "python", folder / "requirements.sha256"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != digest:
        print(f"making the environment of {peer} in {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", requirements], check=True, stdout=sys.stderr
        )
        if "torch==" in requirements.read_text(encoding="utf-8"):
            _raise_if_not_cpu(python)
        stamp.write_text(digest, encoding="utf-8")
    return python


def _raise_if_not_cpu(python: Path) -> None:
    version = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not version.endswith("+cpu"):
        raise SystemExit(f"torch {version} is no CPU build; {__doc__.splitlines()[-2].strip()}")
