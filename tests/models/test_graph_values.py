"""Value sites of a program: on transformers' models those that running them shows, on others those in the code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_models import IDS, tiny_gpt
from torch import Tensor, nn

from bitwright.models.graph import node_named
from bitwright.models.graph_sites import find_graph_sites
from bitwright.models.value_sites import find_value_sites

#: What no program shows: caches of a model that is run without.
UNSEEN = ("k_cache", "v_cache")


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_transformer_has_the_values_that_running_it_shows(
    make_tiny_model: Callable[..., Any], architecture: str
) -> None:
    model = make_tiny_model(architecture)
    expected = {site.name: site.shape for site in find_value_sites(model) if site.part not in UNSEEN}
    found = find_graph_sites(model, (), {"input_ids": IDS, "use_cache": False}).values()
    assert {site.name: site.shape for site in found} == expected


def test_a_hand_written_gpt_has_the_values_of_its_code() -> None:
    graph = find_graph_sites(tiny_gpt(), (IDS,))
    found = graph.values()
    layer = {
        "attn:qk": ("attn.qk", (4, 8), ["aten.einsum.default"]),
        "attn:softmax": ("attn.softmax", (4, 1), ["aten.softmax.int"]),
        "attn:softmax_sum": ("attn.softmax_sum", (4, 1), ["aten.softmax.int"]),
        "attn:pv": ("attn.pv", (4, 8), ["aten.matmul.default"]),
        "attn:output": ("attn.output", (4, 8), ["aten.matmul.default"]),
    }
    by_name = {site.name: (site, nodes) for site, nodes in found.items()}
    for number in range(2):
        for name, (role, shape, operators) in layer.items():
            site, nodes = by_name[f"blocks.{number}.{name}"]
            assert (site.role, site.shape, site.layer) == (role, shape, number)
            assert [str(node_named(graph.program, node).target) for node in nodes] == operators
        assert by_name[f"blocks.{number}:act"][0].shape == (1, 96)
        assert by_name[f"blocks.{number}:up"][0].shape == (1, 96)
        assert by_name[f"blocks.{number}:down"][0].shape == (1, 32)
        assert {f"blocks.{number}.norm1:norm", f"blocks.{number}.norm2:norm"} < set(by_name)
        assert len(by_name[f"blocks.{number}:residual"][1]) == 2
    assert len(found) == 2 * (5 + 3 + 2 + 1) + 1
    assert "norm:norm" in by_name


class Lookalikes(nn.Module):
    """A gelu written out, a softmax that chooses, a position that is added: nothing of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.shift
        x = 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3)))
        return self.last(x).softmax(-1)


def test_what_only_looks_like_a_value_site_is_none() -> None:
    assert find_graph_sites(Lookalikes().eval(), (torch.ones(2, 4, 8),)).values() == {}
