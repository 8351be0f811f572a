"""Values of a module that is not transformers': seen op by op, against attention by hand, and through the planner."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_models import IDS, VOCABULARY, RootMeanSquare, TinyGPT, tiny_gpt
from small_plans import choice, plan_of
from tiny_search import search_options, write_text
from torch import Tensor, nn
from torch.nn import functional as F

import bitwright
from bitwright.errors import PlanError
from bitwright.inference import ValueRule, apply, emulate_values, value_tensors_of
from bitwright.models import find_value_sites, plain_model, values_left_out
from bitwright.models.attention_calls import attention
from bitwright.models.value_calls import ValueCalls
from bitwright.plan import Budget, load_plan, write_plan
from bitwright.quantize import VALUE_SCHEMES
from bitwright.quantize.value_rounding import round_values
from bitwright.search.optimize import verify

WAYS = ("matmul", "einsum", "three dimensions", "fused", "grouped")


class OneWay(nn.Module):
    """Causal attention of two heads over four numbers each, written in one of the ways in which people write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.tok = nn.Embedding(VOCABULARY, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def heads(self, x: Tensor) -> list[Tensor]:
        """q, k and v, [batch, heads, tokens, 4]."""
        return [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        q, k, v = self.heads(x)
        length = ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        match self.way:
            case "matmul":
                scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(4))
                o = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
            case "einsum":
                q, k, v = (part.transpose(1, 2) for part in (q, k, v))
                scores = torch.einsum("bihd,bjhd->bhij", q / 2, k).masked_fill(future, float("-inf"))
                o = torch.einsum("bhij,bjhd->bihd", F.softmax(scores, dim=3), v).transpose(1, 2)
            case "three dimensions":
                q, k, v = (part.flatten(0, 1) for part in (q, k, v))
                scores = torch.bmm(q / 2, k.transpose(1, 2)).masked_fill(future, float("-inf"))
                o = torch.bmm(torch.softmax(scores, -1), v).unflatten(0, (-1, 2))
            case "fused":
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            case "grouped":  # both query heads as a group of one key head each
                scores = torch.einsum("bgrid,bgjd->bgrij", q.unsqueeze(2), k) / 2
                p = scores.masked_fill(future, float("-inf")).softmax(-1)
                o = torch.einsum("bgrij,bgjd->bgrid", p, v).flatten(1, 2)
        return self.head(self.norm(x + self.out(o.transpose(1, 2).flatten(-2))))


@functools.cache
def one_way(way: str) -> tuple[OneWay, Any]:
    """The module, and the same as a model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = OneWay(way).eval().requires_grad_(False)
        module.qkv.weight *= 4
    return module, plain_model(module).model


def rule(name: str) -> ValueRule:
    return ValueRule(scheme=VALUE_SCHEMES[name], scales={operand: torch.tensor([0.02]) for operand in "qkvo"})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", ["qk", "softmax", "softmax_sum", "pv", "output"])
def test_every_way_to_write_attention_is_rounded_as_a_kernel_does(way: str, part: str) -> None:
    """The kernel: attention step by step, of which tests/inference/test_values.py says that it is one."""
    module, model = one_way(way)
    sites = [site for site in find_value_sites(model) if site.role.startswith("attn.")]
    assert [site.part for site in sites] == ["qk", "softmax", "softmax_sum", "pv", "output"]
    in_heads = 1 if way == "three dimensions" else 2
    assert all(site.num_heads == in_heads for site in sites)
    (site,) = (site for site in sites if site.part == part)
    name = {"softmax": "fp8_e4m3_unit", "softmax_sum": "bf16_values"}.get(part, "int8_token")
    with torch.no_grad(), emulate_values(model, {site: rule(name)}):
        found = model(input_ids=IDS).logits

    def rounded(of_part: str, operand: str, value: Tensor) -> Tensor:
        return round_values(value, rule(name).scheme, rule(name).scale(operand)) if of_part == part else value

    x = module.tok(IDS)
    q, k, v = module.heads(x)
    mask = torch.ones(IDS.shape[1], IDS.shape[1], dtype=torch.bool).tril()
    o = attention(rounded, q, k, v, mask, scaling=0.5)
    expected = module.head(module.norm(x + module.out(o.transpose(1, 2).flatten(-2))))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert float((found - module(IDS)).abs().max()) > 1e-3 * (0.01 if part == "softmax_sum" else 1)


@pytest.mark.parametrize("way", ["fused", "einsum"])
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch copies its own deprecated class
def test_a_program_that_torch_took_apart_rounds_alike(way: str) -> None:
    """Products of three dimensions, q and k each with half of the scaling, a norm with three results."""
    module, model = one_way(way)
    program = torch.export.export(module, (IDS,), strict=False).run_decompositions()
    sites = [site for site in find_value_sites(model) if site.role != "mlp.act"]
    names = {"softmax": "fp8_e4m3_unit", "softmax_sum": "bf16_values", "norm": "bf16_values"}
    rules = {site: rule(names.get(site.part, "int8_token")) for site in sites}
    tensors = {
        name: array for site, of_site in rules.items() for name, array in value_tensors_of(site, of_site).items()
    }
    planned = apply(plan_of([choice(site, of_site.scheme.name) for site, of_site in rules.items()], tensors), program)
    assert isinstance(planned, torch.export.ExportedProgram)
    with torch.no_grad(), emulate_values(model, rules):
        expected = model(input_ids=IDS).logits
    effect = (expected - module(IDS)).abs().mean()
    assert float((planned.module()(IDS) - expected).abs().mean()) < 0.02 * float(effect)
    per_head = [choice(site, "fp8_e4m3_head") for site in sites if site.part == "qk"]
    with pytest.raises(PlanError, match=r":qk' \(its operators have sequences and heads in one dimension\)"):
        apply(plan_of(per_head), program)


def test_what_is_offered_are_the_numbers_of_the_code() -> None:
    gpt = tiny_gpt(layers=1)
    model: Any = plain_model(gpt).model
    seen: dict[tuple[str, str], Tensor] = {}

    def note(name: str, operand: str, value: Tensor) -> Tensor:
        seen[name, operand] = value
        return value

    with torch.no_grad(), ValueCalls(model, note):
        logits = model(input_ids=IDS).logits
    torch.testing.assert_close(logits, gpt(IDS))
    block: Any = gpt.blocks[0]
    x = gpt.tok(IDS) + gpt.pos[:11]
    after = x + block.attn(block.norm1(x))
    up = block.fc1(block.norm2(after))
    expected = {
        ("blocks.0.norm1:norm", "input"): x,
        ("blocks.0.norm1:norm", "output"): block.norm1(x),
        ("blocks.0.norm2:norm", "input"): after,
        ("blocks.0:up", "y"): up,
        ("blocks.0:act", "y"): F.gelu(up),
        ("blocks.0:down", "y"): block.fc2(F.gelu(up)),
        ("blocks.0:residual", "h"): after + block.fc2(F.gelu(up)),
        ("norm:norm", "output"): gpt.norm(after + block.fc2(F.gelu(up))),
    }
    for key, value in expected.items():
        torch.testing.assert_close(seen[key], value)
    k = (block.norm1(x) @ block.attn.wk.T).view(2, 11, 4, 8).transpose(1, 2)
    torch.testing.assert_close(seen["blocks.0.attn:qk", "k"], k)
    e = seen["blocks.0.attn:softmax", "p"]
    assert bool((e.amax(-1) == 1).all())
    torch.testing.assert_close(seen["blocks.0.attn:softmax_sum", "sum"], e.sum(-1, keepdim=True))
    assert torch.equal(model(input_ids=IDS).logits, gpt(IDS))  # and afterwards it is the module again


class Norms(nn.Module):
    """Norms as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.root = RootMeanSquare(8)
        self.gain, self.bias = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(F.one_hot(ids, 8).float())
        whitened = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
        return self.last(x + self.root(whitened * self.gain + self.bias))


def test_written_norms_know_their_input() -> None:
    torch.manual_seed(0)
    module = Norms().eval().requires_grad_(False)
    model: Any = plain_model(module, example_ids=torch.zeros(2, 5, dtype=torch.int64)).model
    ids = torch.arange(12).reshape(3, 4) % 8
    seen: dict[tuple[str, str], Tensor] = {}

    def double(name: str, operand: str, value: Tensor) -> Tensor:
        seen[name, operand] = value
        return value * 2 if operand == "output" else value + 1

    with torch.no_grad(), ValueCalls(model, double):
        found = model(input_ids=ids).logits
    x = module.first(F.one_hot(ids, 8).float())
    inner = 2 * (F.layer_norm(x + 1, (8,)) * module.gain + module.bias)
    torch.testing.assert_close(seen[":norm", "input"], x)
    torch.testing.assert_close(seen["root:norm", "input"], inner)
    torch.testing.assert_close(found, module.last(x + 2 * module.root(inner + 1)), rtol=1e-4, atol=1e-5)


def sharp_gpt() -> TinyGPT:
    """Its blocks and its head tell tokens apart, so that errors show."""
    gpt = tiny_gpt(layers=1, tied=False)
    for weight in (gpt.head.weight, *(p for p in gpt.blocks.parameters() if p.dim() == 2)):
        weight *= 4
    return gpt


class Stock(nn.Module):
    """Layers of torch itself, and an MLP whose names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu", norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.more = nn.Sequential(nn.Linear(16, 24), nn.ReLU(inplace=True), nn.Linear(24, 16))

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        future = torch.full((length, length), float("-inf")).triu(1)
        x = self.body(self.tok(ids), mask=future, is_causal=True)
        x += self.more(x)
        return self.head(x)


def test_layers_of_torch_show_all_their_values() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Stock().eval()
    model: Any = plain_model(module).model
    layer = "body.layers.0"
    inside = [f"{layer}.self_attn:{part}" for part in ("qk", "softmax", "softmax_sum", "pv", "output")]
    mlp = [f"{layer}.norm2:norm", f"{layer}:up", f"{layer}:act", f"{layer}:down", "more:up", "more:act", "more:down"]
    found = find_value_sites(model)
    expected = [f"{layer}.norm1:norm", *inside, f"{layer}:residual", *mlp, ":residual"]
    assert [site.name for site in found] == expected
    seen: dict[tuple[str, str], Tensor] = {}

    def note(name: str, operand: str, value: Tensor) -> Tensor:
        seen[name, operand] = value
        return value

    with torch.no_grad(), ValueCalls(model, note):
        torch.testing.assert_close(model(input_ids=IDS).logits, module(IDS))
    # what the module writes over afterwards (ReLU in place, +=) stays as it was seen
    up: Any = module.more[0]
    x = seen[f"{layer}:residual", "h"]
    torch.testing.assert_close(seen["more:up", "y"], up(x))
    torch.testing.assert_close(seen[":residual", "h"], x + module.more(x))
    assert values_left_out(model, {"mlp.up", "mlp.act", "attn.qk", "norm"}) == ()


def test_a_plain_module_is_planned_with_all_its_values(tiny_tokenizer: Any, tmp_path: Path) -> None:
    loaded = plain_model(sharp_gpt(), tokenizer=tiny_tokenizer, name="own")
    names = ("int4_g32", "int8_w", "bf16_values", "int8_token", "fp8_e4m3_head", "fp8_e4m3_unit")
    options = search_options(write_text(tmp_path), schemes=names, values="all")
    plan = bitwright.optimize(loaded, budget=Budget(effective_bits=6.0), **options)
    chosen = {site.name: site.scheme for site in plan.sites if site.kind != "weight"}
    assert set(chosen) == {site.name for site in find_value_sites(loaded.model)} and len(chosen) == 12
    assert "as_loaded" not in chosen.values()
    (note,) = (note for note in plan.notes if "cannot be reached" in note)
    assert note.endswith("TinyGPT keeps no keys and values from call to call")
    assert plan.measured is not None and plan.measured.kl.mean > 0
    assert 0.3 < plan.predictions[-1].predicted_kl / plan.measured.kl.mean < 3

    read = load_plan(write_plan(plan, tmp_path / "plan"))
    assert verify(read, model=loaded) == plan.measured
    weights_alone = read.replace(sites=tuple(site for site in read.sites if site.kind == "weight"))
    assert verify(weights_alone, model=loaded).kl.mean < plan.measured.kl.mean

    ids = torch.arange(32).reshape(2, 16) * 3 % VOCABULARY
    with pytest.raises(PlanError, match="reached in its program alone"):
        apply(plan, loaded, mode="packed")
    runs, without = apply(plan, loaded), apply(weights_alone, loaded)
    assert not torch.equal(runs(input_ids=ids).logits, without(input_ids=ids).logits)
    assert torch.equal(copy.deepcopy(runs)(input_ids=ids).logits, runs(input_ids=ids).logits)


class FixedLength(TinyGPT):
    """Adds all of its eight positions, so that no other length fits."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tok(ids) + self.pos[:8].view(1, 8, -1))


class Branches(TinyGPT):
    """Takes another way on short texts."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        return self.head(x + 1 if ids.shape[1] > 6 else x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(FixedLength, "does not run on ids of shape"), (Branches, "computes something else than it does on ids")],
)
def test_a_program_that_cannot_stand_for_its_module_shows_no_values(kind: type[TinyGPT], reason: str) -> None:
    model = plain_model(kind(layers=0).eval()).model
    assert find_value_sites(model) == ()
    (sentence,) = values_left_out(model, {"norm"})
    assert reason in sentence and sentence.startswith(kind.__name__)


def test_what_a_program_computes_and_no_site_stands_for_is_named() -> None:
    class Odd(nn.Module):
        """Attention whose scores sum over two dimensions, and an activation function that nobody knows."""

        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Embedding(VOCABULARY, 8)
            self.up_proj, self.down_proj = nn.Linear(8, 8), nn.Linear(8, VOCABULARY)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tok(ids).unflatten(-1, (2, 4))
            p = torch.einsum("biuv,bjuv->bij", x, x).softmax(-1)
            x = (p @ x.flatten(-2)).contiguous()
            return self.down_proj(self.up_proj(x).sin())

    left_out = values_left_out(plain_model(Odd()).model)
    assert any(sentence.startswith("the model:qk: einsum cannot be read") for sentence in left_out)
    assert any(":act: no operator" in sentence for sentence in left_out)
