"""One pass, every format: what the model's own gradients say about errors at every site.

One forward and backward pass over the calibration text, with labels *sampled from the model itself* (so that the
squared gradient is the true Fisher information, not the empirical one; Kunstner et al. 2019). Kept for every matrix:

    x   its inputs                      bf16 [T, K]     shared by matrices that read the same tensor (q, k and v)
    g   the gradients at its outputs    bf16 [t, N]     of Σ_t log p(sampled token t), for the first t ≤ T tokens
    x of some tokens, unrounded         fp32 [R, K]     on which activations are rounded to try formats

and for the head the inputs of some tokens. bf16's 8 bits are ample: an estimate averages thousands of products. All of
it together outgrows the weights from a few thousand tokens on; with a spool it lies on disk, and scoring, which goes
from matrix to matrix, reads one at a time.

Gradients of parameters are never formed: the backward pass only carries gradients of activations. Both passes multiply
in bf16 where the processor does so natively (autocast, as for training): SmolLM2-135M in int4 comes out as good (KL
0.069, and 0.070 in fp32) in two thirds of the time. Where observers look at single values, everything is fp32.

Of long texts GRADIENT_TOKENS have gradients, the rest a forward pass up to the head: how good codes are is a matter of
how many inputs they saw, and gradients only weigh them (with half of 8,192 tokens: KL 0.069 again).

What the scalar is that the gradients are of is said by an `Output`; what else is collected on the way (attention's
inner products, caches) by observers. Both are handed in.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from bitwright.errors import ModelError
from bitwright.models.attention_calls import eager_attention
from bitwright.models.linear_calls import LinearCalls
from bitwright.models.sites import Site
from bitwright.models.spool import Spool
from bitwright.quantize.seen import WINDOW_TOKENS, product_dtype
from bitwright.search.output import Output
from bitwright.search.outputs.tokens import Tokens
from bitwright.search.progress import Stage
from bitwright.search.recorder import NUM_UNROUNDED_TOKENS, Recorder, Statistics
from bitwright.search.text import TextSet

#: Tokens per forward and backward pass; their activations are what peak memory is made of.
BATCH_TOKENS = 512
#: Tokens whose gradients are taken, where predictions are of tokens.
GRADIENT_TOKENS = 4096
#: Texts up to which attention is run step by step.
_EAGER_TOKENS = 1024
#: Tokens whose head inputs are kept.
NUM_HEAD_TOKENS = 512


class Observer(AbstractContextManager, Protocol):
    """Sees the calibration pass from within: entered before it, left after it."""

    def batch(self, rows: slice, real_rows: Tensor | None) -> None:
        """Told before each forward and backward pass: which sequences, and which of their tokens are no padding.

        Args:
            rows: the sequences of the text.
            real_rows: bool [tokens of the batch]; None where all are real.
        """


def calibrate(
    model: nn.Module,
    sites: Sequence[Site],
    text: TextSet,
    *,
    seed: int,
    stage: Stage,
    observers: Sequence[Observer] = (),
    output: Output | None = None,
    spool: Spool | None = None,
) -> Statistics:
    """Collect the statistics of all sites in one forward–backward pass over `text`.

    Args:
        model: fp32, parameters without gradients, in eval mode.
        sites: where to collect.
        text: calibration text; only its scored tokens' predictions enter the gradients.
        seed: of the sampled labels and of the sampled tokens.
        stage: advanced by one per sequence.
        observers: contexts to be entered for the pass.
        output: what is compared; next tokens if left out.
        spool: where inputs and gradients of matrices go, to be read one matrix at a time, for as long as it is open;
            None: they stay in memory.

    Raises:
        ModelError: an input or gradient is not finite; the matrix and the batch of sequences are named.
    """
    num_sequences, length = text.input_ids.shape
    num_tokens = num_sequences * length
    generator = torch.Generator().manual_seed(seed)
    output = Tokens() if output is None else output
    num_learning = _sequences_with_gradients(text, output, observers)
    recorder = Recorder(
        model=model,
        generator=generator,
        num_tokens=num_tokens,
        num_gradient_tokens=num_learning * length,
        head_matrices=frozenset(site.parameter for site in sites if site.role == "lm_head"),
        keep_ratio=min(1.0, NUM_UNROUNDED_TOKENS / (num_learning * length)),
        head_keep_ratio=min(1.0, NUM_HEAD_TOKENS / (num_learning * length)),
        spool=spool,
    )
    step = max(1, BATCH_TOKENS // length)
    num_scored = 0
    starts = [*range(0, num_learning, step), *range(num_learning, num_sequences, step), num_sequences]
    with _watching(model, sites, recorder, observers, length):
        for start, stop in itertools.pairwise(starts):
            rows = slice(start, stop)
            padding = text.padding[rows].reshape(-1)
            recorder.begin(~padding if bool(padding.any()) else None)
            for observer in observers:
                observer.batch(rows, recorder.real_rows)
            if start < num_learning:
                run = partial(output.log_likelihood, model, text.input_ids[rows], text.scored[rows], generator)
                likelihood, num_predictions = run()
                if not _is_finite(likelihood.detach()):
                    raise _not_finite(_first_input(recorder) or _first_output(model, run), rows)
                if likelihood.requires_grad:  # not where the head alone is asked about
                    likelihood.backward()
                _raise_if_gradients_not_finite(recorder, rows)
                num_scored += num_predictions
            else:
                with torch.no_grad():
                    _run_body(model, text.input_ids[rows])
                if not all(_is_finite(part) for _, part in recorder.batch_inputs):
                    raise _not_finite(_first_input(recorder), rows)
            recorder.last_input = None
            stage.advance(rows.stop - rows.start)
    return recorder.statistics(num_scored, length if output.unit == "text" else WINDOW_TOKENS)


def _sequences_with_gradients(text: TextSet, output: Output, observers: Sequence[Observer]) -> int:
    """All where texts are padded (padding is told by its gradient), are what is predicted, or are looked at within."""
    num_sequences, length = text.input_ids.shape
    if observers or output.unit == "text" or bool(text.padding.any()):
        return num_sequences
    return min(num_sequences, -(-GRADIENT_TOKENS // length))


@contextmanager
def _watching(
    model: nn.Module, sites: Sequence[Site], recorder: Recorder, observers: Sequence[Observer], length: int
) -> Iterator[None]:
    with ExitStack() as stack:
        if not observers:
            stack.enter_context(torch.autocast("cpu", enabled=product_dtype() == torch.bfloat16))
            if length <= _EAGER_TOKENS:
                stack.enter_context(eager_attention(model))
        stack.enter_context(LinearCalls(model, sites, recorder.handle))
        for observer in observers:
            stack.enter_context(observer)
        yield


def _run_body(model: nn.Module, ids: Tensor) -> None:
    """For what happens within: transformers' models are asked for the predictions of the last tokens alone."""
    last_alone = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(input_ids=ids, use_cache=False, **last_alone)


def _not_finite(what: str | None, rows: slice) -> ModelError:
    return ModelError(
        f"the {what or 'input of the output head'} is not finite in the calibration batch of sequences {rows.start} to "
        f"{rows.stop - 1}; the model overflows on this text: check the checkpoint, or calibrate on other text"
    )


def _first_input(recorder: Recorder) -> str | None:
    """The first matrix whose input in the present batch is not finite."""
    return next((f"input of {name}" for name, part in recorder.batch_inputs if not _is_finite(part)), None)


def _first_output(model: nn.Module, run: Callable[[], object]) -> str | None:
    """The first module whose output is not finite, where no inputs are kept: the batch is run again to find it."""
    found: list[str] = []

    def look(name: str, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.is_floating_point() and not _is_finite(first.detach()):
            found.append(f"output of {name}")

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                handle = module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
                stack.callback(handle.remove)
        run()
    return next(iter(found), None)


def _raise_if_gradients_not_finite(recorder: Recorder, rows: slice) -> None:
    """Gradients come from behind: the last matrix of the forward pass is the first to see a bad one."""
    for name, gradients, written in reversed(recorder.batch_gradients):
        if not _is_finite(gradients.read(written)):
            raise ModelError(
                f"the gradient at {name} is not finite in the calibration batch of sequences {rows.start} to "
                f"{rows.stop - 1}; the model overflows in the backward pass: check the checkpoint, or calibrate on "
                "other text"
            )


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values.sum(dtype=torch.float32)))
