"""How fast models run side by side: prefill and decode, in one process and in turn, with what they take in memory.

All of them read the same tokens and go on for as many, whatever these are; each in every round, so that a machine which
is busy for a while is busy for all. Medians over rounds; the first round warms up and does not count, but for peak
memory, of which it shows most (`peak_memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from bitwright.inference.generation.generate import Generated, generate
from bitwright.inference.generation.peak_memory import PeakMemory
from bitwright.inference.run_report import RunReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One model's medians."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    prefill_s: float
    decode_s: float
    weight_bytes: int
    cache_bytes: int
    #: The most that was held at once while it ran, weights included; None where the system does not tell.
    peak_bytes: int | None = None

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens of all prompts per second."""
        return self.batch * self.prompt_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens of all sequences per second, after the first of each."""
        return self.batch * (self.new_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


def measure_speed(
    models: Mapping[str, nn.Module],
    *,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    repeats: int = 3,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Speed]:
    """Measure models of one vocabulary in turn.

    Args:
        models: name → causal language model of transformers, under a plan or not.
        batch: sequences at once.
        prompt_tokens: tokens that each begins with.
        new_tokens: tokens that each goes on for, 2 or more.
        repeats: rounds that count.
        seed: of the tokens.
        advance: called after every generation, `(repeats + 1) · len(models)` times.

    Raises:
        DataError: more tokens than a model has positions for.
    """
    vocabulary = min(int(model.get_input_embeddings().weight.shape[0]) for model in models.values())  # type: ignore[operator]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, vocabulary, (batch, prompt_tokens), generator=generator)
    runs: dict[str, list[Generated]] = {name: [] for name in models}
    extra_bytes: dict[str, list[int]] = {name: [] for name in models}
    for _ in range(repeats + 1):
        for name, model in models.items():
            ids = drawn.to(next(model.parameters()).device)
            peak = PeakMemory(ids.device.type)
            with peak:
                runs[name].append(generate(model, ids, max_new_tokens=new_tokens))
            extra_bytes[name] += [] if peak.bytes is None else [peak.bytes]
            advance()
    return {
        name: Speed(
            batch=batch,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            prefill_s=median(run.prefill_s for run in runs[name][1:]),
            decode_s=median(run.decode_s for run in runs[name][1:]),
            weight_bytes=weight_bytes_of(model),
            cache_bytes=runs[name][-1].cache_bytes,
            peak_bytes=weight_bytes_of(model) + max(extra_bytes[name]) if extra_bytes[name] else None,
        )
        for name, model in models.items()
    }


def weight_bytes_of(model: nn.Module) -> int:
    """Bytes of a model's weights in memory."""
    report = getattr(model, "bitwright_run", None)
    if isinstance(report, RunReport):
        return report.weight_bytes
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
