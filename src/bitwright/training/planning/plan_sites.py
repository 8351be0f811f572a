"""What a training step has once, as sites of a plan: norms, softmax, loss, gradients, masters, moments, communication.

Each has its format, and what the run showed against fewer bits. Nothing here is left to taste: where a figure can be
measured in a short run it is, and where it follows from arithmetic the arithmetic is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from bitwright.plan.training_plan import RangeEvidence, TrainingKind, TrainingSite
from bitwright.quantize.range_shares import range_shares, scale_to_largest
from bitwright.quantize.statistics import TensorStatistics
from bitwright.training.forward.operations import OPERATIONS
from bitwright.training.planning.observe import Observation
from bitwright.training.policy import Policy

#: Formats that operands are held against: as they are, and under a scale that puts the largest on the largest.
_PLAIN, _SCALED = ("fp16", "bf16"), ("fp8_e4m3", "fp8_e5m2")
#: Share of a gradient's size that rounding between GPUs may add.
_COMMUNICATION_ERROR = 0.01


def evidence_of(operands: Mapping[str, TensorStatistics]) -> tuple[RangeEvidence, ...]:
    """Return what each format would do to each operand."""
    return tuple(
        _range(name, statistics, number, is_scaled)
        for name, statistics in operands.items()
        for number, is_scaled in (*((f, False) for f in _PLAIN), *((f, True) for f in _SCALED))
    )


def _range(name: str, statistics: TensorStatistics, number: str, is_scaled: bool) -> RangeEvidence:
    scale = scale_to_largest(statistics.amax, number) if is_scaled else 1.0
    shares = range_shares(statistics.histogram, number, scale)
    return RangeEvidence(
        operand=name,
        format=number,
        scaled=is_scaled,
        amax=statistics.amax,
        flushed=shares.flushed,
        clipped=shares.overflow,
    )


def sites_of_a_step(seen: Observation, policy: Policy, gpus: int, learning_rate: float) -> tuple[TrainingSite, ...]:
    """Return everything but the products.

    Args:
        seen: what the run showed.
        policy: for its formats of parameters, moments and gradients.
        gpus: how many there are to be.
        learning_rate: that swallowed updates were counted for.
    """
    return (
        *_inside(seen),
        _gradients(seen, policy),
        _masters(seen, policy, learning_rate),
        *_moments(seen, policy),
        *_communication(seen, policy, gpus),
    )


def _inside(seen: Observation) -> tuple[TrainingSite, ...]:
    """What is computed between products."""
    why = {operation.title: operation.why for operation in OPERATIONS}
    found = []
    if seen.norms is not None:
        square = seen.norms.amax**2
        beyond = " beyond fp16's 65504" if square > 65504 else ""
        reason = f"{why['RMS norm']}; the largest square here is {square:.3g}{beyond}"
        found.append(_site("norms", "norm", "norm", "fp32", reason, evidence_of({"x": seen.norms})))
    found.append(_site("softmax", "softmax", "attn.softmax", "fp32", why["softmax"]))
    moved = abs(seen.loss_in_bf16 - seen.loss) / seen.loss if seen.loss else 0.0
    reason = (
        f"{why['cross-entropy']}; in bf16 the loss of {seen.loss:.4f} reads {seen.loss_in_bf16:.4f} ({moved:.2%} off)"
    )
    return (*found, _site("loss", "loss", "loss", "fp32", reason))


def _gradients(seen: Observation, policy: Policy) -> TrainingSite:
    ranges = evidence_of({"grad": seen.gradients})
    lost = {entry.format: entry.flushed for entry in ranges}
    reason = (
        f"added up in {policy.gradients}: of all gradients here {lost['fp16']:.2%} are zero in fp16 without a loss "
        f"scale, {lost['bf16']:.2%} in bf16, whose sums stop growing at 256 equal terms"
    )
    return _site("gradients", "grad", "grad", policy.gradients, reason, ranges)


def _masters(seen: Observation, policy: Policy, learning_rate: float) -> TrainingSite:
    share = seen.updates.share
    lost = f"at a learning rate of {learning_rate:g} bf16 swallows {share:.1%} of AdamW's first updates"
    if policy.parameters == "fp32":
        return _site("masters", "master", "master", "fp32", lost)
    reason = f"{lost} to nearest; stochastic rounding keeps their mean, and fp32 masters do not fit the device"
    return _site("masters", "master", "master", policy.parameters, reason)


def _moments(seen: Observation, policy: Policy) -> tuple[TrainingSite, ...]:
    squares = evidence_of({"v": seen.squares})
    flushed = next(entry.flushed for entry in squares if entry.format == "fp16")
    first = f"in bf16 {seen.first_moments.share:.1%} of the first moments would not move in a step"
    second = (
        f"in bf16 {seen.second_moments.share:.1%} of the second moments would not move in a step (1 − β₂ is 0.001, "
        f"half a step of bf16 0.002 to 0.004); in fp16 {flushed:.1%} of the squares are zero"
    )
    return (
        _site("first moments", "optim.m", "optim.m", policy.moments, first),
        _site("second moments", "optim.v", "optim.v", policy.moments, second, squares),
    )


def _communication(seen: Observation, policy: Policy, gpus: int) -> tuple[TrainingSite, ...]:
    if gpus == 1:
        return ()
    added = seen.gradient_rounding * math.sqrt(gpus - 1)
    hops = f"{gpus - 1} hops of a ring in bf16 add {added:.2%} of a gradient's size"
    is_narrow = added <= _COMMUNICATION_ERROR
    bound = f"{'within' if is_narrow else 'beyond'} {_COMMUNICATION_ERROR:.0%}"
    reason = f"{hops} (one rounds by {seen.gradient_rounding:.2%}), {bound}"
    compute = policy.compute if policy.compute in ("bf16", "fp16") else policy.parameters
    gathered = f"products read {compute} copies of the weights, so sending those loses nothing"
    return (
        _site("gradients between GPUs", "comm.grad", "comm.grad", "bf16" if is_narrow else "fp32", reason),
        _site("weights between GPUs", "comm.param", "comm.param", compute, gathered),
    )


def _site(
    name: str,
    kind: TrainingKind,
    role: str,
    choice: str,
    reason: str,
    ranges: tuple[RangeEvidence, ...] = (),
) -> TrainingSite:
    return TrainingSite(name=name, kind=kind, role=role, choice=choice, reason=reason, ranges=ranges)
