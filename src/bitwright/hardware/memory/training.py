"""One training step on each of many GPUs: what is alive at the three instants when it is largest.

    loss        the forward pass has left its activations, the backward pass begins at the logits
    backward    the backward pass is done: activations are gone, every gradient is there
    update      the optimizer's step, with what it holds beside its states

The peak is the largest of the three. Between them activations go as gradients come, layer by layer, so nothing in
between is larger than both ends. Gradients are there at the loss only where several backward passes are summed.

Not counted: buffers of collectives (1 to 4 GB with the driver's context), and what the allocator holds in reserve
(3 to 10 %).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from bitwright.hardware.device import Kind
from bitwright.hardware.memory.adapters import adapter_parameters
from bitwright.hardware.memory.serving import MATMUL_WORKSPACE_BYTES, RUNTIME_BYTES, workspace_bytes
from bitwright.hardware.memory.training_activations import (
    ActivationSetup,
    end_bits,
    layer_bits,
    logit_bits,
)
from bitwright.hardware.memory.training_states import Sharding, StateBits
from bitwright.hardware.model_shape import ModelShape
from bitwright.hardware.sizes import raise_if_negative, raise_if_not_positive

Instant = Literal["loss", "backward", "update"]
INSTANTS: tuple[Instant, ...] = get_args(Instant)
#: States of a parameter → what a reader calls them; in the order in which they are told.
_STATES = {
    "parameters": "parameters",
    "masters": "fp32 masters",
    "gradients": "gradients",
    "moments": "optimizer moments",
    "compensation": "compensation",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLine:
    """Something that takes memory on one GPU."""

    name: str
    num_bytes: int
    #: How the bytes come about, for people.
    formula: str
    alive: tuple[Instant, ...] = INSTANTS


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMemory:
    """Everything that a training step takes on one GPU."""

    lines: tuple[MemoryLine, ...]

    def at(self, instant: Instant) -> int:
        """Return the bytes that are alive at an instant."""
        return sum(line.num_bytes for line in self.lines if instant in line.alive)

    @property
    def peak_instant(self) -> Instant:
        """When most is alive."""
        return max(INSTANTS, key=self.at)

    @property
    def peak(self) -> int:
        """Most bytes that are alive at one instant."""
        return self.at(self.peak_instant)

    def line(self, name: str) -> MemoryLine | None:
        """Return the line of a name, if there is one."""
        return next((line for line in self.lines if line.name == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSetup:
    """Adapters (LoRA) beside every linear of a frozen base.

    Raises:
        HardwareError: a size is not positive.
    """

    rank: int
    #: Stored bits of a weight of the base's linear layers, scales included, and of its other parameters.
    base_bits: float
    other_bits: float = 16.0
    #: Whether the base's codes are expanded matrix by matrix, to fp32, before gradients are multiplied with them.
    is_expanded: bool = False
    #: Bits of the copy of a weight that products read, where the base's own numbers are wider.
    copy_bits: float = 0.0

    def __post_init__(self) -> None:
        raise_if_not_positive(rank=self.rank, base_bits=self.base_bits, other_bits=self.other_bits)
        raise_if_negative(copy_bits=self.copy_bits)


def training_memory(
    shape: ModelShape,
    states: StateBits,
    activations: ActivationSetup,
    *,
    sharding: Sharding | None = None,
    adapters: AdapterSetup | None = None,
    accumulates: bool = False,
    update_bits: float = 0.0,
    update_elements: int | None = None,
    kind: Kind = "gpu",
) -> TrainingMemory:
    """Return what a training step takes on one GPU.

    Args:
        shape: of the model.
        states: bits of each trained parameter.
        activations: what the forward pass keeps, for the tokens of one GPU.
        sharding: GPUs and what they share; None: one GPU.
        adapters: where only adapters are trained; `states` then are theirs.
        accumulates: whether gradients of several backward passes are summed before an update.
        update_bits: bits per trained parameter that the optimizer's step holds beside its states: 32 for PyTorch's
            `foreach` implementations, which keep one list of temporaries (torch.optim documentation), 0 for `fused`.
        update_elements: parameters that are stepped on at a time; None: all.
        kind: of the device; a CPU has no driver context.

    Raises:
        HardwareError: a number of bits is negative.
    """
    raise_if_negative(update_bits=update_bits)
    sharding = Sharding() if sharding is None else sharding
    trained = shape.num_parameters if adapters is None else adapter_parameters(shape, adapters.rank)
    lines = [
        *_base_lines(shape, adapters, sharding),
        *_state_lines(trained, states, sharding, accumulates),
        *_product_lines(shape, states, sharding, adapters),
        *_activation_lines(shape, activations, sharding, adapters),
    ]
    own = trained / sharding.tensor_parallel / sharding.sharers("moments")
    stepped = own if update_elements is None else min(own, update_elements)
    update = stepped * update_bits / 8
    lines.append(_line("temporaries of the update", update, f"{_count(stepped)} × {_bits(update_bits)}", ("update",)))
    lines.append(
        _line(
            "context and workspace of products",
            workspace_bytes(kind),
            f"a rule: {RUNTIME_BYTES[kind] >> 20} + {MATMUL_WORKSPACE_BYTES >> 20} MiB",
        )
    )
    return TrainingMemory(lines=tuple(line for line in lines if line.num_bytes))


def _state_lines(trained: int, states: StateBits, sharding: Sharding, accumulates: bool) -> Iterable[MemoryLine]:
    """What is kept of every trained parameter."""
    for state, name in _STATES.items():
        bits = getattr(states, state)
        shared = sharding.sharers(state) * sharding.tensor_parallel
        alive = INSTANTS
        if state == "gradients" and not accumulates:
            alive = ("backward", "update")
        yield _line(name, trained * bits / 8 / shared, f"{_count(trained)} × {_bits(bits)}{_over(shared)}", alive)


def _base_lines(shape: ModelShape, adapters: AdapterSetup | None, sharding: Sharding) -> Iterable[MemoryLine]:
    """The frozen base of adapters, and what one of its matrices becomes."""
    if adapters is None:
        return
    others = shape.num_parameters - shape.linear_weights
    shared = sharding.sharers("parameters") * sharding.tensor_parallel
    num_bytes = (shape.linear_weights * adapters.base_bits + others * adapters.other_bits) / 8 / shared
    formula = f"{_count(shape.linear_weights)} × {_bits(adapters.base_bits)} + {_count(others)} × "
    yield _line("frozen base", num_bytes, f"{formula}{_bits(adapters.other_bits)}{_over(shared)}")
    if adapters.is_expanded:
        largest = max(rows * columns for rows, columns in shape.layer_matrices)
        widened = 4 * largest / sharding.tensor_parallel
        yield _line("one expanded matrix", widened, f"{_count(largest)} × 4 B", ("loss", "backward"))


def _product_lines(
    shape: ModelShape, states: StateBits, sharding: Sharding, adapters: AdapterSetup | None
) -> Iterable[MemoryLine]:
    """Copies of weights that products read; under ZeRO 3 whole parameters, block by block."""
    if sharding.zero < 3:
        linear, head = (states.copies, states.head_copies) if adapters is None else (adapters.copy_bits,) * 2
        copied = ((shape.linear_weights, linear), (shape.read_by_head, head))
        num_bytes = sum(number * bits for number, bits in copied) / 8 / sharding.tensor_parallel
        formula = " + ".join(f"{_count(number)} × {_bits(bits)}" for number, bits in copied)
        yield _line("copies for products", num_bytes, formula + _over(sharding.tensor_parallel), ("loss",))
        return
    block = shape.linear_weights // shape.num_layers
    rest = shape.num_parameters - shape.linear_weights
    bits = states.copies or states.parameters
    if adapters is not None:
        bits, rest = adapters.base_bits, 0
    gathered = (2 * block + rest) * bits / 8
    gradients = block * states.gradients / 8 if adapters is None else 0.0
    formula = f"(2 × {_count(block)} + {_count(rest)}) × {_bits(bits)}"
    if adapters is None:
        formula += f" + {_count(block)} × {_bits(states.gradients)}"
    num_bytes = (gathered + gradients) / sharding.tensor_parallel
    yield _line("whole layers at work", num_bytes, formula, ("loss", "backward"))


def _activation_lines(
    shape: ModelShape, setup: ActivationSetup, sharding: Sharding, adapters: AdapterSetup | None
) -> Iterable[MemoryLine]:
    tokens, split = setup.tokens, sharding.tensor_parallel
    per_layer = layer_bits(shape, setup, tensor_parallel=split, is_sequence_parallel=sharding.is_sequence_parallel)
    if adapters is not None:
        matrices = 4 + (2 + shape.is_gated) * shape.experts_per_token  # each keeps what A gives
        per_layer += matrices * adapters.rank * setup.compute_bits
    if setup.recompute == "full":
        kept = shape.hidden_size * setup.stream_bits / (split if sharding.is_sequence_parallel else 1)
        num_bytes = tokens * kept / 8 * shape.num_layers
        formula = f"{shape.num_layers} layers × {_count(tokens)} tokens × {_bits(kept)}"
        yield _line("inputs of layers", num_bytes, formula, ("loss",))
        formula = f"1 layer × {_count(tokens)} tokens × {_bits(per_layer)}"
        yield _line("one layer, recomputed", tokens * per_layer / 8, formula, ("loss", "backward"))
    else:
        formula = f"{shape.num_layers} layers × {_count(tokens)} tokens × {_bits(per_layer)}"
        yield _line("activations of layers", tokens * per_layer / 8 * shape.num_layers, formula, ("loss",))
    at_end = end_bits(shape, setup) / (split if sharding.is_sequence_parallel else 1)
    formula = f"{_count(tokens)} tokens × {_bits(at_end)}"
    yield _line("last norm, input of the head", tokens * at_end / 8, formula, ("loss",))
    held, more = logit_bits(setup)
    logits = tokens * shape.vocab_size / split
    sides = f"{_count(tokens)} tokens × {_count(shape.vocab_size)}{_over(split)}"
    yield _line("logits, log-softmax", logits * held / 8, f"{sides} × {_bits(held)}", ("loss",))
    yield _line("gradients of logits", logits * more / 8, f"{sides} × {_bits(more)}", ("loss",))


def _line(name: str, num_bytes: float, formula: str, alive: tuple[Instant, ...] = INSTANTS) -> MemoryLine:
    return MemoryLine(name=name, num_bytes=math.ceil(num_bytes), formula=formula, alive=alive)


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _bits(bits: float) -> str:
    return f"{bits / 8:,.6g} B"


def _over(sharers: int) -> str:
    return "" if sharers == 1 else f" / {sharers}"
