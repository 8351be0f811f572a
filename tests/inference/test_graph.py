"""A plan as a change of a program: what comes out computes what emulation does, wherever it is taken."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_models import IDS, tiny_gpt
from small_plans import choice, plan_of, uniform_plan
from torch import Tensor, nn

from bitwright.errors import PlanError
from bitwright.inference import ValueRule, emulate_plan, value_tensors_of
from bitwright.inference.emulation.program import apply_to_program
from bitwright.models import plain_model
from bitwright.models.graph_sites import find_graph_sites
from bitwright.models.sites import Site, find_sites
from bitwright.models.value_sites import ValueSite, find_value_sites
from bitwright.plan import Plan
from bitwright.quantize import VALUE_SCHEMES, fake_quantize
from bitwright.quantize.schemes.integer import SCHEMES as INTEGER_SCHEMES

OTHER_IDS = torch.arange(45).reshape(3, 15) * 11 % 260
#: Scheme and part of a transform: weights alone, inputs per token, under one static scale, in blocks; changed before.
CHOICES = [
    ("int4_g32", None),
    ("fp8", None),
    ("int8_static", None),
    ("mxfp4", None),
    ("bf16", None),
    ("int8", "signs"),
    ("fp8_static", "column_scales"),
    ("int4_g32", "signs"),
]


class Case:
    """A model, its sites, and its program with free batch and length."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        auto = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.AUTO}
        self.sites: tuple[Site, ...]
        if hasattr(model, "config"):
            kwargs = {"input_ids": IDS, "use_cache": False}
            shapes = {"input_ids": auto, "use_cache": None}
            self.program = torch.export.export(model, (), kwargs, dynamic_shapes=shapes, strict=False)
            self.sites = find_sites(model)
        else:
            self.program = torch.export.export(model, (IDS,), dynamic_shapes=(auto,), strict=False)
            self.sites = find_graph_sites(model, (IDS,)).weights

    def run(self, module: Any, ids: Tensor = IDS) -> Tensor:
        if hasattr(self.model, "config"):
            logits: Tensor = module(input_ids=ids, use_cache=False).logits
            return logits
        found: Tensor = module(ids)
        return found


@pytest.fixture(scope="module")
def case_of(make_tiny_model: Callable[..., Any]) -> Callable[[str], Case]:
    def make(name: str) -> Case:
        architecture, _, written_out = name.partition(", ")
        model = tiny_gpt() if name == "plain" else make_tiny_model(architecture)
        if written_out:
            model.set_attn_implementation("eager")
        return Case(model)

    return functools.cache(make)


@pytest.mark.parametrize("name", ["llama", "plain"])
@pytest.mark.parametrize(("scheme", "part"), CHOICES)
def test_the_program_computes_what_emulation_does(
    case_of: Callable[[str], Case], name: str, scheme: str, part: str | None
) -> None:
    case = case_of(name)
    plan = uniform_plan(case.sites, scheme, part)
    planned = apply_to_program(plan, case.program).module()
    for ids in (IDS, OTHER_IDS):
        with emulate_plan(plan, case.model, case.sites):
            expected = case.run(case.model, ids)
        assert not torch.allclose(expected, case.run(case.model, ids), atol=1e-3)
        assert torch.equal(case.run(planned, ids), expected)


@pytest.mark.parametrize(("scheme", "part"), [("fp8", "signs"), ("int4_g32", None)])
def test_rows_of_a_transposed_fused_matrix_and_a_tied_head(
    case_of: Callable[[str], Case], scheme: str, part: str | None
) -> None:
    case = case_of("gpt2")
    plan = uniform_plan(case.sites, scheme, part, ends=True)
    with emulate_plan(plan, case.model, case.sites):
        expected = case.run(case.model)
    assert torch.equal(case.run(apply_to_program(plan, case.program).module()), expected)


def test_the_given_program_stays_as_it_was(case_of: Callable[[str], Case]) -> None:
    case = case_of("plain")
    before = [str(node.format_node()) for node in case.program.graph.nodes]
    reference = case.run(case.model)
    planned = apply_to_program(uniform_plan(case.sites, "fp8"), case.program)
    assert [str(node.format_node()) for node in case.program.graph.nodes] == before
    assert torch.equal(case.run(case.program.module()), reference)
    rounded = [node for node in planned.graph.nodes if "bitwright" in str(node.target)]
    # q, k and v of a block read one input, which is rounded once: qkv, out, fc1, fc2
    assert len(rounded) == 2 * 4
    assert set(planned.state_dict) == set(case.program.state_dict)


@pytest.mark.parametrize(("scheme", "part"), [("mxfp4", None), ("int8_static", "column_scales")])
def test_a_planned_program_survives_saving(case_of: Callable[[str], Case], scheme: str, part: str | None) -> None:
    case = case_of("plain")
    planned = apply_to_program(uniform_plan(case.sites, scheme, part), case.program)
    file = io.BytesIO()
    torch.export.save(planned, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for ids in (IDS, OTHER_IDS):
        assert torch.equal(case.run(loaded.module(), ids), case.run(planned.module(), ids))


def test_a_planned_program_can_be_compiled(case_of: Callable[[str], Case]) -> None:
    case = case_of("plain")
    planned = apply_to_program(uniform_plan(case.sites, "fp8"), case.program).module()
    compiled = torch.compile(planned, backend="aot_eager", fullgraph=True)
    assert torch.allclose(case.run(compiled), case.run(planned), atol=1e-5)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids).log_softmax(-1)


def test_a_module_around_the_model_may_be_exported(case_of: Callable[[str], Case]) -> None:
    case = case_of("plain")
    plan = uniform_plan(case.sites, "int8", ends=True)
    program = torch.export.export(Around(case.model), (IDS,), strict=False)
    with emulate_plan(plan, case.model, case.sites):
        expected = case.run(case.model).log_softmax(-1)
    assert torch.equal(apply_to_program(plan, program).module()(IDS), expected)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch copies its own deprecated class
def test_decomposed_programs_take_plans_that_round_weights(case_of: Callable[[str], Case]) -> None:
    case = case_of("plain")
    core = torch.export.export(case.model, (IDS,), strict=False).run_decompositions()
    plan = uniform_plan(case.sites, "int4_g32")
    with emulate_plan(plan, case.model, case.sites):
        expected = case.run(case.model)
    assert torch.allclose(apply_to_program(plan, core, case.sites).module()(IDS), expected, atol=1e-5)
    with pytest.raises(PlanError, match=r"'blocks.0.attn.wq', 'blocks.1.attn.wq', which .* pass its sites"):
        apply_to_program(plan, core)
    with pytest.raises(PlanError, match=r"'blocks.0.attn.wq', 'blocks.1.attn.wq', for which this program has no place"):
        apply_to_program(uniform_plan(case.sites, "fp8"), core, case.sites)


def test_a_plan_for_another_model_is_refused(case_of: Callable[[str], Case]) -> None:
    plan = uniform_plan(case_of("llama").sites, "int4_g32")
    with pytest.raises(
        PlanError, match=r"'model.layers.0.self_attn.q_proj'.* and 10 more, which this program does not have"
    ):
        apply_to_program(plan, case_of("plain").program)


@pytest.mark.parametrize("scheme", ["int8_token", "fp8_e4m3_tensor"])
def test_values_that_are_a_result_are_rounded_behind_it(case_of: Callable[[str], Case], scheme: str) -> None:
    case = case_of("llama")
    sites = [
        site for site in find_value_sites(case.model) if site.role in ("mlp.up", "mlp.act", "mlp.down", "residual")
    ]
    assert len({site.part for site in sites}) == 5
    weights = uniform_plan(case.sites, "fp8").sites
    tensors = {
        name: array
        for site in sites
        if VALUE_SCHEMES[scheme].static
        for name, array in value_tensors_of(
            site, ValueRule(scheme=VALUE_SCHEMES[scheme], scales={"y": torch.tensor([0.01]), "h": torch.tensor([0.01])})
        ).items()
    }
    plan = plan_of([*weights, *(choice(site, scheme) for site in sites)], tensors)
    planned = apply_to_program(plan, case.program).module()
    with emulate_plan(plan, case.model, case.sites):
        expected = case.run(case.model, OTHER_IDS)
    assert torch.equal(case.run(planned, OTHER_IDS), expected)
    weights_alone = apply_to_program(plan_of(weights), case.program).module()
    assert not torch.equal(case.run(weights_alone, OTHER_IDS), expected)


ATTENTION = ("k_cache", "v_cache", "qk", "softmax", "pv", "output", "norm")
#: Part → schemes: one without a scale, one per token, one static per head where there is one.
VALUE_CHOICES = [
    ("bf16_values", "bf16_values"),
    ("int8_token", "fp8_e4m3_unit"),
    ("fp8_e4m3_head", "fp8_e4m3_unit"),
]


def values_planned(
    sites: Sequence[ValueSite], scheme: str, of_softmax: str, *, kv_heads: int = 4, scale: float = 0.02
) -> Plan:
    """A plan that rounds these values alone; norms and sums, which have no scales, to bf16; one scale for each head."""
    chosen = {
        s: {"softmax": of_softmax, "softmax_sum": "bf16_values", "norm": "bf16_values"}.get(s.part, scheme)
        for s in sites
    }
    tensors: dict[str, Any] = {}
    for site, name in chosen.items():
        heads = {operand: kv_heads if operand in "kv" else site.num_heads for operand in site.operands}
        scales = {operand: torch.arange(1.0, heads[operand] + 1) * scale for operand in site.operands}
        tensors |= value_tensors_of(site, ValueRule(scheme=VALUE_SCHEMES[name], scales=scales))
    return plan_of([choice(site, name) for site, name in chosen.items()], tensors)


def assert_same_but_for_a_few_ties(found: Tensor, expected: Tensor, without: Tensor) -> None:
    """Sums in another order push a few numbers over a rounding border, which moves single logits by a trifle."""
    effect = (expected - without).abs().mean()
    assert float(effect) > 1e-5
    assert float((found - expected).abs().mean()) < 0.02 * float(effect)


@pytest.mark.parametrize("name", ["llama", "gpt2", "llama, written out"])
@pytest.mark.parametrize(("scheme", "of_softmax"), VALUE_CHOICES)
def test_values_inside_attention_and_norms(
    case_of: Callable[[str], Case], name: str, scheme: str, of_softmax: str
) -> None:
    """The program has scaled_dot_product_attention, or products and a softmax as transformers' eager attention has."""
    case = case_of(name)
    apart: tuple[tuple[str, ...], ...] = (("k_cache", "v_cache", "norm"), ("qk", "softmax"), ("pv", "output"))
    for parts in (*(apart if scheme == "int8_token" and name != "gpt2" else ()), ATTENTION):
        sites = [site for site in find_value_sites(case.model) if site.part in parts]
        assert {site.part for site in sites} == set(parts)
        plan = values_planned(sites, scheme, of_softmax, kv_heads=4 if name == "gpt2" else 2)
        planned = apply_to_program(plan, case.program).module()
        with emulate_plan(plan, case.model, case.sites):
            expected = case.run(case.model, OTHER_IDS)
        assert_same_but_for_a_few_ties(case.run(planned, OTHER_IDS), expected, case.run(case.model, OTHER_IDS))


def test_every_value_and_every_weight_of_a_hand_written_module() -> None:
    case, loaded = Case(tiny_gpt(layers=1)), plain_model(tiny_gpt(layers=1))
    values = [site for site in find_value_sites(loaded.model) if site.part != "softmax_sum"]
    assert len(values) == 11
    plan = values_planned(values, "int8_token", "fp8_e4m3_unit")
    plan = plan.replace(sites=(*plan.sites, *uniform_plan(case.sites, "int8").sites))
    planned = apply_to_program(plan, case.program)
    file = io.BytesIO()
    torch.export.save(planned, file)
    file.seek(0)
    with emulate_plan(plan, loaded.model, case.sites):
        expected = loaded.model(input_ids=OTHER_IDS).logits
    found = case.run(torch.export.load(file).module(), OTHER_IDS)
    assert_same_but_for_a_few_ties(found, expected, case.run(case.model, OTHER_IDS))


def test_keys_per_channel_and_sums_in_a_program_of_fixed_length(case_of: Callable[[str], Case]) -> None:
    """Two groups of 32 tokens and six that fill none; sums over 64 keys and over six more."""
    case, ids = case_of("llama"), torch.arange(140).reshape(2, 70) * 11 % 260
    keys, sums = ([s for s in find_value_sites(case.model) if s.part == p] for p in ("k_cache", "softmax_sum"))
    program = torch.export.export(case.model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    without = case.run(case.model, ids)
    for plan in (values_planned(keys, "int4_channel_g32", ""), values_planned(sums, "", "")):
        with emulate_plan(plan, case.model, case.sites):
            expected = case.run(case.model, ids)
        assert_same_but_for_a_few_ties(case.run(apply_to_program(plan, program).module(), ids), expected, without)
    of_keys = values_planned(keys, "int4_channel_g32", "")
    with emulate_plan(of_keys, case.model, case.sites):
        expected = case.run(case.model, ids)
    free = apply_to_program(of_keys, case.program).module()  # groups follow the length that the program is given
    assert_same_but_for_a_few_ties(case.run(free, ids), expected, without)
    assert torch.allclose(case.run(free, OTHER_IDS), case.run(case.model, OTHER_IDS), atol=1e-5)  # fills no group


class ReadsCache(nn.Module):
    """One step of decoding: keys and values so far come in, and go out with the new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        new = [part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)]
        k, v = torch.cat([k, new[1]], dim=2), torch.cat([v, new[2]], dim=2)
        return nn.functional.scaled_dot_product_attention(new[0], k, v), k, v


def test_a_program_that_reads_a_cache_reads_it_rounded() -> None:
    torch.manual_seed(0)
    module = ReadsCache().eval().requires_grad_(False)
    x, k, v = torch.randn(2, 1, 16), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    program = torch.export.export(module, (x, k, v), strict=False)
    caches = [
        ValueSite(
            name=f":{part}",
            kind="state",
            role="kv_cache",
            module="",
            tied_group=None,
            num_heads=2,
            head_dim=8,
            layer=None,
        )
        for part in ("k_cache", "v_cache")
    ]
    plan = plan_of([choice(site, "int8_token") for site in caches])
    found, new_k, new_v = apply_to_program(plan, program).module()(x, k, v)
    exact, all_k, all_v = module(x, k, v)

    def rounded(values: Tensor) -> Tensor:
        scale = values.abs().amax(-1, keepdim=True) / 127
        return (values / scale).round() * scale

    q = module.q_proj(x).unflatten(-1, (2, 8)).transpose(1, 2)
    weights = (q @ rounded(all_k).transpose(-1, -2) / 8**0.5).softmax(-1)
    torch.testing.assert_close(found, weights @ rounded(all_v))
    assert not torch.allclose(found, exact, atol=1e-4)
    assert torch.equal(new_k, all_k) and torch.equal(new_v, all_v)  # rounded again whenever they are read
    with pytest.raises(PlanError, match=r"':k_cache' \(groups of tokens are counted from the beginning"):
        apply_to_program(plan_of([choice(caches[0], "int4_channel_g32")]), program)


def test_values_without_a_place_are_refused_by_name(case_of: Callable[[str], Case]) -> None:
    case = case_of("llama")
    sums = [site for site in find_value_sites(case.model) if site.part == "softmax_sum"]
    with pytest.raises(PlanError, match=r"self_attn:softmax_sum' \(they are sums of a number of blocks .*fixed length"):
        apply_to_program(values_planned(sums, "", ""), case.program)
    elsewhere = [replace(site, name=f"elsewhere:{site.part}") for site in sums[:1]]
    with pytest.raises(PlanError, match=r"'elsewhere:softmax_sum' \(no operator that computes them is in it\)"):
        apply_to_program(values_planned(elsewhere, "", ""), case.program)


def test_rounded_inputs_are_seen_where_the_product_is() -> None:
    linear = nn.Linear(32, 8, bias=False).requires_grad_(False)
    sequence = nn.Sequential(linear)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(sequence, (x,), strict=False)
    plan = plan_of([choice(site, "int8") for site in find_sites(sequence)])
    scheme = next(scheme for scheme in INTEGER_SCHEMES if scheme.name == "int8")
    assert scheme.weights is not None and scheme.activations is not None
    expected = nn.functional.linear(fake_quantize(x, scheme.activations), fake_quantize(linear.weight, scheme.weights))
    assert torch.equal(apply_to_program(plan, program).module()(x), expected)
