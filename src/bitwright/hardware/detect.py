"""Which device of the catalog is the machine at hand, and why: `detect()` gives (device, reason).

`match` is the rule and takes the facts as arguments (so it can be tried for machines that are not here); `detect` only
collects them: the name that torch reports for the first GPU, and the instruction sets in Linux's /proc/cpuinfo.

The rule: a GPU whose reported name stands in a device file is that device. Otherwise the processor decides: of all
devices whose `cpu_flags` it has, the one that asks for most. Nothing falls back in silence; the reason says what was
not matched.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path

from bitwright.hardware.device import Device
from bitwright.hardware.device_catalog import devices

_CPUINFO = Path("/proc/cpuinfo")


def detect(*, with_gpu: bool = True) -> tuple[Device, str]:
    """Return the device that this machine is, and the reason in one sentence.

    Looks for a GPU only where torch is installed; imports torch when called.

    Args:
        with_gpu: False asks about the processor, whatever GPU there is.
    """
    return match(runtime_name=_runtime_name() if with_gpu else None, cpu_flags=_cpu_flags())


def match(*, runtime_name: str | None, cpu_flags: Collection[str]) -> tuple[Device, str]:
    """Return the device that fits the given facts, and the reason in one sentence.

    Args:
        runtime_name: what the runtime calls the GPU ("NVIDIA H200"); None where there is none.
        cpu_flags: instruction sets of the processor, as Linux names them.
    """
    unmatched = ""
    if runtime_name is not None:
        for device in devices():
            if runtime_name in device.runtime_names:
                return device, f"the first GPU reports itself as '{runtime_name}'"
        unmatched = f"; its GPU '{runtime_name}' is in no device file, so only the processor counts"
    flags = set(cpu_flags)
    fitting = [device for device in devices() if device.kind == "cpu" and flags.issuperset(device.cpu_flags)]
    best = max(fitting, key=lambda device: len(device.cpu_flags))
    have = f"the processor has {', '.join(best.cpu_flags)}" if best.cpu_flags else "nothing is known of the processor"
    return best, f"{have}{unmatched}; its figures are a reference, not this machine's own"


def _runtime_name() -> str | None:
    import torch

    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def cpu_model() -> str | None:
    """Return what Linux calls the processor; None elsewhere."""
    return _cpuinfo("model name")


def _cpu_flags() -> frozenset[str]:
    return frozenset((_cpuinfo("flags", "Features") or "").split())


def _cpuinfo(*keys: str) -> str | None:
    """The first value in /proc/cpuinfo that one of the keys has."""
    if platform.system() != "Linux" or not _CPUINFO.exists():
        return None
    for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return None
