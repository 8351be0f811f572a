"""Ranges of a kernel's work on the threads that torch already has.

Torch and Numba each bring OpenMP of their own, with a pool of threads each. Kernels run on torch's: `in_team` is an
LLVM function that starts them through the entry point of GNU's OpenMP library that torch is linked with (Intel's and
LLVM's have the same one on Linux), and a thread takes every T-th range.

Where torch has another OpenMP, or none, ranges go to threads of Python (`arrays.run_rows`): kernels release the
interpreter's lock.

Rejected: Numba's `parallel=True`, which needs a second library, changes torch's number of threads, takes longer to
compile and, in two of its three threading layers, falls over when two threads call in at once
(docs/decisions/0006-kernels-run-on-the-threads-of-torch.md).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bitwright.quantize.backends.cpu.lanes import I8, I32, I64

_VOID = I8.as_pointer()


class Team(NamedTuple):
    """What `in_team` needs to know: where OpenMP's functions lie, the threads, and the length of a range."""

    launch: np.int64
    thread_number: np.int64
    team_size: np.int64
    num_threads: np.int64
    step: np.int64


@cache
def openmp_of_torch() -> tuple[np.int64, np.int64, np.int64] | None:
    """Addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads as torch sees them, or None."""
    libraries = Path(torch.__file__).parent / "lib"
    for path in sorted(libraries.glob("libtorch_cpu.*")):
        try:
            library = ctypes.CDLL(str(path))
            found = [getattr(library, name) for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")]
        except (OSError, AttributeError):
            continue  # another OpenMP, or none
        launch, number, size = (np.int64(ctypes.cast(function, ctypes.c_void_p).value or 0) for function in found)
        return launch, number, size
    return None


@intrinsic
def in_team(typing: Any, kernel: Any, before: Any, count: Any, after: Any, team: Any) -> Any:
    """`kernel(*before, first, last, *after)` for the ranges of `count` items, each on one thread of a team.

    before, after: tuples; team: `Team`. Returns when all ranges are done. An error in a kernel is a RuntimeError here.
    """
    wanted = (*before.types, types.intp, types.intp, *after.types)
    called = kernel.get_call_type(typing, wanted, {})
    signature = types.void(kernel, before, count, after, team)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        result = kernel.dispatcher.get_compile_result(called)
        context.active_code_library.add_linking_library(result.library)
        _, before_v, count_v, after_v, team_v = arguments
        launch, number, size, num_threads, step = cgutils.unpack_tuple(builder, team_v)
        values = [*cgutils.unpack_tuple(builder, before_v), *cgutils.unpack_tuple(builder, after_v)]
        values = [
            context.cast(builder, value, given, taken)
            for value, given, taken in zip(
                values, (*before.types, *after.types), _without_range(called.args, len(before.types)), strict=True
            )
        ]
        count_v = context.cast(builder, count_v, count, types.intp)
        shared = [cgutils.alloca_once_value(builder, value) for value in values]
        failed = cgutils.alloca_once_value(builder, ir.Constant(I32, 0))
        data = cgutils.pack_struct(builder, [number, size, step, count_v, failed, *shared])
        place = cgutils.alloca_once_value(builder, data)
        work = _work(context, builder.module, data.type, result.fndesc, len(before.types))
        launch_type = ir.FunctionType(ir.VoidType(), [work.type, _VOID, I32, I32])
        builder.call(
            builder.inttoptr(launch, launch_type.as_pointer()),
            [work, builder.bitcast(place, _VOID), builder.trunc(num_threads, I32), ir.Constant(I32, 0)],
        )
        with builder.if_then(builder.icmp_unsigned("!=", builder.load(failed), ir.Constant(I32, 0)), likely=False):
            context.call_conv.return_user_exc(builder, RuntimeError, ("a kernel failed on one of its threads",))
        return context.get_dummy_value()

    return signature, generate


def _without_range(arguments: tuple[Any, ...], position: int) -> tuple[Any, ...]:
    return (*arguments[:position], *arguments[position + 2 :])


def _work(context: Any, module: Any, data_type: Any, kernel: Any, position: int) -> Any:
    """What each thread runs: void(void*), over the ranges that are its own."""
    name = module.get_unique_name("work_of_a_thread")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_VOID]), name)
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    data = builder.load(builder.bitcast(function.args[0], data_type.as_pointer()))
    number, size, step, count, failed, *shared = cgutils.unpack_tuple(builder, data)
    ask = ir.FunctionType(I32, [])
    own = builder.zext(builder.call(builder.inttoptr(number, ask.as_pointer()), []), I64)
    all_threads = builder.zext(builder.call(builder.inttoptr(size, ask.as_pointer()), []), I64)
    begin, stride = builder.mul(own, step), builder.mul(all_threads, step)
    callee = context.declare_function(module, kernel)
    arguments = [builder.load(place) for place in shared]
    with cgutils.for_range_slice(builder, begin, count, stride, I64) as (first, _):
        end = builder.add(first, step)
        last = builder.select(builder.icmp_signed("<", end, count), end, count)
        status, _ = context.call_conv.call_function(
            builder,
            callee,
            kernel.restype,
            kernel.argtypes,
            [*arguments[:position], first, last, *arguments[position:]],
        )
        with builder.if_then(status.is_error, likely=False):
            builder.store(ir.Constant(I32, 1), failed)
    builder.ret_void()
    return function
