"""How a training policy keeps its states under a layout: as Megatron-LM and DeepSpeed, masters in the optimizer.

Tensor and pipeline parallelism come with such libraries. A bf16-mixed policy then holds 16-bit parameters, fp32 sums of
gradients, and fp32 masters with the moments in the optimizer: 2 + 4 + 12 bytes with Adam.
"""

from __future__ import annotations

from dataclasses import replace

from bitwright.parallel.memory import MemoryFacts
from bitwright.training.policy import Policy
from bitwright.training.policy_bits import state_bits, stored_bits


def memory_facts(policy: Policy, *, optimizer: str = "adamw") -> MemoryFacts:
    """Return what a policy's step keeps.

    Raises:
        TrainingError: an unknown optimizer.
    """
    compute = stored_bits(policy.compute)
    has_masters = stored_bits(policy.parameters) == 32 and compute < 32
    states = state_bits(policy, optimizer=optimizer, masters="in optimizer" if has_masters else "in model")
    if policy.gradients == "fp32":
        states = replace(states, gradients=max(32.0, states.gradients))
    return MemoryFacts(states=states, activation_bits=compute, logit_bits=compute + 64.0)
