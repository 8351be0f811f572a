"""The packed product as a torch operator: shapes, compilers, exported programs and gradients."""

from __future__ import annotations

import pytest
import torch
from galleries import gaussian
from torch import Tensor

from bitwright.quantize import SCHEMES, PackedMatrix, pack, packed_matmul, select_matmul


def prepared(name: str = "int4_g32_min", rows: int = 70, columns: int = 96) -> tuple[PackedMatrix, Tensor]:
    """A matrix in its layout, and its values."""
    scheme = SCHEMES[name].weights
    assert scheme is not None
    packed = pack(gaussian(rows, columns), scheme)
    return select_matmul(scheme, packed.shape, "cpu", torch.float32).layout.prepare(packed), packed.unpack()


class Layer(torch.nn.Module):
    """A packed layer between two operations that a compiler would fuse."""

    def __init__(self) -> None:
        super().__init__()
        matrix, _ = prepared()
        self.layout, self.scheme, self.shape, self.names = (
            matrix.layout,
            matrix.scheme,
            matrix.shape,
            list(matrix.parts),
        )
        for name, part in matrix.parts.items():
            self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Tensor:
        parts = {name: self.get_buffer(name) for name in self.names}
        matrix = PackedMatrix(layout=self.layout, scheme=self.scheme, shape=self.shape, parts=parts)
        return packed_matmul(torch.relu(x), matrix) + 1


def test_leading_dimensions_are_tokens() -> None:
    matrix, values = prepared()
    x = gaussian(6, 96).reshape(2, 3, 96)
    for given in (x, x[0, 0], x[:0], x.transpose(0, 1)):
        y = packed_matmul(given, matrix)
        assert y.shape == (*given.shape[:-1], 70)
        torch.testing.assert_close(y, given @ values.T)


def test_compiled_programs_call_the_operator() -> None:
    layer, x = Layer(), gaussian(3, 96)
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=keep, fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("packed_matmul" in str(target) for target in called) == 1


def test_exported_programs_call_the_operator() -> None:
    layer, x = Layer(), gaussian(3, 96)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: tokens},))
    longer = gaussian(11, 96, seed=1)
    assert torch.equal(program.module()(longer), layer(longer))
    assert sum("packed_matmul" in str(node.target) for node in program.graph.nodes) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_a_frozen_weight(dtype: torch.dtype) -> None:
    matrix, values = prepared()
    x = gaussian(2, 5 * 96).reshape(2, 5, 96).to(dtype).requires_grad_()
    grad = gaussian(2, 5 * 70, seed=1).reshape(2, 5, 70).to(dtype)
    packed_matmul(x, matrix).backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (grad.float() @ values).to(dtype))


def test_the_operator_keeps_the_rules_of_torch() -> None:
    matrix, _ = prepared()
    facts = (" ".join(matrix.parts), matrix.layout, matrix.scheme.text, *matrix.shape)
    arguments = (gaussian(3, 96), list(matrix.parts.values()), *facts)
    torch.library.opcheck(torch.ops.bitwright.packed_matmul.default, arguments)
