"""What is done to a tensor before it is quantised, one file a transform; each module defines TRANSFORMS.

A transform is fitted to one matrix and gives a `Fitted`: an exact change of variables (`quantize/fitted.py`). A choice
that leaves activations alone needs nothing of it at run time: the change is taken back after rounding, and what runs is
the effective weight restore(Q(weight(W))). A choice that rounds activations computes Q(weight(W)) · Q(input(x)).

Matrices that read one tensor (q, k and v) can be fitted each on its own, or at once on their stacked rows; only in the
second case can an engine fold the change of their input into the norm before them.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from bitwright.quantize.fitted import Fitted
from bitwright.quantize.scheme import Scheme


class Inputs(Protocol):
    """What a transform looks at: inputs of the matrix that were seen."""

    @property
    def x_TK(self) -> Tensor:
        """Inputs, token by token: floats [T, K]."""

    @property
    def token_weights_T(self) -> Tensor | None:
        """How much an error at each token's output matters, [T], not negative; None: all alike."""


@runtime_checkable
class Transform(Protocol):
    """What every transform is: a way from a matrix and its inputs to an exact change of both."""

    @property
    def name(self) -> str:
        """As plans and the command line write it."""

    @property
    def description(self) -> str:
        """One line for tables."""

    @property
    def needs_data(self) -> bool:
        """Whether `fit` looks at inputs that were seen."""

    @property
    def parts(self) -> frozenset[str]:
        """Names of the tensors that a plan stores for it (`Fitted.tensors`)."""

    def why_not(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        """Why nothing is to be gained, or done, for a matrix of `shape` [N, K] under `scheme`; None if it may be."""

    def fit(self, weight_NK: Tensor, scheme: Scheme, seen: Inputs | None) -> Fitted:
        """The change that suits fp32 [N, K] under `scheme`.

        Raises:
            SchemeError: it needs inputs and was given none.
        """
