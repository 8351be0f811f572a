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


class _Rows:
    """Rows that arrive batch by batch, in one tensor of the final size.

    Pages of the tensor that no row reaches cost no memory. Keeping the batches and joining them at the end took twice
    the memory and left the heap in pieces.
    """

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        self._capacity = capacity
        self._dtype = dtype
        self._held = torch.empty(0)
        self._used = 0

    def reserve(self, num_rows: int, width: int) -> slice:
        """Room for so many rows of `width` numbers; they are zero until they are written."""
        if self._used + num_rows > self._capacity or self._held.numel() == 0:
            self._capacity = max(self._capacity, 2 * (self._used + num_rows) if self._used else num_rows)
            larger = torch.empty(self._capacity, width, dtype=self._dtype)
            if self._used:
                larger[: self._used] = self._held[: self._used]
            self._held = larger
        rows = slice(self._used, self._used + num_rows)
        self._held[rows].zero_()
        self._used += num_rows
        return rows

    def write(self, rows: slice, values: Tensor) -> None:
        """Fill rows that were reserved."""
        self._held[rows] = values

    def append(self, values: Tensor) -> slice:
        """Add rows [n, width]; returns where they lie."""
        rows = self.reserve(*values.shape)
        self.write(rows, values)
        return rows

    @property
    def tensor(self) -> Tensor:
        """All rows so far."""
        return self._held[: self._used]


@dataclass(kw_only=True, slots=True, eq=False)
class _Recorder:
    """Collects (x, g) batch by batch."""

    generator: torch.Generator
    num_tokens: int
    head_matrices: frozenset[str]
    keep_ratio: float
    head_keep_ratio: float
    gradients: dict[str, _Rows] = field(default_factory=dict)
    #: Matrix → the matrix that first read the same tensor; its name is the key of what follows.
    first_reader: dict[str, str] = field(default_factory=dict)
    x: dict[str, _Rows] = field(default_factory=dict)
    unrounded: dict[str, list[Tensor]] = field(default_factory=dict)
    unrounded_rows: dict[str, list[Tensor]] = field(default_factory=dict)
    ids: dict[str, list[Tensor]] = field(default_factory=dict)
    head_inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    #: The input seen last, and the matrix that read it first.
    last_input: tuple[Tensor, str] | None = None
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
            self._record_input(matrix.name, x)
        if not y.requires_grad:
            y.requires_grad_(True)
        gradients = self.gradients.setdefault(matrix.name, _Rows(self.num_tokens, torch.bfloat16))
        rows = gradients.reserve(y.numel() // y.shape[-1], y.shape[-1])
        y.register_hook(lambda g: gradients.write(rows, g.detach().reshape(-1, g.shape[-1])))
        return y

    def _record_input(self, name: str, x: Tensor) -> None:
        """Keep an input; the same tensor read by several matrices is kept once, under the first one's name."""
        known = self.last_input
        if known is not None and known[0] is x and self.first_reader.setdefault(name, known[1]) == known[1]:
            return
        self.last_input = (x, name)
        assert self.first_reader.setdefault(name, name) == name, f"{name} reads another tensor than before"
        flat = x.detach().reshape(-1, x.shape[-1])
        rows = self.x.setdefault(name, _Rows(self.num_tokens, torch.bfloat16)).append(flat)
        keep = self._sample(flat.shape[0], self.keep_ratio)
        self.unrounded.setdefault(name, []).append(flat[keep].clone())
        self.unrounded_rows.setdefault(name, []).append(keep + rows.start)

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
        num_tokens=num_tokens,
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
            stage.advance(rows.stop - rows.start)
    _raise_if_gradients_not_finite(recorder)
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
    first = next((name for name, x in recorder.x.items() if not _is_finite(x.tensor)), "the output head")
    raise ModelError(
        f"the input of {first} is not finite in calibration sequences {rows.start} to {rows.stop - 1}; the model "
        "overflows on this text: check the checkpoint, or calibrate on other text"
    )


def _raise_if_gradients_not_finite(recorder: _Recorder) -> None:
    for name, gradients in recorder.gradients.items():
        if not _is_finite(gradients.tensor):
            raise ModelError(
                f"the gradient at {name} is not finite on the calibration text; the model overflows in the backward "
                "pass: check the checkpoint, or calibrate on other text"
            )


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values.sum(dtype=torch.float32)))


def _assemble(recorder: _Recorder, num_scored: int) -> Statistics:
    inputs = {
        name: Inputs(
            x_TK=x.tensor,
            unrounded_RK=torch.cat(recorder.unrounded.pop(name)),
            unrounded_rows=torch.cat(recorder.unrounded_rows.pop(name)),
        )
        for name, x in recorder.x.items()
    }
    return Statistics(
        num_scored=num_scored,
        matrices={
            name: MatrixStatistics(inputs=inputs[reader], g_TN=recorder.gradients[name].tensor)
            for name, reader in recorder.first_reader.items()
        },
        embeddings={
            name: EmbeddingStatistics(ids_T=torch.cat(ids), g_TH=recorder.gradients[name].tensor)
            for name, ids in recorder.ids.items()
        },
        heads={name: torch.cat(parts) for name, parts in recorder.head_inputs.items()},
    )
