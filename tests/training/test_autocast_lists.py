"""The lists of autocast as data are torch's own: CUDA's are in a header that torch ships, the CPU's are tried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitwright.training.forward.autocast_lists import AUTOCAST_LISTS, lists_of

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def macro(name: str) -> set[str]:
    """Operators of one list of the header, without overloads."""
    text = HEADER.read_text(encoding="utf-8")
    body = re.search(rf"#define {name}\(_\)(.*?)(?:\n\n|\n#)", text, re.DOTALL)
    assert body is not None
    return set(re.findall(r"_\((?:ADD_NS\()?(\w+)", body.group(1)))


def test_cuda_lists_are_those_of_the_header() -> None:
    cuda = AUTOCAST_LISTS["cuda"]
    assert set(cuda.compute) == macro("AT_FORALL_LOWER_PRECISION_FP")
    fp32 = macro("AT_FORALL_FP32") | macro("AT_FORALL_FP32_SET_OPT_DTYPE")
    fp32 |= macro("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE")
    assert set(cuda.fp32) == fp32
    assert set(cuda.widest) == macro("AT_FORALL_PROMOTE")


def is_cast(operator: str, key: str) -> bool:
    """Whether torch has a kernel for an operator, in any overload, under the key of an autocast."""
    packet = getattr(torch.ops.aten, operator, None)
    overloads = packet.overloads() if packet is not None else ["default"]
    names = [f"aten::{operator}" if name == "default" else f"aten::{operator}.{name}" for name in overloads]
    known = set(torch._C._dispatch_get_all_op_names())  # TorchScript's overloads for plain numbers are no operators
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in names if name in known)


@pytest.mark.parametrize("kind", ["compute", "fp32", "widest"])
@pytest.mark.parametrize(("device_type", "key"), [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")])
def test_what_is_listed_is_cast(device_type: str, key: str, kind: str) -> None:
    for operator in getattr(lists_of(device_type), kind):
        assert is_cast(operator, key), operator


LEFT_ALONE = ("softmax", "layer_norm", "rms_norm", "exp", "pow", "sum", "logsumexp", "norm")


def test_what_the_cpu_leaves_alone() -> None:
    """Asked of a process of its own: a run under a policy registers kernels for what is left alone."""
    assert not set(LEFT_ALONE) & set(lists_of("cpu").fp32)
    code = f"import test_autocast_lists as t; print([o for o in {LEFT_ALONE} if t.is_cast(o, 'AutocastCPU')])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, *sys.path)))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_device_has_no_lists() -> None:
    assert not lists_of("tpu").fp32
