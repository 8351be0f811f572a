"""Sites of six architectures: names, roles, rows, ties, and that a site's weight is the matrix the module uses."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from torch import nn

from bitwright.errors import ModelError
from bitwright.models import find_sites, site_weight

ARCHITECTURES = ("llama", "gpt2", "qwen2", "gemma", "phi3", "mixtral")

SEPARATE_QKV = {
    "self_attn.q_proj": ("attn.q", (64, 64)),
    "self_attn.k_proj": ("attn.k", (32, 64)),
    "self_attn.v_proj": ("attn.v", (32, 64)),
    "self_attn.o_proj": ("attn.out", (64, 64)),
}
GATED_MLP = {
    "mlp.gate_proj": ("mlp.gate", (96, 64)),
    "mlp.up_proj": ("mlp.up", (96, 64)),
    "mlp.down_proj": ("mlp.down", (64, 96)),
}
EXPERTS = {
    f"mlp.experts.{expert}.{name}": (role, shape)
    for expert in range(4)
    for name, role, shape in (
        ("gate_up[gate]", "expert.gate", (96, 64)),
        ("gate_up[up]", "expert.up", (96, 64)),
        ("down", "expert.down", (64, 96)),
    )
}

#: What one decoder layer consists of, in forward order, read off the modelling files of transformers 5.24.
LAYER_SITES = {
    "llama": SEPARATE_QKV | GATED_MLP,
    "qwen2": SEPARATE_QKV | GATED_MLP,
    "gemma": SEPARATE_QKV | GATED_MLP,
    "gpt2": {
        "attn.c_attn[q]": ("attn.q", (64, 64)),
        "attn.c_attn[k]": ("attn.k", (64, 64)),
        "attn.c_attn[v]": ("attn.v", (64, 64)),
        "attn.c_proj": ("attn.out", (64, 64)),
        "mlp.c_fc": ("mlp.up", (256, 64)),
        "mlp.c_proj": ("mlp.down", (64, 256)),
    },
    "phi3": {
        "self_attn.qkv_proj[q]": ("attn.q", (64, 64)),
        "self_attn.qkv_proj[k]": ("attn.k", (32, 64)),
        "self_attn.qkv_proj[v]": ("attn.v", (32, 64)),
        "self_attn.o_proj": ("attn.out", (64, 64)),
        "mlp.gate_up_proj[gate]": ("mlp.gate", (96, 64)),
        "mlp.gate_up_proj[up]": ("mlp.up", (96, 64)),
        "mlp.down_proj": ("mlp.down", (64, 96)),
    },
    "mixtral": SEPARATE_QKV | {"mlp.gate": ("router", (4, 64))} | EXPERTS,
}
#: (name, role, uses) after the decoder.
END_SITES = {
    "llama": [
        ("model.embed_tokens", "embedding", {"model.embed_tokens"}),
        ("lm_head", "lm_head", {"lm_head"}),
    ],
    "gpt2": [("lm_head", "lm_head", {"transformer.wte", "lm_head"})],
    "qwen2": [("lm_head", "lm_head", {"model.embed_tokens", "lm_head"})],
}
END_SITES |= {"gemma": END_SITES["qwen2"], "phi3": END_SITES["llama"], "mixtral": END_SITES["llama"]}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_roles_and_shapes_in_forward_order(architecture, make_tiny_model):
    sites = find_sites(make_tiny_model(architecture))
    stem = "transformer.h" if architecture == "gpt2" else "model.layers"
    expected = [
        (f"{stem}.{layer}.{name}", role, shape)
        for layer in range(2)
        for name, (role, shape) in LAYER_SITES[architecture].items()
    ]
    num_ends = len(END_SITES[architecture])
    assert [(site.name, site.role, site.shape) for site in sites[:-num_ends]] == expected
    assert [(site.name, site.role, set(site.uses)) for site in sites[-num_ends:]] == END_SITES[architecture]
    assert all(site.shape == (260, 64) for site in sites[-num_ends:])
    assert all(site.kind == "weight" for site in sites)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sites_cover_every_matrix_exactly_once(architecture, make_tiny_model):
    """Counted in the model: each element of each matrix is in exactly one site; position embeddings are in none."""
    model = make_tiny_model(architecture)
    num_visits = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for site in find_sites(model):
        visited = num_visits[site.parameter]
        visited = visited if site.expert is None else visited[site.expert]
        visited = visited.T if site.transposed else visited
        first, last = site.rows or (0, visited.shape[0])
        visited[first:last] += 1
    for name, visits in num_visits.items():
        is_matrix = visits.dim() >= 2 and not name.endswith("wpe.weight")
        assert (visits == (1 if is_matrix else 0)).all(), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_a_fused_matrix_are_tied_and_adjacent(architecture, make_tiny_model):
    groups = defaultdict(list)
    for site in find_sites(make_tiny_model(architecture)):
        assert (site.rows is None) == (site.tied_group is None)
        if site.tied_group is not None:
            groups[site.tied_group].append(site)
    assert bool(groups) == (architecture in ("gpt2", "phi3", "mixtral"))
    for name, parts in groups.items():
        assert all(part.name.startswith(name + "[") for part in parts)
        bounds = [part.rows for part in parts]
        assert bounds[0][0] == 0
        assert all(left[1] == right[0] for left, right in pairwise(bounds))
        assert all(part.shape[0] == part.rows[1] - part.rows[0] for part in parts)


def _dense_calls(model, sites):
    """Names of modules with their sites, for modules that are one linear map of their input."""
    calls = defaultdict(list)
    for site in sites:
        if site.expert is None and site.role not in ("embedding", "router"):
            calls[site.module].append(site)
    return calls


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_site_weights_reproduce_the_modules_outputs(architecture, make_tiny_model):
    model = make_tiny_model(architecture)
    generator = torch.Generator().manual_seed(1)
    for name, sites in _dense_calls(model, find_sites(model)).items():
        module = model.get_submodule(name)
        x = torch.randn(5, sites[0].shape[1], generator=generator)
        y = torch.cat([x @ site_weight(model, site).T for site in sites], dim=-1)
        if getattr(module, "bias", None) is not None:
            y = y + module.bias
        torch.testing.assert_close(y, module(x), atol=1e-5, rtol=1e-5)


def test_router_and_expert_sites_reproduce_the_mixture(make_tiny_model):
    """The mixture's output from the site weights alone, after Mixtral's definition (softmax over the top two)."""
    model = make_tiny_model("mixtral")
    weight = {site.name: site_weight(model, site) for site in find_sites(model)}
    block = model.model.layers[0].mlp
    x = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(2))
    probabilities = torch.softmax(x[0] @ weight["model.layers.0.mlp.gate"].T, dim=-1)
    top, chosen = probabilities.topk(2, dim=-1)
    top = top / top.sum(dim=-1, keepdim=True)
    expected = torch.zeros(7, 64)
    for token in range(7):
        for share, expert in zip(top[token], chosen[token].tolist(), strict=True):
            stem = f"model.layers.0.mlp.experts.{expert}"
            gate = x[0, token] @ weight[f"{stem}.gate_up[gate]"].T
            up = x[0, token] @ weight[f"{stem}.gate_up[up]"].T
            expected[token] += share * ((nn.functional.silu(gate) * up) @ weight[f"{stem}.down"].T)
    torch.testing.assert_close(block(x)[0].reshape(7, 64), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ("gpt2", "phi3", "mixtral"))
def test_site_weight_is_a_view(architecture, make_tiny_model):
    model = make_tiny_model(architecture)
    for site in find_sites(model):
        view = site_weight(model, site)
        parameter = model.get_parameter(site.parameter)
        assert view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        assert tuple(view.shape) == site.shape


def test_changing_the_q_rows_changes_q_alone(make_tiny_model):
    model = make_tiny_model("gpt2")
    q, k, v = find_sites(model)[:3]
    module = model.get_submodule(q.module)
    x = torch.ones(1, 64)
    before = module(x).split(64, dim=-1)
    site_weight(model, q).zero_()
    after = module(x).split(64, dim=-1)
    torch.testing.assert_close(after[0], module.bias[None, :64])
    assert torch.equal(before[1], after[1]) and torch.equal(before[2], after[2])
    assert (k.role, v.role) == ("attn.k", "attn.v")


def test_unknown_linear_is_kept_as_other():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    sites = find_sites(model)
    assert [(site.name, site.role, site.shape) for site in sites] == [("0", "other", (4, 8)), ("2", "other", (2, 4))]


def test_interleaved_qkv_stays_one_site():
    """GPT-NeoX stores q, k and v head by head: no row range is q, so the matrix is one site."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=260, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96,
        bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    sites = {site.name: site for site in find_sites(GPTNeoXForCausalLM(config))}
    fused = sites["gpt_neox.layers.0.attention.query_key_value"]
    assert (fused.role, fused.rows, fused.tied_group, fused.shape) == ("attn.qkv", None, None, (192, 64))
    assert sites["gpt_neox.layers.0.attention.dense"].role == "attn.out"
    assert sites["gpt_neox.layers.0.mlp.dense_4h_to_h"].role == "mlp.down"


def test_transposed_interleaved_experts_stay_whole():
    """gpt_oss stores experts [E, in, out] with gate and up in alternate columns."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=260, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, num_local_experts=2, bos_token_id=256, eos_token_id=256, pad_token_id=259,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    sites = {site.name: site for site in find_sites(model)}
    expert = sites["model.layers.0.mlp.experts.1.gate_up"]
    assert (expert.role, expert.transposed, expert.rows, expert.shape) == ("expert.gate_up", True, None, (192, 64))
    assert torch.equal(site_weight(model, expert), model.model.layers[0].mlp.experts.gate_up_proj[1].T)
    assert sites["model.layers.0.mlp.router"].role == "router"


def test_a_shared_layer_is_one_site_with_its_uses():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"first": shared, "second": shared})
    (site,) = find_sites(model)
    assert (site.name, site.uses) == ("first", ("first", "second"))


def test_model_without_linear_is_refused_with_what_was_seen():
    with pytest.raises(ModelError, match=r"no linear layer to quantise \(modules seen: Conv2d x1, ReLU x2\)"):
        find_sites(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.ReLU()))


def test_a_model_whose_sites_cannot_be_named_is_told_how_to_name_them(tmp_path):
    """The advice is followed: a file as the sentence spells it names the matrix that it shows."""

    class Bilinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            self.inner.w = nn.Parameter(torch.ones(8, 4))

        def forward(self, x):
            return torch.einsum("oi,bi->bo", self.inner.w, x)

    with pytest.raises(ModelError, match=r"matrices: inner\.w \[8, 4\]; .*name its sites in a file given by --sites"):
        find_sites(Bilinear())
    names = tmp_path / "sites.toml"
    names.write_text('[[site]]\nparameter = "*.w"\nrole = "other"\n', encoding="utf-8")
    (site,) = find_sites(Bilinear(), names)
    assert (site.parameter, site.role, site.shape) == ("inner.w", "other", (8, 4))


def test_site_of_another_model_is_refused(make_tiny_model):
    site = find_sites(make_tiny_model("gpt2"))[0]
    with pytest.raises(ModelError, match=r"has no parameter 'transformer\.h\.0\.attn\.c_attn\.weight'"):
        site_weight(make_tiny_model("llama"), site)
