"""Statistics against plain forward hooks and autograd, with the labels that were drawn."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_search import ARCHITECTURES, NoStage, random_text, text_set
from torch import Tensor

from bitwright.errors import ModelError
from bitwright.models import find_sites
from bitwright.models.linear_calls import matrices_of
from bitwright.models.value_sites import find_value_sites
from bitwright.search.calibrate import NUM_HEAD_TOKENS, calibrate
from bitwright.search.outputs.tokens import Tokens, draw
from bitwright.search.recorder import NUM_UNROUNDED_TOKENS, Statistics
from bitwright.search.text import TextSet
from bitwright.search.value_observer import ValueObserver

#: bf16 keeps 8 bits.
BF16 = {"rtol": 2**-8, "atol": 1e-6}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The labels that were sampled, batch by batch."""
    labels: list[Tensor] = []
    original = torch.searchsorted

    def record(*args: Any, **kwargs: Any) -> Tensor:
        labels.append(original(*args, **kwargs))
        return labels[-1]

    monkeypatch.setattr(torch, "searchsorted", record)
    return labels


def collect(model: Any, text: TextSet, seed: int = 0, include_head: bool = False) -> Statistics:
    sites = [s for s in find_sites(model) if include_head or s.role not in ("embedding", "lm_head")]
    return calibrate(model, sites, text, seed=seed, stage=NoStage())


def log_likelihood(model: Any, text: TextSet, labels: Tensor, **inputs: Any) -> Tensor:
    """Σ log p of the drawn labels over the whole text at once."""
    logits = model(**inputs, use_cache=False).logits[:, :-1][text.scored[:, 1:]]
    return logits.log_softmax(-1).gather(-1, labels).sum()


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product in fp32."""
    monkeypatch.setattr("bitwright.search.calibrate.product_dtype", lambda: torch.float32)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "mixtral"])
def test_inputs_and_gradients_equal_those_of_hooks(
    make_tiny_model: Callable[..., Any], drawn: list[Tensor], architecture: str
) -> None:
    """80 sequences of 16 make several passes; hooks see all of them in one."""
    model, text = make_tiny_model(architecture), random_text(80, 16)
    found = collect(model, text)
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad:
                output.requires_grad_(True)
            output.retain_grad()
            seen[name] = (inputs[0], output)

        return keep

    modules = {name: m for name, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    handles = [m.register_forward_hook(hook(name)) for name, m in modules.items() if name != "lm_head"]
    log_likelihood(model, text, torch.cat(drawn), input_ids=text.input_ids).backward()
    for handle in handles:
        handle.remove()
    assert len(seen) >= 8
    for name, (x, y) in seen.items():
        matrix = found.matrices[f"{name}.weight"]
        torch.testing.assert_close(matrix.inputs.x_TK.float(), x.detach().reshape(-1, x.shape[-1]), **BF16)
        assert y.grad is not None
        torch.testing.assert_close(matrix.g_TN.float(), y.grad.reshape(-1, y.shape[-1]), rtol=2**-7, atol=1e-5)
    assert found.num_scored == 80 * 15


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3"])
def test_bf16_products_change_inputs_and_gradients_by_little(
    make_tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Labels are drawn from the same numbers; where a probability moved past one, the label is another."""
    model, text = make_tiny_model(architecture), random_text(32, 16)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr("bitwright.search.calibrate.product_dtype", lambda dtype=dtype: dtype)
        found[dtype] = collect(model, text).matrices
    for name, exact in found[torch.float32].items():
        rounded = found[torch.bfloat16][name]
        x_error = (rounded.inputs.x_TK.float() - exact.inputs.x_TK.float()).norm() / exact.inputs.x_TK.float().norm()
        assert x_error < 0.05, name
        g_moment, g_exact = rounded.g_TN.float().square().mean(), exact.g_TN.float().square().mean()
        assert g_moment / g_exact == pytest.approx(1, abs=0.15), name


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_inputs_and_gradients_make_the_gradient_of_every_weight(
    make_tiny_model: Callable[..., Any], drawn: list[Tensor], architecture: str
) -> None:
    """Σ_t g_t x_tᵀ = ∂L/∂W as autograd forms it: experts, embeddings and fused matrices alike."""
    model, text = make_tiny_model(architecture), random_text(8, 16)
    sites = find_sites(model)
    found = collect(model, text, include_head=True)
    model.requires_grad_(True)
    log_likelihood(model, text, torch.cat(drawn), input_ids=text.input_ids).backward()
    for matrix in matrices_of(sites):
        gradient = model.get_parameter(matrix.parameter).grad
        if matrix.expert is not None:
            gradient = gradient[matrix.expert]
        if matrix.name in found.matrices:
            statistics = found.matrices[matrix.name]
            formed = statistics.g_TN.float().T @ statistics.inputs.x_TK.float()
            expected = gradient.T if matrix.transposed else gradient
        elif matrix.name in found.embeddings and matrix.name not in found.heads:
            embedding = found.embeddings[matrix.name]
            formed = torch.zeros_like(gradient).index_add_(0, embedding.ids_T, embedding.g_TH.float())
            expected = gradient
        else:
            assert matrix.name in found.heads
            continue
        torch.testing.assert_close(formed, expected, rtol=0.02, atol=float(0.01 * expected.abs().max()))


def test_matrices_that_read_one_tensor_share_it(make_tiny_model: Callable[..., Any]) -> None:
    found = collect(make_tiny_model("llama"), random_text(4, 16)).matrices
    layer = "model.layers.1"
    q, k, v, o = (found[f"{layer}.self_attn.{name}_proj.weight"].inputs for name in "qkvo")
    assert q is k is v
    assert o is not q
    gate, up, down = (found[f"{layer}.mlp.{name}_proj.weight"].inputs for name in ("gate", "up", "down"))
    assert gate is up and down is not gate


def test_unrounded_inputs_are_rows_of_the_inputs(make_tiny_model: Callable[..., Any]) -> None:
    """Also where the text has more tokens than are kept: 1,280 in several passes."""
    found = collect(make_tiny_model("llama"), random_text(80, 16), include_head=True)
    for statistics in found.matrices.values():
        inputs = statistics.inputs
        assert abs(len(inputs.unrounded_rows) - NUM_UNROUNDED_TOKENS) <= 5
        assert len(inputs.unrounded_rows.unique()) == len(inputs.unrounded_rows)
        assert torch.equal(inputs.unrounded_RK.to(torch.bfloat16), inputs.x_TK[inputs.unrounded_rows])
    (head,) = found.heads.values()
    assert head.dtype == torch.float32 and abs(len(head) - NUM_HEAD_TOKENS) <= 5


def test_leaves_nothing_behind(make_tiny_model: Callable[..., Any]) -> None:
    """No gradients at parameters, no graph, no hook; what is kept is what the docstring says."""
    model, text = make_tiny_model("llama"), random_text(8, 16)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = collect(model, text, include_head=True)
    gc.collect()
    # type(), not isinstance(): that one asks every object of the process for its class, lazy modules too
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    assert not [t.shape for t in tensors if t.grad_fn is not None and len(t.shape) == 3 and t.shape[:2] == (8, 16)]
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and not parameter.requires_grad
        assert torch.equal(parameter, before[name])
    for statistics in found.matrices.values():
        assert statistics.g_TN.dtype == statistics.inputs.x_TK.dtype == torch.bfloat16
        # no view of something larger
        assert statistics.inputs.x_TK.untyped_storage().nbytes() == 2 * statistics.inputs.x_TK.numel()
        assert statistics.g_TN.untyped_storage().nbytes() == 2 * statistics.g_TN.numel()


@pytest.mark.usefixtures("exact")
def test_padding_is_left_out(make_tiny_model: Callable[..., Any]) -> None:
    """Padding at the right gets no gradient and is no input of the head; only scored predictions are drawn."""
    model = make_tiny_model("llama")
    ids = random_text(6, 16).input_ids
    lengths = torch.tensor([16, 9, 4, 12, 7, 2])
    positions = torch.arange(16).expand(6, 16)
    padding = positions >= lengths[:, None]
    scored = ~padding & (positions >= 2)
    scored[5, 1] = True
    found = collect(model, text_set(ids, scored, padding), include_head=True)
    assert found.num_scored == int(scored.sum())
    for statistics in found.matrices.values():
        assert float(statistics.g_TN.reshape(6, 16, -1)[padding].abs().max()) == 0
        # a token that comes after every scored one moves nothing either
        assert float(statistics.g_TN.reshape(6, 16, -1)[0, 15].abs().max()) == 0
    (head,) = found.heads.values()
    assert len(head) == int((~padding).sum())
    captured: list[Tensor] = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    model(input_ids=ids, use_cache=False)
    handle.remove()
    torch.testing.assert_close(head, captured[0][~padding], rtol=1e-5, atol=1e-5)


def test_an_idle_expert_is_absent(make_tiny_model: Callable[..., Any]) -> None:
    """Which experts two tokens reach is read off the router's own logits."""
    model = make_tiny_model("mixtral")
    text = random_text(1, 2, seed=3)
    found = collect(model, text)
    chosen = model(input_ids=text.input_ids, output_router_logits=True).router_logits
    num_idle = 0
    for layer, logits in enumerate(chosen):
        reached = set(logits.topk(2, -1).indices.flatten().tolist())
        for expert in range(4):
            name = f"model.layers.{layer}.mlp.experts.gate_up_proj[{expert}]"
            assert (name in found.matrices) == (expert in reached), name
            num_idle += expert not in reached
    assert num_idle > 0


def test_the_seed_decides(make_tiny_model: Callable[..., Any]) -> None:
    model, text = make_tiny_model("gpt2"), random_text(80, 16)
    first, again, other = collect(model, text, 7), collect(model, text, 7), collect(model, text, 8)
    for name, statistics in first.matrices.items():
        assert torch.equal(statistics.g_TN, again.matrices[name].g_TN)
        assert torch.equal(statistics.inputs.unrounded_RK, again.matrices[name].inputs.unrounded_RK)
        assert not torch.equal(statistics.g_TN, other.matrices[name].g_TN)
        assert torch.equal(statistics.inputs.x_TK, other.matrices[name].inputs.x_TK)


def test_the_global_generator_is_not_touched(make_tiny_model: Callable[..., Any]) -> None:
    state = torch.get_rng_state()
    collect(make_tiny_model("llama"), random_text(4, 16))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_overflow_in_the_middle_is_named(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.mul_(1e38)
    with pytest.raises(
        ModelError, match=r"input of model\.layers\.1\.mlp\.down_proj\.weight is not finite in .* 0 to 3"
    ):
        collect(model, random_text(4, 16))


def test_the_batch_that_overflows_is_named(make_tiny_model: Callable[..., Any]) -> None:
    """256 tokens make a batch, 16 sequences of 16; a token of sequence 35 is poisoned."""
    model, text = make_tiny_model("llama"), random_text(48, 16, vocabulary=200)
    text.input_ids[35, 3] = 250
    model.model.embed_tokens.weight[250] = torch.inf
    with pytest.raises(ModelError, match=r"input of model\.layers\.0\.self_attn\.q_proj\.weight .* 32 to 47"):
        collect(model, text)


def values_of(model: Any, text: TextSet, role: str) -> None:
    """The pass over values alone, as a search makes it where the scores of weights are known."""
    value_sites = [site for site in find_value_sites(model) if site.role == role]
    observer = ValueObserver(model, value_sites, num_tokens=text.input_ids.numel(), seed=0)
    calibrate(model, (), text, seed=0, stage=NoStage(), observers=[observer])


@pytest.mark.parametrize("role", ["kv_cache", "norm"])
def test_an_overflow_while_values_are_seen_is_named_too(make_tiny_model: Callable[..., Any], role: str) -> None:
    """It arises in the last layer, behind every cache: the module is named, not the head."""
    model, text = make_tiny_model("llama"), random_text(48, 16, vocabulary=200)
    text.input_ids[35, 3] = 250
    model.model.embed_tokens.weight[250] = 1e6
    model.model.layers[1].mlp.up_proj.weight.mul_(1e38)
    with pytest.raises(ModelError, match=r"output of model\.layers\.1\.mlp\.up_proj is not finite in .* 0 to 31"):
        values_of(model, text, role)
    model.model.layers[1].mlp.up_proj.weight.mul_(1e-38)
    model.model.embed_tokens.weight[250] = torch.inf
    with pytest.raises(ModelError, match=r"output of model\.embed_tokens is not finite in .* 32 to 47"):
        values_of(model, text, role)


def test_a_gradient_that_is_not_finite_at_a_value_is_named(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    module = model.model.layers[0].post_attention_layernorm
    module.register_full_backward_hook(lambda *_: (torch.full((4, 16, 64), torch.nan),))
    with pytest.raises(ModelError, match=r"gradient at model\.layers\.0\.self_attn:\w+ is not finite .* 0 to 3"):
        values_of(model, random_text(4, 16), "kv_cache")


def test_a_gradient_that_is_not_finite_is_named(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    module = model.model.layers[0].post_attention_layernorm
    module.register_full_backward_hook(lambda *_: (torch.full((4, 16, 64), torch.nan),))
    with pytest.raises(
        ModelError, match=r"gradient at model\.layers\.0\.self_attn\.o_proj\.weight is not finite .* 0 to 3"
    ):
        collect(model, random_text(4, 16))


class _Batches:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, int | None]] = []
        self.inside = False

    def __enter__(self) -> _Batches:
        self.inside = True
        return self

    def __exit__(self, *_: object) -> None:
        self.inside = False

    def batch(self, rows: slice, real_rows: Tensor | None) -> None:
        assert self.inside
        self.told.append((rows.start, rows.stop, None if real_rows is None else int(real_rows.sum())))


def test_observers_are_told_of_every_batch(make_tiny_model: Callable[..., Any]) -> None:
    model, text = make_tiny_model("llama"), random_text(72, 16)
    text.padding[33, 10:] = True
    text.scored[33, 10:] = False
    watcher = _Batches()
    sites = [site for site in find_sites(model) if site.role not in ("embedding", "lm_head")]
    calibrate(model, sites, text, seed=0, stage=NoStage(), observers=[watcher])
    assert watcher.told == [(0, 32, None), (32, 64, 32 * 16 - 6), (64, 72, None)]
    assert not watcher.inside


class _SumOfLogits(Tokens):
    """An output whose log-likelihood is a plain sum of logits, so that its gradient at the logits is one."""

    def log_likelihood(self, model: Any, ids: Tensor, scored: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
        return model(input_ids=ids, use_cache=False).logits.sum(), 7


def test_the_output_says_what_is_differentiated(make_tiny_model: Callable[..., Any]) -> None:
    """Against autograd of the same scalar."""
    model, text = make_tiny_model("llama"), random_text(4, 16)
    sites = [site for site in find_sites(model) if site.role not in ("embedding", "lm_head")]
    found = calibrate(model, sites, text, seed=0, stage=NoStage(), output=_SumOfLogits())
    assert found.num_scored == 7
    weight = model.model.layers[1].mlp.down_proj.weight.requires_grad_(True)
    (expected,) = torch.autograd.grad(model(input_ids=text.input_ids, use_cache=False).logits.sum(), weight)
    weight.requires_grad_(False)
    statistics = found.matrices["model.layers.1.mlp.down_proj.weight"]
    formed = statistics.g_TN.float().T @ statistics.inputs.x_TK.float()
    torch.testing.assert_close(formed, expected, rtol=0.02, atol=float(0.01 * expected.abs().max()))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """100,000 draws from each of two distributions: within four standard deviations; what has no chance, never."""
    p_TV = torch.tensor([[0.5, 0.0, 0.3, 0.2, 0.0], [0.0, 1e-6, 0.0, 1 - 1e-6, 0.0]])
    drawn = draw(p_TV.log().repeat(100_000, 1), torch.Generator().manual_seed(0)).reshape(-1, 2)
    for p_V, of_row in zip(p_TV, drawn.T, strict=True):
        counts = torch.bincount(of_row, minlength=5)
        assert bool(((counts - 1e5 * p_V).abs() <= 4 * (1e5 * p_V * (1 - p_V)).sqrt() + (p_V > 0)).all())


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_of_a_long_text_the_beginning_has_gradients(
    make_tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """The same inputs as with all gradients, and of those the first; an expert has both of the tokens that reach it."""
    model, text = make_tiny_model(architecture), random_text(80, 16)
    full = collect(model, text, include_head=True)
    monkeypatch.setattr("bitwright.search.calibrate.GRADIENT_TOKENS", 500)  # 32 sequences of 16
    found = collect(model, text, include_head=True)
    assert found.num_scored == 32 * 15 and full.num_scored == 80 * 15
    assert found.matrices.keys() == full.matrices.keys()
    for name, statistics in found.matrices.items():
        known = full.matrices[name]
        assert torch.equal(statistics.inputs.x_TK, known.inputs.x_TK)
        assert torch.equal(statistics.g_TN, known.g_TN[: len(statistics.g_TN)])
        assert len(statistics.g_TN) == 32 * 16 or "experts" in name
        assert 0 < len(statistics.g_TN) < len(known.g_TN)
        assert int(statistics.inputs.unrounded_rows.max()) < len(statistics.g_TN)
    for embedding in found.embeddings.values():
        assert torch.equal(embedding.ids_T, text.input_ids[:32].reshape(-1))
        assert len(embedding.g_TH) == len(embedding.ids_T)


def test_the_rest_of_a_long_text_needs_no_predictions(
    make_tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is asked for every token of the beginning, and for one of each sequence after it."""
    model, asked = make_tiny_model("llama"), []
    model.lm_head.register_forward_hook(lambda _, inputs, __: asked.append(inputs[0].shape[:2].numel()))
    monkeypatch.setattr("bitwright.search.calibrate.GRADIENT_TOKENS", 500)
    found = collect(model, random_text(80, 16), include_head=True)
    assert asked == [512, 32, 16]
    assert all(len(x_RH) == 512 for x_RH in found.heads.values())


def test_the_rest_of_a_long_text_is_checked_as_the_beginning_is(
    make_tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that is not the last of its sequence reaches no prediction that is made, and is found all the same."""
    monkeypatch.setattr("bitwright.search.calibrate.GRADIENT_TOKENS", 500)
    model, text = make_tiny_model("llama"), random_text(80, 16, vocabulary=200)
    text.input_ids[70, 3] = 250
    model.model.embed_tokens.weight[250] = torch.inf
    with pytest.raises(ModelError, match=r"input of model\.layers\.0\.self_attn\.q_proj\.weight .* 64 to 79"):
        collect(model, text)


def test_padded_texts_have_all_gradients(make_tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitwright.search.calibrate.GRADIENT_TOKENS", 16)
    text = random_text(6, 16)
    text.padding[5, 10:] = True
    text.scored[5, 10:] = False
    assert collect(make_tiny_model("llama"), text).num_scored == 5 * 15 + 9
