"""What one pass over the calibration text leaves behind for scoring, and who writes it down.

Inputs and gradients of matrices are kept as they come, batch by batch, in memory or in a spool; `Statistics` puts those
of one matrix together when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bitwright.models.linear_calls import Matrix
from bitwright.models.spool import Spool
from bitwright.quantize.seen import WINDOW_TOKENS
from bitwright.search.recast import recasting
from bitwright.search.token_rows import HeldRows, Rows, SpooledRows, append

#: Tokens whose inputs are kept unrounded, for trying activation formats on.
NUM_UNROUNDED_TOKENS = 512


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
    #: bf16 [at most T, N]: gradient of the sampled text's log-likelihood (summed over tokens, nats) at the output, of
    #: the first tokens.
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
    matrices: Mapping[str, MatrixStatistics]
    #: Matrix name → statistics of embeddings.
    embeddings: dict[str, EmbeddingStatistics]
    #: Matrix name → inputs of the output head, fp32 [tokens, hidden].
    heads: dict[str, Tensor]
    #: Neighbouring tokens whose errors are summed before squaring; whole texts where predictions are of texts.
    window_tokens: int = WINDOW_TOKENS


@dataclass(kw_only=True, slots=True, eq=False)
class Recorder:
    """Collects (x, g) batch by batch."""

    model: nn.Module
    generator: torch.Generator
    num_tokens: int
    num_gradient_tokens: int
    head_matrices: frozenset[str]
    keep_ratio: float
    head_keep_ratio: float
    spool: Spool | None
    gradients: dict[str, Rows] = field(default_factory=dict)
    #: Matrix → the matrix that first read the same tensor; its name is the key of what follows.
    first_reader: dict[str, str] = field(default_factory=dict)
    x: dict[str, Rows] = field(default_factory=dict)
    unrounded: dict[str, Rows] = field(default_factory=dict)
    unrounded_rows: dict[str, list[Tensor]] = field(default_factory=dict)
    ids: dict[str, list[Tensor]] = field(default_factory=dict)
    head_inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    #: The input seen last, and the matrix that read it first.
    last_input: tuple[Tensor, str] | None = None
    #: Rows of the present batch that are tokens, bool [batch tokens]; None where all are.
    real_rows: Tensor | None = None
    #: What the present batch has written, in the order of the forward pass.
    batch_inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    batch_gradients: list[tuple[str, Rows, slice]] = field(default_factory=list)

    def begin(self, real_rows: Tensor | None) -> None:
        """A further batch."""
        self.real_rows = real_rows
        self.batch_inputs.clear()
        self.batch_gradients.clear()

    def handle(self, matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        is_lookup = not x.is_floating_point()
        y = operation(x) if is_lookup else recasting(operation, x, self._weight(matrix))
        if is_lookup:
            if torch.is_grad_enabled():
                self.ids.setdefault(matrix.name, []).append(x.detach().reshape(-1))
        elif matrix.name in self.head_matrices:
            if torch.is_grad_enabled():
                flat = self._real(x.detach().reshape(-1, x.shape[-1]))
                keep = self._sample(flat.shape[0], self.head_keep_ratio)
                self.head_inputs.setdefault(matrix.name, []).append(flat[keep].float())
            return y
        else:
            self._record_input(matrix.name, x)
        if not torch.is_grad_enabled():
            return y
        if not y.requires_grad:
            y.requires_grad_(True)
        gradients = self._rows_of(self.gradients, matrix.name, self.num_gradient_tokens, torch.bfloat16)
        rows = gradients.reserve(y.numel() // y.shape[-1], y.shape[-1])
        self.batch_gradients.append((matrix.name, gradients, rows))
        y.register_hook(lambda g: gradients.write(rows, g.detach().reshape(-1, g.shape[-1])))
        return y

    def _weight(self, matrix: Matrix) -> Tensor:
        stored = self.model.get_parameter(matrix.parameter)
        return stored if matrix.expert is None else stored[matrix.expert]

    def _record_input(self, name: str, x: Tensor) -> None:
        """Keep an input; the same tensor read by several matrices is kept once, under the first one's name."""
        known = self.last_input
        if known is not None and known[0] is x and self.first_reader.setdefault(name, known[1]) == known[1]:
            return
        self.last_input = (x, name)
        assert self.first_reader.setdefault(name, name) == name, f"{name} reads another tensor than before"
        flat = x.detach().reshape(-1, x.shape[-1])
        self.batch_inputs.append((name, flat))
        rows = append(self._rows_of(self.x, name, self.num_tokens, torch.bfloat16), flat)
        if not torch.is_grad_enabled():
            return
        keep = self._sample(flat.shape[0], self.keep_ratio)
        append(self._rows_of(self.unrounded, name, NUM_UNROUNDED_TOKENS, torch.float32), flat[keep])
        self.unrounded_rows.setdefault(name, []).append(keep + rows.start)

    def _rows_of(self, known: dict[str, Rows], name: str, capacity: int, dtype: torch.dtype) -> Rows:
        if name not in known:
            known[name] = HeldRows(capacity, dtype) if self.spool is None else SpooledRows(self.spool, dtype)
        return known[name]

    def _real(self, flat: Tensor) -> Tensor:
        """Rows that are no padding. (Elsewhere padding needs no care: no gradient flows to it.)"""
        fits = self.real_rows is not None and self.real_rows.numel() == flat.shape[0]
        return flat[self.real_rows] if fits else flat

    def _sample(self, num_rows: int, ratio: float) -> Tensor:
        count = min(num_rows, max(1, round(num_rows * ratio)))
        return torch.randperm(num_rows, generator=self.generator)[:count].sort().values

    def statistics(self, num_scored: int, window_tokens: int) -> Statistics:
        """All that was collected; with a spool, matrices are read as they are asked for."""
        matrices = _Matrices(self)
        return Statistics(
            num_scored=num_scored,
            matrices=matrices if self.spool is not None else dict(matrices),
            embeddings={
                name: EmbeddingStatistics(ids_T=torch.cat(ids), g_TH=self.gradients[name].tensor)
                for name, ids in self.ids.items()
            },
            heads={name: torch.cat(parts) for name, parts in self.head_inputs.items()},
            window_tokens=window_tokens,
        )


class _Matrices(Mapping[str, MatrixStatistics]):
    """Statistics by matrix, put together when they are asked for.

    The last ones stay at hand: all sites of a matrix ask for the same, and its neighbours for the same inputs.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._gradients = recorder.gradients
        self._first_reader = recorder.first_reader
        self._x = recorder.x
        self._unrounded = recorder.unrounded
        self._unrounded_rows = {name: torch.cat(rows) for name, rows in recorder.unrounded_rows.items()}
        self._last_inputs: tuple[str, Inputs] | None = None
        self._last: tuple[str, MatrixStatistics] | None = None

    def __getitem__(self, name: str) -> MatrixStatistics:
        reader = self._first_reader[name]
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, MatrixStatistics(inputs=self._inputs(reader), g_TN=self._gradients[name].tensor)
        return self._last[1]

    def _inputs(self, reader: str) -> Inputs:
        if self._last_inputs is None or self._last_inputs[0] != reader:
            self._last_inputs = None
            self._last_inputs = (
                reader,
                Inputs(
                    x_TK=self._x[reader].tensor,
                    unrounded_RK=self._unrounded[reader].tensor,
                    unrounded_rows=self._unrounded_rows[reader],
                ),
            )
        return self._last_inputs[1]

    def __contains__(self, name: object) -> bool:
        return name in self._first_reader

    def __iter__(self) -> Iterator[str]:
        return iter(self._first_reader)

    def __len__(self) -> int:
        return len(self._first_reader)
