"""Packed models: what they compute is what emulation computes, in memory as small as the plan says."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small_plans import choice, plan_of, uniform_plan
from torch import Tensor, nn
from value_models import make_value_model

from bitwright.errors import ModelError, PlanError, SchemeError, UnknownName
from bitwright.inference import apply
from bitwright.inference.packed.model import plain_copy
from bitwright.inference.packed.modules import PackedEmbedding, PackedLinear, PackedOperand
from bitwright.inference.packed.weight import PackedWeight
from bitwright.models import LoadedModel, find_sites, from_memory, site_weight
from bitwright.quantize import SCHEMES, fake_quantize

IDS = torch.arange(44).reshape(2, 22) * 7 % 256
#: Of fp32 sums in another order, relative to the largest logit.
FP32_TOLERANCE = 1e-5


def logits_of(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found.float()


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest one, in units of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("architecture", "scheme", "part", "ends"),
    [
        ("llama", "int4_g32", None, True),
        ("llama", "int4_g32", "signs", False),
        ("gemma2", "int8_w", "column_scales", True),
        ("phi3", "int4_g32_zp", None, False),
        ("gpt2", "fp8_w", None, True),
        ("mixtral", "int4_g32_min", None, True),
        ("gpt_oss", "int8_w", "signs", True),
    ],
)
def test_a_packed_model_computes_what_emulation_does(
    architecture: str, scheme: str, part: str | None, ends: bool
) -> None:
    """Fused rows, tied heads, Conv1D, experts, routers, and changes of inputs that only weights were rounded under."""
    model = make_value_model(architecture)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = uniform_plan(find_sites(model), scheme, part, ends=ends)
    expected = logits_of(apply(plan, model))
    planned: Any = apply(plan, model, mode="packed", dtype=torch.float32)
    assert difference(logits_of(planned), expected) < FP32_TOLERANCE
    assert type(planned) is type(model)
    assert not planned.bitwright_run.counters.expansions
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    packed = [module for module in planned.modules() if isinstance(module, PackedWeight)]
    assert sum(len(module.rows) for module in packed) == len([s for s in plan.sites if s.scheme == scheme])


@pytest.mark.parametrize("scheme", ["int8", "int8_static", "fp8", "nvfp4"])
@pytest.mark.parametrize("mode", ["packed", "auto"])
def test_the_device_s_own_products_are_taken_where_they_may_be(
    make_tiny_model: Callable[..., Any], scheme: str, mode: str
) -> None:
    model = make_tiny_model("llama")
    planned: Any = apply(uniform_plan(find_sites(model), scheme, ends=True), model, mode=mode, dtype=torch.float32)
    kinds = {site.kernel for site in planned.bitwright_run.sites}
    assert (kinds == {"torch._int_mm"}) == (mode == "auto" and scheme in ("int8", "int8_static"))


SCHEME_NAMES = [name for name, scheme in SCHEMES.items() if scheme.weights is not None]


def seen_at_matrices(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Linear layer → what went in and came out, of one pass."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda _, args, y, name=name: seen.update({name: (args[0], y)}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    logits_of(model)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_whole_models_and_each_of_their_matrices_under_every_scheme(
    make_tiny_model: Callable[..., Any], scheme: str
) -> None:
    """On the inputs that emulation has at a matrix, rounded or not, outputs differ by the order of an fp32 sum alone.

    A sum of K products is off by K · 2⁻²⁴ · Σ |x| |w| at most in either order. Logits of whole models differ by that
    where inputs are not rounded; where they are, by what the roundings that it tips make of it, too.
    """
    model = make_tiny_model("llama")
    plan = uniform_plan(find_sites(model), scheme, ends=True)
    emulated: Any = apply(plan, model)
    seen, expected, plain = seen_at_matrices(emulated), logits_of(emulated), logits_of(model)
    assert len(seen) == 15
    for mode in ("packed", "auto"):
        planned: Any = apply(plan, model, mode=mode, dtype=torch.float32, fallback=None)
        for name, (x, y) in seen.items():
            weight = emulated.get_submodule(name).weight
            slack = 4 * weight.shape[1] * 2.0**-24 * (x.abs() @ weight.abs().T)
            assert ((planned.get_submodule(name)(x) - y).abs() <= slack + 1e-7).all(), f"{name} in mode {mode}"
        found = logits_of(planned)
        if SCHEMES[scheme].activations is None:
            assert difference(found, expected) < FP32_TOLERANCE
        else:
            share = 0.2 if scheme == "fp16" else 0.02
            assert float((found - expected).abs().mean()) < share * float((plain - expected).abs().mean()) + 1e-6


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("scheme_name", SCHEME_NAMES)
def test_one_matrix_under_every_scheme(scheme_name: str, tokens: int) -> None:
    """On the same inputs in bf16, packed and exact products differ by a rounding to bf16 and the order of a sum.

    A rounding to bf16 moves y by 2⁻⁹ |y| at most, fp32 sums of 96 products by 96 · 2⁻²⁴ · Σ |x| |w| each way.
    """
    torch.manual_seed(0)
    linear = nn.Linear(96, 80, bias=False).requires_grad_(False)
    model = nn.Sequential(linear)
    plan = uniform_plan(find_sites(model), scheme_name)
    x = torch.randn(tokens, 96).bfloat16()
    emulated, packed = apply(plan, model), apply(plan, model, mode="packed", dtype=torch.bfloat16, fallback=None)
    exact = emulated(x.float())
    found = packed(x)
    assert found.dtype == torch.bfloat16
    scheme = SCHEMES[scheme_name]
    assert scheme.weights is not None
    weight = fake_quantize(linear.weight, scheme.weights).abs()
    slack = 2 * 96 * 2.0**-24 * (x.float().abs() @ weight.T)
    assert ((found.float() - exact).abs() <= 2.0**-8 * exact.abs() + 4 * slack).all()


def test_a_model_in_bf16_is_as_near_as_bf16_itself() -> None:
    """End to end, packed codes in a bf16 model stray from emulation as much as those values in a bf16 model do."""
    model = make_value_model("llama")
    plan = uniform_plan(find_sites(model), "int4_g32", ends=True)
    emulated = apply(plan, model)
    exact = logits_of(emulated)
    packed = logits_of(apply(plan, model, mode="packed", dtype=torch.bfloat16))
    plain = logits_of(plain_copy(emulated, torch.bfloat16))
    strayed, floor = (packed - exact).square().mean().sqrt(), (plain - exact).square().mean().sqrt()
    assert strayed < 1.2 * floor


def wide_model() -> LoadedModel:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    return from_memory(model, None, name="wide")


@pytest.mark.parametrize("schemes", [("int4_g32", "int8"), ("fp8_w", "fp6_w"), ("mxfp4", "nvfp4")])
def test_weights_take_the_plan_s_bytes(schemes: tuple[str, str]) -> None:
    loaded = wide_model()
    sites = find_sites(loaded.model)
    choices = []
    for index, site in enumerate(sites):
        weights = SCHEMES[schemes[index % 2]].weights
        assert weights is not None
        choices.append(choice(site, schemes[index % 2], bytes=weights.stored_bytes(*site.shape)))
    others = sum(2 * p.numel() for name, p in loaded.model.named_parameters() if "norm" in name)
    planned: Any = apply(plan_of(choices), loaded, mode="auto")
    run = planned.bitwright_run
    expected = sum(entry.bytes for entry in choices) + others
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of_weights(planned)}
    assert abs(sum(held.values()) - expected) < 0.01 * expected
    assert run.weight_bytes == sum(held.values())
    assert planned.dtype == torch.bfloat16 and "the checkpoint is in bf16" in run.dtype_reason


def tensors_of_weights(planned: nn.Module) -> list[Tensor]:
    return [*planned.parameters(), *(b for name, b in planned.named_buffers() if "rows." in name)]


def test_never_two_copies_of_all_weights() -> None:
    """While a copy is made, only packed codes and the values of a few matrices live beside the original."""
    loaded = wide_model()
    plan = uniform_plan(find_sites(loaded.model), "int4_g32", ends=True)
    largest = max(p.numel() for p in loaded.model.parameters()) * 4
    before, peak = live_bytes(), 0
    original = PackedWeight.__init__

    def watching(self: Any, *arguments: Any, **named: Any) -> None:
        nonlocal peak
        original(self, *arguments, **named)
        peak = max(peak, live_bytes() - before)

    PackedWeight.__init__ = watching  # type: ignore[method-assign]
    try:
        planned: Any = apply(plan, loaded, mode="packed")
    finally:
        PackedWeight.__init__ = original  # type: ignore[method-assign]
    assert peak < planned.bitwright_run.weight_bytes + 3 * largest
    assert peak < 0.7 * 4 * sum(p.numel() for p in loaded.model.parameters())


def live_bytes() -> int:
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_a_packed_model_is_a_model_like_any_other(make_tiny_model: Callable[..., Any], tmp_path: Any) -> None:
    """It is copied, saved and loaded, cast, and compiled, and computes the same."""
    model = make_tiny_model("llama")
    plan = uniform_plan(find_sites(model), "int4_g32", ends=True)
    planned: Any = apply(plan, model, mode="packed", dtype=torch.float32)
    expected = logits_of(planned)
    assert torch.equal(logits_of(copy.deepcopy(planned)), expected)
    torch.save(planned.state_dict(), tmp_path / "weights.pt")
    other: Any = apply(
        uniform_plan(find_sites(model), "int4_g32", ends=True), make_tiny_model("llama", 1), mode="packed"
    )
    other = other.to(torch.float32)
    assert not torch.equal(logits_of(other), expected)
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert difference(logits_of(other), expected) < FP32_TOLERANCE
    half = copy.deepcopy(planned).to(torch.bfloat16)
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(half.named_buffers(), planned.named_buffers(), strict=True)
        if "rows" in _
    )
    compiled = torch.compile(planned, backend="eager")
    assert difference(logits_of(compiled), expected) < FP32_TOLERANCE


def test_a_compiler_sees_one_operator_and_its_gradient(make_tiny_model: Callable[..., Any]) -> None:
    plan = uniform_plan(find_sites(make_tiny_model("llama")), "int4_g32")
    planned: Any = apply(plan, make_tiny_model("llama"), mode="packed", dtype=torch.float32)
    whole = torch.compile(planned, backend="eager", fullgraph=True)
    assert difference(logits_of(whole), logits_of(planned)) < FP32_TOLERANCE
    layer = planned.model.layers[0].mlp.up_proj
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, again = (torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    layer(x).square().sum().backward()
    compiled(again).square().sum().backward()
    torch.testing.assert_close(again.grad, x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's own compiler needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, while it imports its compiler
@pytest.mark.parametrize(("scheme", "mode"), [("int4_g32", "packed"), ("fp8", "packed"), ("fp8", "emulate")])
def test_torch_compile_with_its_own_backend(make_tiny_model: Callable[..., Any], scheme: str, mode: str) -> None:
    plan = uniform_plan(find_sites(make_tiny_model("llama")), scheme)
    planned: Any = apply(plan, make_tiny_model("llama"), mode=mode, dtype=torch.float32)
    compiled = torch.compile(planned, fullgraph=scheme == "int4_g32")
    assert difference(logits_of(compiled), logits_of(planned)) < FP32_TOLERANCE


@pytest.mark.parametrize("scheme", ["int8_w", "int4_g32_zp", "int4_g32_min", "fp8_block", "fp6_w", "mxfp4", "nvfp4"])
def test_rows_are_read_without_the_others(make_tiny_model: Callable[..., Any], scheme: str) -> None:
    """Of a table of 260 rows, whose last tile is not full."""
    model = make_tiny_model("qwen2")
    table = model.get_input_embeddings().weight
    plan = uniform_plan(find_sites(model), scheme, ends=True)
    packed = apply(plan, model, mode="packed", dtype=torch.float32).get_input_embeddings()  # type: ignore[operator]
    weights = SCHEMES[scheme].weights
    assert weights is not None and isinstance(packed, PackedEmbedding)
    expected = fake_quantize(table, weights)
    for ids in (torch.tensor([[259, 0, 64], [63, 259, 127]]), torch.tensor([5]), torch.zeros(2, 0, dtype=torch.long)):
        assert torch.equal(packed(ids), expected[ids])


def test_other_codes_in_the_place_of_codes_are_what_runs(make_tiny_model: Callable[..., Any]) -> None:
    """What is settled before the first call follows tensors that are replaced, in every way that torch has."""
    model = make_tiny_model("llama")
    plan = uniform_plan(find_sites(model), "int4_g32")
    layer, other = (
        apply(plan, make_tiny_model("llama", seed), mode="packed").get_submodule("model.layers.0.mlp.up_proj")
        for seed in (0, 1)
    )
    x = torch.randn(1, 64).bfloat16()
    own, wanted = layer(x), other(x)
    assert not torch.equal(own, wanted)
    copied = copy.deepcopy(layer)
    copied.load_state_dict(other.state_dict())
    assert torch.equal(copied(x), wanted) and torch.equal(layer(x), own)
    copied = copy.deepcopy(layer)
    copied.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(copied(x), wanted) and torch.equal(layer(x), own)
    copied = copy.deepcopy(layer)
    for name, part in other.named_buffers():
        module, _, own_name = name.rpartition(".")
        setattr(copied.get_submodule(module), own_name, part)
    assert torch.equal(copied(x), wanted)
    copied = pickle.loads(pickle.dumps(layer))
    assert torch.equal(copied(x), own)


def test_a_packed_layer_can_be_wrapped_and_trained_beside(make_tiny_model: Callable[..., Any]) -> None:
    """As PEFT does: a module takes a layer's place, calls it, and adds what it learns. Gradients pass the codes."""

    class WithAdapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = make_tiny_model("llama")
    plan = uniform_plan(find_sites(model), "int8_w")
    gradients = []
    for mode in ("emulate", "packed"):
        planned: Any = apply(plan, model, mode=mode, dtype=torch.float32)
        layer = planned.model.layers[0].self_attn
        assert isinstance(layer.q_proj, nn.Linear)
        torch.manual_seed(0)
        layer.q_proj = adapter = WithAdapter(layer.q_proj)
        planned(input_ids=IDS, labels=IDS).loss.backward()
        assert adapter.down.weight.grad is not None
        gradients.append(adapter.down.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-7)


# PEFT 0.21 asks transformers by a name that it has given up
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_trains_adapters_on_packed_layers(make_tiny_model: Callable[..., Any]) -> None:
    """The real one: adapters on layers that hold codes learn what they learn on their values; codes stay."""
    peft = pytest.importorskip("peft")
    model = make_tiny_model("llama")
    plan = uniform_plan(find_sites(model), "int4_g32")
    found: dict[str, tuple[Tensor, list[Tensor], Tensor]] = {}
    for mode in ("emulate", "packed"):
        planned: Any = apply(plan, model, mode=mode, dtype=torch.float32)
        torch.manual_seed(0)
        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(planned, settings)
        layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
        assert type(layer).__module__.startswith("peft.")
        codes = {name: buffer.clone() for name, buffer in layer.base_layer.named_buffers()}
        assert (mode == "packed") == isinstance(layer.base_layer, PackedLinear) == bool(codes)
        before = logits_of(adapted)
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        assert len(trained) == 2 * 3 * 2
        gradients = [parameter.grad.clone() for parameter in trained]
        torch.optim.SGD(trained, lr=1.0).step()
        found[mode] = (before, gradients, logits_of(adapted))
        assert all(torch.equal(codes[name], buffer) for name, buffer in layer.base_layer.named_buffers())
    for ours, expected in zip(found["packed"][1], found["emulate"][1], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-6)
    for at in (0, 2):
        assert difference(found["packed"][at], found["emulate"][at]) < 10 * FP32_TOLERANCE
    assert difference(found["packed"][2], found["packed"][0]) > 1e-3


def test_what_would_be_lost_is_refused(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    planned: Any = apply(uniform_plan(find_sites(model), "int8_w", ends=True), model, mode="packed")
    layer = planned.model.layers[0].mlp.up_proj
    assert isinstance(layer, PackedLinear) and tuple(layer.weight.shape) == (96, 64)
    expected = fake_quantize(model.model.layers[0].mlp.up_proj.weight, SCHEMES["int8_w"].weights)  # type: ignore[arg-type]
    assert torch.equal(layer.weight.float(), expected.to(layer.weight.dtype).float())
    lost = partial(pytest.raises, ModelError, match="other values for them would be lost")
    with lost():
        layer.weight.add_(1.0)
    with lost():
        layer.weight.data += 1.0  # as an adapter is merged
    with lost():
        layer.weight[0] = 1.0
    with lost():
        layer.weight.detach().view(-1)[:4].zero_()
    with lost():
        torch.add(layer.weight, 1.0, out=layer.weight)
    with lost():
        layer.weight.data = layer.weight.data + 1.0
    assert type(layer.weight + 1) is Tensor and type(layer.weight.data.clone().add_(1.0)) is Tensor
    assert isinstance(planned.get_input_embeddings(), PackedEmbedding)
    with pytest.raises(ModelError, match="holds packed codes already"):
        apply(uniform_plan(find_sites(model), "int8_w"), planned, mode="packed", sites=find_sites(model))


def test_modes_and_what_they_refuse(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    sites = find_sites(model)
    mixed = plan_of([choice(site, "int8" if "mlp" in site.role else "fp8") for site in sites[:-2]])
    with pytest.raises(UnknownName, match=r"unknown mode 'fast'.*Known modes: emulate, packed, native, auto"):
        apply(mixed, model, mode="fast")
    with pytest.raises(PlanError, match=r"8 of 14 sites.*self_attn.q_proj \(fp8: .*and 5 more; run it with mode auto"):
        apply(mixed, model, mode="native")
    planned: Any = apply(mixed, model, mode="auto")
    runs = {site.name: site for site in planned.bitwright_run.sites}
    assert runs["model.layers.0.mlp.up_proj"].kernel == "torch._int_mm"
    assert "not native: torch._int_mm takes weights in int8, not in fp8_e4m3" in runs[sites[0].name].reason
    table = planned.bitwright_run.table()
    assert "mlp.down" in table and "torch._int_mm: INT8 codes times INT8 codes" in table and "computes in bf16" in table
    roles = [line.split()[0] for line in table.splitlines()[1:] if re.match(r"(attn|mlp)\.", line)]
    assert roles == sorted(roles, key=roles.index) and len(roles) == len(set(roles))
    passed_over = [line for line in table.splitlines() if line.startswith("not ")]
    assert len(passed_over) == len(set(passed_over)) > 0
    assert sum(line.count("torch._int_mm takes weights in int8, not in fp8_e4m3") for line in table.splitlines()) == 1
    native: Any = apply(uniform_plan(sites, "int8"), model, mode="native", dtype=torch.float32)
    assert {s.kernel for s in native.bitwright_run.sites if s.scheme == "int8"} == {"torch._int_mm"}


@pytest.mark.parametrize(("scheme", "kernel"), [("int4:g32:bf16", "torch_int4"), ("int8:row:bf16", "torch_int8")])
def test_native_is_torchs_packed_operators_where_inputs_stay_numbers(
    make_tiny_model: Callable[..., Any], scheme: str, kernel: str
) -> None:
    model = make_tiny_model("llama")
    plan = uniform_plan(find_sites(model), scheme)
    native: Any = apply(plan, model, mode="native", dtype=torch.bfloat16)
    assert {site.kernel for site in native.bitwright_run.sites if site.scheme == scheme} == {kernel}
    # both round each output once to bf16, after sums in another order
    packed: Any = apply(plan, model, mode="packed", dtype=torch.bfloat16)
    assert difference(logits_of(native), logits_of(packed)) < 0.02
    auto: Any = apply(plan, model, dtype=torch.bfloat16, mode="auto")
    runs = [site for site in auto.bitwright_run.sites if site.scheme == scheme]
    assert {site.kernel for site in runs} == {"planar"}
    assert all(f"not native: {kernel} would do, with more bytes" in site.reason for site in runs)
    with pytest.raises(PlanError, match=r"14 of 14 sites.*in float32 it is a loop.*run it with mode auto"):
        apply(plan, model, mode="native", dtype=torch.float32)


def test_functions_that_are_no_products_are_counted(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("mixtral")
    planned: Any = apply(uniform_plan(find_sites(model), "int8_w"), model, mode="packed", dtype=torch.float32)
    experts = planned.model.layers[0].mlp.experts
    operand = experts.gate_up_proj
    assert isinstance(operand, PackedOperand) and operand.shape == (4, 192, 64) and operand.dtype == torch.float32
    x = torch.randn(3, 64)
    expected = torch.einsum("tk,enk->etn", x, operand.values())
    assert torch.equal(torch.einsum("tk,enk->etn", x, operand), expected)
    assert sum(planned.bitwright_run.counters.expansions.values()) == 1
    assert planned.bitwright_run.counters.metrics()["expansions"] == 1


def test_a_site_s_own_codes_are_what_runs(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("phi3")
    sites = find_sites(model)
    planned: Any = apply(uniform_plan(sites, "int4_g32", "column_scales"), model, mode="packed", dtype=torch.float32)
    emulated: Any = apply(uniform_plan(sites, "int4_g32", "column_scales"), model)
    fused = planned.model.layers[1].self_attn.qkv_proj.packed
    values = emulated.model.layers[1].self_attn.qkv_proj.weight
    torch.testing.assert_close(fused.values(), values, rtol=1e-5, atol=1e-6)
    ids = torch.tensor([[3, 5]])
    torch.testing.assert_close(fused.lookup(ids), values[ids], rtol=1e-5, atol=1e-6)


def test_a_device_that_the_codes_were_not_packed_for_is_told(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    planned: Any = apply(uniform_plan(find_sites(model), "int8_w"), model, mode="packed")
    layer = planned.model.layers[0].mlp.up_proj
    with pytest.raises(SchemeError, match="packed for cpu and meets inputs on meta"):
        layer(torch.empty(2, 64, device="meta"))


def test_programs_are_emulated(make_tiny_model: Callable[..., Any]) -> None:
    linear = nn.Sequential(nn.Linear(32, 32))
    program = torch.export.export(linear, (torch.randn(2, 32),))
    with pytest.raises(PlanError, match="a program is emulated, and mode 'packed'"):
        apply(uniform_plan(find_sites(linear), "int8_w"), program, mode="packed")  # type: ignore[call-overload]


def test_rows_that_no_choice_touches_stay(make_tiny_model: Callable[..., Any]) -> None:
    """Of a fused matrix a plan may leave some rows as loaded."""
    model = make_tiny_model("phi3")
    sites = [s for s in find_sites(model) if s.role == "mlp.up"]
    plan = plan_of([choice(site, "int4_g32", tied_group=None) for site in sites])
    planned: Any = apply(plan, model, mode="packed", dtype=torch.float32)
    rows = planned.model.layers[0].mlp.gate_up_proj.packed.rows
    assert [type(r.product).__name__ for r in rows] == ["PlainProduct", "PackedProduct"]
    assert torch.equal(rows[0].values(), site_weight(model, next(s for s in find_sites(model) if s.role == "mlp.gate")))
    assert difference(logits_of(planned), logits_of(apply(plan, model))) < FP32_TOLERANCE
