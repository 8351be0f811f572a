"""A training step to be timed: model, batch, layout, formats, and the machine it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitwright import hardware
from bitwright.comms.topology import Topology
from bitwright.errors import ParallelError
from bitwright.hardware.device import Device
from bitwright.hardware.model_shape import ModelShape
from bitwright.parallel.efficiency import Efficiency
from bitwright.parallel.layout import Layout
from bitwright.parallel.network import Network, SlowerNetwork
from bitwright.parallel.numerics import Numerics


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """What a training library does about a step; the defaults are what current ones do."""

    #: fused: flash attention; stored: scores are written out.
    attention: Literal["fused", "stored"] = "fused"
    #: Share of the device's fused attention that the library's reaches: about 0.6 for FlashAttention-1 or Triton's.
    attention_speed: float = 1.0
    #: Times that elementwise work goes over memory, beside a compiled step's 1: about 2 where every operation is a
    #: kernel of its own.
    elementwise_passes: float = 1.3
    #: Whether gradients are reduced while the last backward pass runs.
    overlaps_gradients: bool = True
    #: Whether parameters that ZeRO divides are gathered while products run.
    overlaps_parameters: bool = True
    #: Share of the smaller of product and collective that tensor parallelism hides (chunked or asynchronous TP).
    hidden_tp_share: float = 0.0
    #: Whether activations go on to the next stage while products run.
    overlaps_pipeline: bool = True
    #: Whether a token goes once to each GPU (across nodes: to each node) that has experts of it, as DeepEP sends it, or
    #: once for every expert.
    sends_tokens_once: bool = True
    #: Seconds that the host takes to start a layer of experts, forward; twice that backward. Routing has it wait for
    #: the device's counts, so it cannot run ahead as it does in dense layers. About what published steps with small
    #: micro-batches show; a captured graph makes it 0.
    expert_host_s: float = 2.5e-3
    #: Gradients that one collective reduces; 25 MiB in DDP, of 4 bytes each.
    bucket_bytes: float = 25 * 2**20


#: What current libraries do.
DEFAULT_SOFTWARE = Software()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What a calibration found: how many times longer than alone work and collectives take within a step."""

    compute: float = 1.0
    #: Of attention, beyond `compute`.
    attention: float = 1.0
    #: Of collectives within a node, and of those across nodes.
    node: float = 1.0
    link: float = 1.0


#: Where nothing was calibrated.
TYPICAL = Tuning()


#: Share of a model's linear weights by which layers that are all alike may miss them.
_LEFT_OVER = 0.02


def raise_if_not_modelled(shape: ModelShape) -> None:
    """Raise if a model is no decoder of equal layers with grouped-query attention, told by its number of weights.

    Times and memory are those of `num_layers` times `ModelShape.layer_matrices`. Where these are not the weights that
    the model has, nothing that follows is about it.

    Raises:
        ParallelError: they are not.
    """
    alike = shape.num_layers * sum(out * columns for out, columns in shape.layer_matrices)
    if abs(alike / shape.linear_weights - 1) > _LEFT_OVER:
        raise ParallelError(
            f"{shape.name!r} is no decoder of equal layers with grouped-query attention: {shape.num_layers} such "
            f"layers of its sizes have {alike / 1e9:,.4g}e9 weights, and it has {shape.linear_weights / 1e9:,.4g}e9. "
            "Latent attention (MLA), first layers without experts, shared experts and state-space layers are not "
            "modelled; `bitwright memory` counts its states, and a model of its size that is known by name can be "
            "planned"
        )


def raise_if_too_long(shape: ModelShape, sequence: int) -> None:
    """Raise if a sequence has more tokens than a model has learned positions.

    Raises:
        ParallelError: so it is.
    """
    if shape.has_learned_positions and shape.max_positions is not None and sequence > shape.max_positions:
        raise ParallelError(
            f"sequences of {sequence} tokens are more than the {shape.max_positions:,} learned positions of "
            f"{shape.name}, which has none beyond; give at most {shape.max_positions}"
        )


def position_note(shape: ModelShape, sequence: int) -> str:
    """Return what to know of a sequence that is longer than any that the model was trained on; "" where it is not."""
    if shape.max_positions is None or sequence <= shape.max_positions:
        return ""
    return (
        f"sequences of {sequence} tokens are more than the {shape.max_positions:,} positions of {shape.name}; figures "
        "hold for a model of its sizes that was made for longer ones (scaled rotary positions)"
    )


def raise_if_no_device(topology: Topology, device: Device | None) -> None:
    """Raise if neither a device is given nor the topology names one.

    Raises:
        ParallelError: so it is.
    """
    if device is None and topology.device is None:
        raise ParallelError(
            f'topology {topology.spelled} names no device; add `device = "h100-sxm"` (or another of '
            "`bitwright hardware list`) to its file, or give --hardware"
        )


def device_of(topology: Topology, device: Device | None) -> Device:
    """The device that is given, or the one that the topology names."""
    if device is not None:
        return device
    assert topology.device is not None
    return hardware.get(topology.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training step."""

    shape: ModelShape
    sequence: int
    #: Sequences of a step, of all GPUs together.
    global_batch: int
    layout: Layout
    numerics: Numerics
    device: Device
    efficiency: Efficiency
    network: Network
    software: Software = DEFAULT_SOFTWARE
    tuning: Tuning = TYPICAL

    @property
    def tokens(self) -> int:
        """Tokens that one GPU runs at once."""
        return self.layout.micro_batch * self.sequence // self.layout.cp

    @property
    def num_micro_batches(self) -> int:
        """That one GPU runs one after the other."""
        return self.layout.num_micro_batches(self.global_batch)

    @property
    def tuned_network(self) -> Network:
        """The network, as slow as the calibration found it."""
        tuning = self.tuning
        if tuning.node == tuning.link == 1:
            return self.network
        return SlowerNetwork(network=self.network, within=tuning.node, across=tuning.link)
