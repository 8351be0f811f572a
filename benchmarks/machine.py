"""What every result file says about where it was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: A load average above this means that others were at work.
QUIET_LOAD = 0.5


def machine(packages: Iterable[str]) -> dict[str, Any]:
    """Processor, cores, memory, operating system and versions of packages (bitwright comes first of itself)."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "huge_pages": huge_pages(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "bitwright": _version("bitwright"),
        "commit": commit(),
        **{name: _version(name) for name in packages},
    }


def huge_pages() -> str:
    """Whether memory comes in huge pages: "always", "madvise" (to who asks) or "never"; "" where nothing says so."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists():
        return ""
    return next((word.strip("[]") for word in setting.read_text(encoding="utf-8").split() if word.startswith("[")), "")


def commit() -> str:
    """The commit of the sources, with "+" where tracked files but results differ from it; "" outside a repository."""
    here = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "../src", ".", ":(exclude)results"],
            cwd=here, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name + ("+" if changed else "")


def load_average() -> float | None:
    """Processes that wanted to run, averaged over the last minute; None where the system does not count them."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def why_not_quiet(load: float | None) -> str | None:
    """Return what disturbs a measurement that begins at that load, or None if nothing does."""
    if load is None or load <= QUIET_LOAD:
        return None
    return (
        f"the load average of the last minute is {load}: other processes are, or just were, at work and disturb the "
        f"times; wait until it is below {QUIET_LOAD}, or take ratios of small differences for noise"
    )


def now() -> str:
    """Date and time, UTC, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
