"""How a model, its batch and its states are divided over GPUs; and every way of dividing that cannot be.

    dp    data parallel: copies of the model that see different sequences; `zero` says which states they share
    tp    tensor parallel: every matrix is cut; innermost, so its bytes stay within a node where it fits
    cp    context parallel: every sequence is cut
    ep    expert parallel: experts are dealt out over `dp · cp` GPUs, ep of them in a group
    pp    pipeline parallel: layers are cut into stages of `interleave` chunks each; outermost

    gpus = dp · tp · cp · pp        micro-batches of a step = global_batch / (dp · micro_batch)

GPUs are numbered with tp innermost, then cp, dp, pp, as Megatron-LM does (its parallel_state, order "tp-cp-ep-dp-pp").
So a group along an axis takes every `stride`-th GPU, `stride` being the product of the axes inside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from bitwright.errors import ParallelError
from bitwright.hardware.model_shape import ModelShape

#: selective: scores of attention are computed again; operations: everything but attention and every other product;
#: full: whole layers, from their inputs.
Recompute = Literal["none", "selective", "operations", "full"]
#: gpipe: all forward passes, then all backward ones; 1f1b: one of each in turn; zero-bubble: gradients of weights fill
#: the bubbles (ZB-H1, ZBV).
Schedule = Literal["gpipe", "1f1b", "zero-bubble", "zero-bubble-v"]
Axis = Literal["tp", "cp", "ep", "dp", "pp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to divide a training step.

    Raises:
        ParallelError: a size is not positive, or an unknown word.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    #: ZeRO stage over the data-parallel GPUs; 3 is FSDP.
    zero: int = 0
    #: GPUs over which ZeRO divides; 0: all data-parallel ones. Fewer is HSDP: copies of a divided model.
    zero_group: int = 0
    #: Sequences that one GPU runs at once.
    micro_batch: int = 1
    #: Chunks of layers on each pipeline stage.
    interleave: int = 1
    schedule: Schedule = "1f1b"
    recompute: Recompute = "none"
    #: Whether tp also divides the tokens of norms and the residual stream.
    is_sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave"):
            if getattr(self, name) < 1:
                raise ParallelError(
                    f"{name} is {getattr(self, name)}; every size of a layout is at least 1: correct it"
                )
        if self.zero not in (0, 1, 2, 3):
            raise ParallelError(f"zero is {self.zero}; there are stages 0 (nothing is shared), 1, 2 and 3 (FSDP)")
        for name, value, known in (
            ("recompute", self.recompute, get_args(Recompute)),
            ("schedule", self.schedule, get_args(Schedule)),
        ):
            if value not in known:
                raise ParallelError(f"{name} is {value!r}; there are {', '.join(known)}")
        if self.zero_group and self.dp % self.zero_group:
            raise ParallelError(
                f"zero_group {self.zero_group} does not divide dp {self.dp}; give a divisor, or 0 for all"
            )

    @property
    def num_gpus(self) -> int:
        """Of the whole layout."""
        return self.dp * self.tp * self.cp * self.pp

    def stride(self, axis: Axis) -> int:
        """Return how far apart the GPUs of a group along an axis are numbered."""
        inner = {"tp": 1, "cp": self.tp, "ep": self.tp, "dp": self.tp * self.cp, "pp": self.tp * self.cp * self.dp}
        return inner[axis]

    def num_micro_batches(self, global_batch: int) -> int:
        """Return how many micro-batches a step runs one after the other.

        Raises:
            ParallelError: the batch cannot be divided so.
        """
        at_once = self.dp * self.micro_batch
        if global_batch < 1 or global_batch % at_once:
            raise ParallelError(
                f"a global batch of {global_batch} sequences is not divided by dp {self.dp} × micro-batch "
                f"{self.micro_batch}; give a multiple of {at_once}"
            )
        return global_batch // at_once

    def __str__(self) -> str:
        parts = [f"dp{self.dp}", f"tp{self.tp}", f"pp{self.pp}"]
        parts += [f"cp{self.cp}"] if self.cp > 1 else []
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += [f"of{self.zero_group}"] if self.zero_group else []
        parts += [f"mb{self.micro_batch}"]
        parts += [f"v{self.interleave}"] if self.interleave > 1 else []
        parts += [self.schedule] if self.pp > 1 and self.schedule != "1f1b" else []
        parts += [f"recompute-{self.recompute}"] if self.recompute != "none" else []
        return " ".join(parts)


def why_not(layout: Layout, shape: ModelShape, *, sequence: int, num_gpus: int, global_batch: int) -> str | None:
    """Return why a model cannot be divided so, or None where it can be."""
    if layout.num_gpus != num_gpus:
        return (
            f"dp {layout.dp} × tp {layout.tp} × cp {layout.cp} × pp {layout.pp} is {layout.num_gpus} GPUs, and there "
            f"are {num_gpus}"
        )
    if shape.num_heads % layout.tp or (shape.num_kv_heads % layout.tp and layout.tp % shape.num_kv_heads):
        return f"tp {layout.tp} does not divide {shape.num_heads} heads and {shape.num_kv_heads} key–value heads"
    if shape.intermediate_size % layout.tp:
        return f"tp {layout.tp} does not divide the {shape.intermediate_size} columns of the MLP"
    if shape.num_layers + 2 < layout.pp * layout.interleave or shape.num_layers < layout.pp:
        return f"{shape.num_layers} layers are fewer than {layout.pp} stages of {layout.interleave} chunks"
    if sequence % layout.cp:
        return f"cp {layout.cp} does not divide a sequence of {sequence} tokens"
    if shape.num_experts % layout.ep:
        return f"ep {layout.ep} does not divide {shape.num_experts} experts"
    if layout.ep > 1 and (layout.dp * layout.cp) % layout.ep:
        return f"ep {layout.ep} does not divide the dp × cp = {layout.dp * layout.cp} GPUs that it is dealt out over"
    if layout.zero == 2 and layout.pp > 1:
        return (
            "zero 2 with a pipeline would divide gradients that every micro-batch adds to; take zero 1, or 3, with pp"
        )
    if global_batch % (layout.dp * layout.micro_batch):
        return f"dp {layout.dp} × micro-batch {layout.micro_batch} does not divide {global_batch} sequences"
    micro_batches = global_batch // (layout.dp * layout.micro_batch)
    if layout.interleave > 1 and (layout.pp == 1 or micro_batches % layout.pp):
        return f"{micro_batches} micro-batches are no multiple of {layout.pp} stages, as interleaved chunks need"
    return None
