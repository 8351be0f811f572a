"""One device = one TOML file in `devices/`; the folder is the list. No code branches on a device's name.

    name = "h100-sxm"                  # canonical; `aliases` are accepted at the borders
    [detect]                           # how the machine at hand is recognised: runtime_names (of a GPU) or cpu_flags
    [memory]                           # capacity_bytes, bandwidth_gb_per_s
    [matmul_tflops]                    # peak DENSE rate, keyed by format; multiply and add count as two operations
    [achieved]                         # memory_gb_per_s, launch_s; optional
    [achieved.matmul_tflops]           # what somebody measured
    [achieved.matvec_gb_per_s]         # the same of bandwidth by format, where a token is multiplied by a weight in it;
                                       # read_gb_per_s, copy_gb_per_s: where a tensor is; all optional
    [[matmul_rules]]                   # what a kind of matrix product asks of its shapes, and its accumulator
    [[links]]                          # one-way bandwidth to other devices

Every section of figures has `source` (where it can be looked up) and `certainty`: *read* there, *recalled*
(unchecked), *derived* by the arithmetic that `source` spells out, or *measured*. A format without a rate is one the
chip has no matrix unit for, or one of which nothing is known; it is never zero. Rates are with fp32 accumulation, and
without 2:4 sparsity (data sheets often print the doubled figure). GB is 10⁹ bytes.

A *matmul rule* speaks of products of some formats. Without `group_size` it is about scales that stay outside the sum
(one per tensor, row or token); with it, about scales along in_features, which a unit or its kernel must apply inside
the sum: such products exist only where a rule says so.

`device_file.py` reads and checks such a file, `device_catalog.py` knows the folder; here are the frozen records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Certainty = Literal["read", "recalled", "derived", "measured"]
Kind = Literal["gpu", "cpu", "accelerator"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One way out of a device."""

    #: "NVLink4", "PCIe5 x16".
    kind: str
    #: 10⁹ bytes per second, in one direction, all lanes of one device together.
    one_way_gb_per_s: float
    source: str
    certainty: Certainty


@dataclass(frozen=True, kw_only=True)
class MatmulRule:
    """What products ``x[tokens, in] @ W[out, in]ᵀ`` of some formats ask for on a device, and what sums them."""

    #: Formats of both factors that the rule is about; each has a rate.
    formats: tuple[str, ...]
    #: Numbers along in_features under one scale; None: the scales stay outside the sum.
    group_size: int | None
    #: Formats in which such a group's scale can be stored; empty without `group_size`.
    scale_formats: tuple[str, ...]
    #: The sizes that the unit or its kernels take are multiples of these.
    in_features_multiple: int
    out_features_multiple: int
    #: Significant bits that the sum of products keeps, where fewer than fp32's 24; None: 24, or not known.
    accumulator_bits: int | None
    source: str
    certainty: Certainty


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one chip can do, as its file says; figures are peaks unless they are called achieved."""

    name: str
    aliases: tuple[str, ...]
    vendor: str
    kind: Kind
    year: int
    #: Which instructions NVIDIA's GPUs have, as major.minor; None: no GPU of theirs, or not known.
    compute_capability: float | None
    #: Names that a runtime reports for this device (``torch.cuda.get_device_name``), compared exactly.
    runtime_names: tuple[str, ...]
    #: Instruction sets a processor must have to be this device (names of Linux's /proc/cpuinfo).
    cpu_flags: tuple[str, ...]
    memory_bytes: int
    #: Peak bandwidth of the device's own memory, 10⁹ bytes per second.
    memory_gb_per_s: float
    last_level_cache_bytes: int | None
    #: Format → peak dense rate in 10¹² operations per second; absent = not native, or unknown.
    matmul_tflops: Mapping[str, float]
    #: The same as somebody measured it; empty where nobody did.
    achieved_matmul_tflops: Mapping[str, float]
    achieved_memory_gb_per_s: float | None
    #: "read", "copy", "matvec" → format → measured 10⁹ bytes per second; empty where nobody measured.
    achieved_gb_per_s: Mapping[str, Mapping[str, float]]
    #: Measured seconds from asking for an operation to its start, where it is tiny; None where nobody measured.
    launch_s: float | None
    matmul_rules: tuple[MatmulRule, ...]
    links: tuple[Link, ...]
    notes: tuple[str, ...]
    #: Section ("memory", "matmul_tflops", "achieved.matmul_tflops") → where its figures can be looked up.
    sources: Mapping[str, str]
    #: Section → how sure its figures are.
    certainties: Mapping[str, Certainty]
