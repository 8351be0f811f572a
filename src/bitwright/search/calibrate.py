"""One pass, every format: what the model's own gradients say about errors at every site.

One forward and backward pass over the calibration text, with labels *sampled from the model itself* (so that the
squared gradient is the true Fisher information, not the empirical one; Kunstner et al. 2019). Kept for every matrix:

    x   its inputs                      bf16 [T, K]     shared by matrices that read the same tensor (q, k and v)
    g   the gradients at its outputs    bf16 [T, N]     of Σ_t log p(sampled token t)
    x of some tokens, unrounded         fp32 [R, K]     on which activations are rounded to try formats

and for the head the inputs of some tokens. bf16's 8 bits are ample: an estimate averages thousands of products.

Gradients of parameters are never formed: the backward pass only carries gradients of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bitwright.errors import ModelError
from bitwright.models.linear_calls import LinearCalls, Matrix
from bitwright.models.sites import Site
from bitwright.search.progress import Stage
from bitwright.search.text import TextSet

#: Tokens per forward and backward pass; their activations are what peak memory is made of.
BATCH_TOKENS = 256
#: Tokens whose inputs are kept unrounded, for trying activation formats on.
NUM_UNROUNDED_TOKENS = 512
#: Tokens whose head inputs are kept.
NUM_HEAD_TOKENS = 512


@dataclass(kw_only=True, slots=True, eq=False)
class Inputs:
    """What one tensor fed to one or more matrices looked like over the calibration text."""

    #: bf16 [T, K], in the order of the text.
    x_TK: Tensor
    #: fp32 [R, K]: inputs of the rows `unrounded_rows` of x_TK.
    unrounded_RK: Tensor
    #: int64 [R].
    unrounded_rows: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatrixStatistics:
    """Inputs of a matrix and the gradients at its outputs, token by token."""

    inputs: Inputs
    #: bf16 [T, N]: gradient of the sampled text's log-likelihood (summed over tokens, nats) at the output.
    g_TN: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EmbeddingStatistics:
    """Which rows of an embedding were read, and the gradients at its outputs."""

    #: int64 [T].
    ids_T: Tensor
    #: bf16 [T, hidden].
    g_TH: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Statistics:
    """Everything that scoring needs; no further run of the model is."""

    #: Scored predictions that the gradients sum over.
    num_scored: int
    #: Matrix name → statistics; a matrix that no token reached (an idle expert) has none.
    matrices: dict[str, MatrixStatistics]
    #: Matrix name → statistics of embeddings.
    embeddings: dict[str, EmbeddingStatistics]
    #: Matrix name → inputs of the output head, fp32 [tokens, hidden].
    heads: dict[str, Tensor]


@dataclass(kw_only=True, slots=True, eq=False)
class _Recorder:
    """Collects (x, g) batch by batch."""

    generator: torch.Generator
    head_matrices: frozenset[str]
    keep_ratio: float
    head_keep_ratio: float
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)
    inputs_of: dict[str, list[int]] = field(default_factory=dict)
    x: list[Tensor] = field(default_factory=list)
    unrounded: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    ids: dict[str, list[Tensor]] = field(default_factory=dict)
    head_inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    last_input: Tensor | None = None
    #: Rows of the present batch that are tokens, bool [batch tokens]; None where all are.
    real_rows: Tensor | None = None

    def handle(self, matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        y = operation(x)
        if not x.is_floating_point():
            self.ids.setdefault(matrix.name, []).append(x.detach().reshape(-1))
        elif matrix.name in self.head_matrices:
            flat = self._real(x.detach().reshape(-1, x.shape[-1]))
            keep = self._sample(flat.shape[0], self.head_keep_ratio)
            self.head_inputs.setdefault(matrix.name, []).append(flat[keep].clone())
            return y
        else:
            self.inputs_of.setdefault(matrix.name, []).append(self._record_input(x))
        if not y.requires_grad:
            y.requires_grad_(True)
        slot = self.gradients.setdefault(matrix.name, [])
        index = len(slot)
        slot.append(torch.empty(0))
        y.register_hook(lambda g: slot.__setitem__(index, g.detach().reshape(-1, g.shape[-1]).to(torch.bfloat16)))
        return y

    def _record_input(self, x: Tensor) -> int:
        """Index of this batch's input; the same tensor read by several matrices is stored once."""
        if x is not self.last_input:
            self.last_input = x
            flat = x.detach().reshape(-1, x.shape[-1])
            keep = self._sample(flat.shape[0], self.keep_ratio)
            self.x.append(flat.to(torch.bfloat16))
            self.unrounded.append(flat[keep].clone())
            self.rows.append(keep)
        return len(self.x) - 1

    def _real(self, flat: Tensor) -> Tensor:
        """Rows that are no padding. (Elsewhere padding needs no care: no gradient flows to it.)"""
        fits = self.real_rows is not None and self.real_rows.numel() == flat.shape[0]
        return flat[self.real_rows] if fits else flat

    def _sample(self, num_rows: int, ratio: float) -> Tensor:
        count = min(num_rows, max(1, round(num_rows * ratio)))
        return torch.randperm(num_rows, generator=self.generator)[:count].sort().values


def calibrate(model: nn.Module, sites: Sequence[Site], text: TextSet, *, seed: int, stage: Stage) -> Statistics:
    """Collect the statistics of all sites in one forward–backward pass over `text`.

    Args:
        model: fp32, parameters without gradients, in eval mode.
        sites: where to collect.
        text: calibration text; only its scored tokens' predictions enter the gradients.
        seed: of the sampled labels and of the sampled tokens.
        stage: advanced by one per sequence.

    Raises:
        ModelError: an input or gradient is not finite; the matrix and the sequences are named.
    """
    num_sequences, length = text.input_ids.shape
    num_tokens = num_sequences * length
    generator = torch.Generator().manual_seed(seed)
    recorder = _Recorder(
        generator=generator,
        head_matrices=frozenset(site.parameter for site in sites if site.role == "lm_head"),
        keep_ratio=min(1.0, NUM_UNROUNDED_TOKENS / num_tokens),
        head_keep_ratio=min(1.0, NUM_HEAD_TOKENS / num_tokens),
    )
    step = max(1, BATCH_TOKENS // length)
    num_scored = 0
    with LinearCalls(model, sites, recorder.handle), torch.enable_grad():
        for start in range(0, num_sequences, step):
            rows = slice(start, min(start + step, num_sequences))
            padding = text.padding[rows].reshape(-1)
            recorder.real_rows = ~padding if bool(padding.any()) else None
            predictions = _predictions(model, text.input_ids[rows], text.scored[rows])
            recorder.last_input = None
            _raise_if_logits_not_finite(predictions, recorder, rows)
            _backward_from_samples(predictions, generator)
            num_scored += int(predictions.shape[0])
            _raise_if_gradients_not_finite(recorder, rows)
            stage.advance(rows.stop - rows.start)
    return _assemble(recorder, num_scored)


def _predictions(model: nn.Module, ids: Tensor, scored: Tensor) -> Tensor:
    """Logits [scored tokens, vocabulary] of every scored prediction."""
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return logits[scored[:, 1:]]


def _backward_from_samples(predictions: Tensor, generator: torch.Generator) -> None:
    """Backpropagate Σ log p(y_t) with y_t drawn from the model's own prediction."""
    log_p = predictions.log_softmax(-1)
    drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
    if log_p.requires_grad:  # not where the head alone is asked about
        log_p.gather(-1, drawn).sum().backward()


def _raise_if_logits_not_finite(predictions: Tensor, recorder: _Recorder, rows: slice) -> None:
    if bool(torch.isfinite(predictions.detach()).all()):
        return
    inputs = {name: recorder.x[batches[-1]] for name, batches in recorder.inputs_of.items()}
    first = next((name for name, x in inputs.items() if not bool(torch.isfinite(x).all())), "the output head")
    raise ModelError(
        f"the input of {first} is not finite in calibration sequences {rows.start} to {rows.stop - 1}; the model "
        "overflows on this text: check the checkpoint, or calibrate on other text"
    )


def _raise_if_gradients_not_finite(recorder: _Recorder, rows: slice) -> None:
    for name, gradients in recorder.gradients.items():
        if gradients[-1].numel() and not bool(torch.isfinite(gradients[-1].sum(dtype=torch.float32))):
            raise ModelError(
                f"the gradient at {name} is not finite in calibration sequences {rows.start} to {rows.stop - 1}; the "
                "model overflows on this text: check the checkpoint, or calibrate on other text"
            )


def _assemble(recorder: _Recorder, num_scored: int) -> Statistics:
    shared: dict[tuple[int, ...], Inputs] = {}
    matrices: dict[str, MatrixStatistics] = {}
    for name, batches in recorder.inputs_of.items():
        key = tuple(batches)
        if key not in shared:
            shared[key] = _join_inputs(recorder, batches)
        matrices[name] = MatrixStatistics(inputs=shared[key], g_TN=_join_gradients(recorder, name))
    embeddings = {
        name: EmbeddingStatistics(ids_T=torch.cat(ids), g_TH=_join_gradients(recorder, name))
        for name, ids in recorder.ids.items()
    }
    heads = {name: torch.cat(parts) for name, parts in recorder.head_inputs.items()}
    return Statistics(num_scored=num_scored, matrices=matrices, embeddings=embeddings, heads=heads)


def _join_gradients(recorder: _Recorder, name: str) -> Tensor:
    return torch.cat(recorder.gradients.pop(name))


def _join_inputs(recorder: _Recorder, batches: list[int]) -> Inputs:
    offsets = [0]
    for batch in batches:
        offsets.append(offsets[-1] + recorder.x[batch].shape[0])
    joined = Inputs(
        x_TK=torch.cat([recorder.x[batch] for batch in batches]),
        unrounded_RK=torch.cat([recorder.unrounded[batch] for batch in batches]),
        unrounded_rows=torch.cat(
            [recorder.rows[batch] + offset for batch, offset in zip(batches, offsets[:-1], strict=True)]
        ),
    )
    for batch in batches:
        recorder.x[batch] = recorder.unrounded[batch] = torch.empty(0)
    return joined
