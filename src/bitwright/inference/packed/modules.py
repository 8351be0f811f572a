"""Modules that compute with a `PackedWeight` where a model had a parameter.

    PackedLinear       for nn.Linear
    PackedEmbedding    for nn.Embedding: reads the rows that are asked for
    PackedOperand      for a parameter of any other module: of transformers' Conv1D, of experts, a router's own

The first two are an nn.Linear and an nn.Embedding to whoever asks (PEFT does), with a `weight` that is expanded when it
is read, to be looked at. It cannot be written to: what a merge would add to it would be lost.

`PackedOperand` stands in the parameter's place: functions of torch that compute with a weight find it among their
arguments and call it (`__torch_function__`), so that the module's own code stays as it is. `operand[3]` is the operand
of expert 3. A function that is no product of one matrix expands the weights for its own time; the report of a run
counts how often.

Rejected: a tensor subclass (it has to have a storage of the shape that it claims, or break wherever one is assumed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitwright.errors import ModelError
from bitwright.inference.counters import RunCounters
from bitwright.inference.packed.weight import PackedWeight


class PackedLinear(nn.Linear):
    """y = x Wᵀ + b with packed W.

    Args:
        packed: W [N, K].
        bias: b [N], or None.
    """

    def __init__(self, packed: PackedWeight, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = packed.shape
        self.packed = packed
        self.register_parameter("bias", bias)
        # beside the modules and parameters, which take a while to find
        self._called, self._has_bias = (packed,), bias is not None

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Values of W in the model's dtype, expanded now."""
        return _expanded(self.packed)

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        y: Tensor = self._called[0](input)
        return y if not self._has_bias else y + self.bias.to(y.dtype)


class PackedEmbedding(nn.Embedding):
    """Rows of a packed table [N, K]."""

    def __init__(self, packed: PackedWeight, padding_idx: int | None) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = packed.shape
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.packed = packed

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Values of the table in the model's dtype, expanded now."""
        return _expanded(self.packed)

    def forward(self, input: Tensor) -> Tensor:
        """Ids of any shape → [..., K]."""
        return self.packed.lookup(input)


class PackedOperand(nn.Module):
    """What a module finds in the place of a parameter.

    Args:
        matrices: the parameter's matrices: one, or one an expert.
        is_list: whether the parameter was 3-D, one matrix after the other.
        transposed: whether the parameter stored [in, out].
        name: of the parameter, for messages.
        counters: where it is counted when weights are expanded.
    """

    #: As of `PackedWeight`.
    holds_codes = True

    def __init__(
        self, matrices: Sequence[PackedWeight], is_list: bool, transposed: bool, name: str, counters: RunCounters
    ) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(matrices)
        self.is_list, self.transposed, self.name, self.counters = is_list, transposed, name, counters

    # --- what modules ask a weight ---

    @property
    def shape(self) -> torch.Size:
        """Of the parameter."""
        rows, columns = self._matrix(0).shape
        sides = (columns, rows) if self.transposed else (rows, columns)
        return torch.Size((len(self.matrices), *sides) if self.is_list else sides)

    def size(self, dim: int | None = None) -> Any:
        """As tensors have it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As tensors have it."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """As tensors have it."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._matrix(0).dtype

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return next(self.buffers()).device

    @property
    def T(self) -> PackedOperand:
        """The transpose of a matrix."""
        return self._of(list(cast(Any, self.matrices)), not self.transposed)

    def t(self) -> PackedOperand:
        """The transpose of a matrix."""
        return self.T

    def transpose(self, first: int, second: int) -> Any:
        """The transpose of a matrix; of a list of them, with its values."""
        return self.T if not self.is_list else self.values().transpose(first, second)

    @torch.compiler.disable
    def __getitem__(self, index: Any) -> Any:
        is_number = isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0)
        if self.is_list and is_number:
            return self._of([self._matrix(int(index))], self.transposed)
        self._count("[…]")
        return self.values()[index]

    def values(self) -> Tensor:
        """The parameter's values in the model's dtype, expanded now."""
        each = [m.values().to(m.dtype) for m in cast(Any, self.matrices)]
        sides = [x.T if self.transposed else x for x in each]
        return torch.stack(sides) if self.is_list else sides[0]

    # --- what functions of torch do with it ---

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        product = _PRODUCTS.get(func)
        if product is not None:
            y = product(*args, **kwargs)
            if y is not NotImplemented:
                return y
        return func(*(_plain(a, func) for a in args), **{name: _plain(a, func) for name, a in kwargs.items()})

    def product(self, x: Tensor, *, takes_in_out: bool) -> Any:
        """x times the matrix, where a function takes it as [in, out], or as [out, in]."""
        if self.is_list or self.transposed != takes_in_out:
            return NotImplemented
        return self._matrix(0)(x)

    def rows(self, ids: Tensor) -> Any:
        """Rows of the matrix."""
        return NotImplemented if self.is_list or self.transposed else self._matrix(0).lookup(ids)

    def _matrix(self, index: int) -> PackedWeight:
        return cast(PackedWeight, self.matrices[index])

    def _of(self, matrices: list[PackedWeight], transposed: bool) -> PackedOperand:
        return PackedOperand(matrices, False, transposed, self.name, self.counters)

    def _count(self, what: str) -> None:
        self.counters.expansions[f"{self.name} by {what}"] += 1


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, PackedOperand) or isinstance(input, PackedOperand):
        return NotImplemented
    y = weight.product(input, takes_in_out=False)
    return y if y is NotImplemented or bias is None else y + bias.to(y.dtype)


def _matmul(input: Any, other: Any) -> Any:
    if not isinstance(other, PackedOperand) or isinstance(input, PackedOperand):
        return NotImplemented
    return other.product(input, takes_in_out=True)


def _addmm(input: Any, mat1: Any, mat2: Any, **scales: Any) -> Any:
    if scales or not isinstance(mat2, PackedOperand) or not isinstance(mat1, Tensor):
        return NotImplemented
    y = mat2.product(mat1, takes_in_out=True)
    return y if y is NotImplemented else y + input.to(y.dtype)


def _embedding(input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any) -> Any:
    if not isinstance(weight, PackedOperand) or max_norm is not None:
        return NotImplemented
    return weight.rows(input)


#: Functions of `models/linear_calls.py` that compute with a weight.
_PRODUCTS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.addmm: _addmm,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.mm: _matmul,
    Tensor.addmm: _addmm,
}


def _plain(argument: Any, func: Any) -> Any:
    if isinstance(argument, PackedOperand):
        argument._count(getattr(func, "__name__", str(func)))
        return argument.values()
    if isinstance(argument, list | tuple):
        return type(argument)(_plain(entry, func) for entry in argument)
    return argument


#: Operators that change what stands on their left.
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


class _ReadOnly(Tensor):
    """Values to look at: what is written to them, or to a view of them, would be lost, so that nobody may."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = [kwargs.get("out"), args[0] if args and _writes(func) else None]
        if any(isinstance(part, cls) for part in written):
            _raise_lost()
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            read = [part for part in args if isinstance(part, cls)]
            return found.as_subclass(cls if _is_view(found, read) else Tensor) if isinstance(found, Tensor) else found

    @property
    def data(self) -> Tensor:
        """The numbers."""
        return self

    @data.setter
    def data(self, values: Tensor) -> None:
        _raise_lost()


def _writes(func: Any) -> bool:
    """Whether a function of torch changes its first argument: add_, __iadd__, __setitem__."""
    name = getattr(func, "__name__", "")
    changes = name in _IN_PLACE or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return changes and name != "requires_grad_"


def _is_view(found: Any, read: Sequence[Tensor]) -> bool:
    if not isinstance(found, Tensor) or found.layout != torch.strided:
        return False
    place = found.untyped_storage().data_ptr()
    return any(part.untyped_storage().data_ptr() == place for part in read)


def _raise_lost() -> NoReturn:
    raise ModelError(
        "the weights of this layer are packed codes, and other values for them would be lost; keep the adapter beside "
        "the layer, or merge it into the model as loaded and plan that anew"
    )


def _expanded(packed: PackedWeight) -> Tensor:
    with torch.inference_mode():  # such a tensor refuses to be changed in place by whatever passes the class by
        return packed.values().to(packed.dtype).as_subclass(_ReadOnly)


def raise_if_planned(model: nn.Module) -> None:
    """Raise ModelError where a model runs packed already: its weights are no numbers any more."""
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            raise ModelError(
                f"'{name}' holds packed codes already, so that no plan can be applied; apply it to the model as loaded"
            )
