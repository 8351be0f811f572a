"""Sites of hand-written modules: what is found is what the code multiplies by, whichever way it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_models import IDS, VOCABULARY, Branching, Returning, tiny_gpt
from torch import Tensor, nn

from bitwright.errors import ModelError
from bitwright.models.graph_sites import find_graph_sites, sites_of_program
from bitwright.models.linear_calls import LinearCalls, Matrix
from bitwright.models.sites import find_sites, site_weight

#: name → (role, stored as [in, out], [out, in] shape) of one block, in the order it computes.
BLOCK = {
    "attn.wq": ("other", True, (32, 32)),
    "attn.wk": ("other", False, (32, 32)),
    "attn.v_proj": ("attn.v", False, (32, 32)),
    "attn.out_proj": ("attn.out", False, (32, 32)),
    "fc1": ("mlp.up", False, (96, 32)),
    "fc2": ("mlp.down", False, (32, 96)),
}


def test_every_product_of_a_hand_written_gpt_is_a_site() -> None:
    found = find_graph_sites(tiny_gpt(), (IDS,))
    expected = {f"blocks.{layer}.{name}": facts for layer in range(2) for name, facts in BLOCK.items()}
    expected["head"] = ("lm_head", False, (VOCABULARY, 32))
    assert {site.name: (site.role, site.transposed, site.shape) for site in found.weights} == expected
    assert [site.name for site in found.weights] == list(expected)
    assert found.weights[-1].uses == ("tok", "head")
    assert [(kept.parameter, kept.shape) for kept in found.kept] == [("pos", (128, 32))]


def test_embedding_and_head_that_are_not_tied_are_two_sites() -> None:
    found = find_graph_sites(tiny_gpt(tied=False), (IDS,))
    assert [(site.name, site.role) for site in found.weights[-2:]] == [("tok", "embedding"), ("head", "lm_head")]


def test_parameters_are_named_as_the_module_names_them() -> None:
    gpt = tiny_gpt()
    names = dict(gpt.named_parameters())
    for site in find_graph_sites(gpt, (IDS,)).weights:
        assert site.parameter in names
        assert tuple(site_weight(gpt, site).shape) == site.shape
        for use in site.uses:
            gpt.get_submodule(use)


@pytest.mark.parametrize("wrapping", ["tensor", "tuple", "dict", "object"])
def test_inputs_and_outputs_may_be_wrapped_as_one_likes(wrapping: str) -> None:
    model = Returning(tiny_gpt(), wrapping).eval()
    found = find_graph_sites(model, (IDS,), {"shift": torch.zeros(())})
    assert {f"gpt.blocks.0.{name}" for name in BLOCK} < {site.name for site in found.weights}


def test_the_graph_of_a_transformer_has_the_sites_that_its_modules_have(make_tiny_model: Callable[..., Any]) -> None:
    for architecture in ("llama", "gpt2"):
        model = make_tiny_model(architecture)
        whole = {}
        for site in find_sites(model):
            whole.setdefault(site.parameter, site)
        found = find_graph_sites(model, (), {"input_ids": IDS, "use_cache": False})
        assert {site.parameter for site in found.weights} == set(whole)
        for site in found.weights:
            assert site.transposed == whole[site.parameter].transposed, site.name
            assert site.role in (whole[site.parameter].role, "attn.qkv")


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch copies its own deprecated class
def test_decomposed_programs_read_alike() -> None:
    found = find_graph_sites(tiny_gpt(), (IDS,))
    core = sites_of_program(found.program.run_decompositions())
    plain = {site.parameter: site for site in found.weights}
    for site in core.weights:
        assert (site.transposed, site.shape) == (plain[site.parameter].transposed, plain[site.parameter].shape)
    # an einsum is decomposed into a batch of products, which is named with its reason, not forgotten
    assert {site.parameter for site in core.weights} | {kept.parameter for kept in core.kept} >= set(plain)


@pytest.mark.parametrize("replaced", [False, True])
def test_every_call_of_every_site_is_seen_and_its_weight_can_be_replaced(replaced: bool) -> None:
    gpt = tiny_gpt()
    reference = gpt(IDS)
    seen: list[str] = []

    def handle(matrix: Matrix, x: Tensor, operation: Callable[..., Tensor]) -> Tensor:
        seen.append(matrix.name)
        return operation(x, gpt.get_parameter(matrix.parameter).clone()) if replaced else operation(x)

    with LinearCalls(gpt, find_graph_sites(gpt, (IDS,)).weights, handle):
        assert torch.equal(gpt(IDS), reference)
    assert len(seen) == 2 * len(BLOCK) + 2


def test_a_convolution_is_named_as_a_matrix_and_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.Linear(4, 2)).eval()
    found = find_graph_sites(model, (torch.zeros(1, 3, 4, 4),))
    assert [site.name for site in found.weights] == ["2"]
    assert [(kept.parameter, kept.shape) for kept in found.kept] == [("0.weight", (8, 27))]
    assert "convolution" in found.kept[0].describe()


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.unused = nn.Parameter(torch.eye(8)), nn.Parameter(torch.eye(4))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x @ self.w + x @ self.w.T)


def test_what_is_no_site_says_why() -> None:
    found = find_graph_sites(BothWays().eval(), (torch.ones(2, 8),))
    assert [site.name for site in found.weights] == ["last"]
    reasons = {kept.parameter: kept.reason for kept in found.kept}
    assert "as [out, in] and as [in, out]" in reasons["w"]
    assert "does not compute with it" in reasons["unused"]


def test_one_expert_of_a_stack_is_a_site() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.ones(2, 6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.down_proj[0]) + nn.functional.linear(x, self.down_proj[1])

    found = find_graph_sites(nn.ModuleDict({"experts": Experts()})["experts"], (torch.ones(3, 4),))
    assert [(site.name, site.role, site.expert, site.shape) for site in found.weights] == [
        ("0.down", "expert.down", 0, (6, 4)),
        ("1.down", "expert.down", 1, (6, 4)),
    ]


def test_a_module_that_cannot_be_traced_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"Branching cannot be traced by torch.export .*--sites") as caught:
        find_graph_sites(Branching().eval(), (torch.ones(2, 8),))
    assert "\n" not in str(caught.value)


def test_a_module_without_products_lists_what_was_seen() -> None:
    with pytest.raises(ModelError, match=r"modules seen: Conv1d x1.*kernel of a convolution.*--sites"):
        find_graph_sites(nn.Sequential(nn.Conv1d(2, 3, 1)).eval(), (torch.ones(1, 2, 5),))
