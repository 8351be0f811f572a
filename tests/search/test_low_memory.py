"""Low memory changes where things lie, and nothing else: same statistics, same plan, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_search import NoStage, random_text, search_options
from torch import nn

from bitwright.errors import DataError, ModelError
from bitwright.models import find_sites
from bitwright.models.loaded import LoadedModel
from bitwright.models.spool import OnDisk, Spool
from bitwright.plan import Budget
from bitwright.search import learn as learn_module
from bitwright.search.calibrate import calibrate
from bitwright.search.compare import run_reference
from bitwright.search.optimize import optimize
from bitwright.search.outputs.tokens import Tokens
from bitwright.search.stored_arrays import StoredArrays, write_arrays
from bitwright.search.verify import bf16_floor

#: One rounding by error feedback, one without data.
CHOICES = {"schemes": ("int4_g32", "int8_w"), "roundings": ("rtn", "gradient_aware"), "include_head": True}


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_statistics_are_the_same(make_tiny_model: Callable[..., Any], tmp_path: Path, architecture: str) -> None:
    """Several passes; experts get rows of their own number in each."""
    model, text = make_tiny_model(architecture), random_text(40, 16)
    sites = find_sites(model)
    held = calibrate(model, sites, text, seed=0, stage=NoStage())
    with Spool(tmp_path) as spool:
        spooled = calibrate(model, sites, text, seed=0, stage=NoStage(), spool=spool)
        assert list(spooled.matrices) == list(held.matrices)
        for name, expected in held.matrices.items():
            found = spooled.matrices[name]
            assert torch.equal(found.g_TN, expected.g_TN) and torch.equal(found.inputs.x_TK, expected.inputs.x_TK)
            assert torch.equal(found.inputs.unrounded_RK, expected.inputs.unrounded_RK)
            assert torch.equal(found.inputs.unrounded_rows, expected.inputs.unrounded_rows)
        for name, embedding in held.embeddings.items():
            assert torch.equal(spooled.embeddings[name].g_TH, embedding.g_TH)
        layer = "model.layers.1.self_attn"
        q, k = (spooled.matrices[f"{layer}.{part}_proj.weight"].inputs for part in "qk")
        assert q is k  # read once for both
    assert list(tmp_path.iterdir()) == []


def test_a_gradient_that_is_not_finite_is_named(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = make_tiny_model("llama")
    module = model.model.layers[0].post_attention_layernorm
    module.register_full_backward_hook(lambda *_: (torch.full((4, 16, 64), torch.nan),))
    with (
        Spool(tmp_path) as spool,
        pytest.raises(ModelError, match=r"gradient at model\.layers\.0\.self_attn\.o_proj\.weight"),
    ):
        calibrate(model, find_sites(model), random_text(4, 16), seed=0, stage=NoStage(), spool=spool)


@pytest.mark.parametrize(("architecture", "keeps"), [("qwen2", True), ("gemma", False)])
def test_the_plan_is_the_same(
    load_tiny: Callable[..., LoadedModel], prose: Path, tmp_path: Path, architecture: str, keeps: bool
) -> None:
    """Also where nothing is cached, and where a second budget starts from the cache."""
    caches = [tmp_path / "held", tmp_path / "spooled"] if keeps else [None, None]
    for budget in (Budget(effective_bits=5.5), Budget(max_kl=0.01)) if keeps else (Budget(effective_bits=5.5),):
        held = optimize(load_tiny(architecture), budget=budget, **search_options(prose, cache=caches[0], **CHOICES))
        loaded = load_tiny(architecture)
        before = {name: parameter.clone() for name, parameter in loaded.model.named_parameters()}
        spooled = optimize(
            loaded,
            budget=budget,
            low_memory=True,
            spool=tmp_path / "disk",
            **search_options(prose, cache=caches[1], **CHOICES),
        )
        assert spooled.to_json() == held.to_json() and spooled.content_hash == held.content_hash
        assert spooled.tensors.keys() == held.tensors.keys() and spooled.tensors
        assert all(np.array_equal(spooled.tensors[name], held.tensors[name]) for name in held.tensors)
        for name, parameter in loaded.model.named_parameters():
            assert torch.equal(parameter, before[name]), name
    assert list((tmp_path / "disk").iterdir()) == []


def test_nothing_is_left_where_a_search_breaks_off(
    load_tiny: Callable[..., LoadedModel], prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(learn_module, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimize(load_tiny("llama"), low_memory=True, spool=tmp_path / "disk", **search_options(prose))
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_told(
    load_tiny: Callable[..., LoadedModel], prose: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot spool to '.*file'"):
        optimize(load_tiny("llama"), low_memory=True, spool=tmp_path / "file", **search_options(prose))


class _Scaled(nn.Module):
    """A model whose logits are more than its head's output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.lm_head

    def forward(self, **inputs: Any) -> Any:
        found = self.inner(**inputs)
        found.logits = 3 * found.logits.tanh()
        return found


def test_logits_that_are_more_than_the_heads_output_lie_on_disk(
    make_tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Several batches of 1,024 tokens, compared as a whole and in part."""
    model, text, output = _Scaled(make_tiny_model("llama")).eval(), random_text(70, 32), Tokens()
    held = run_reference(model, text, NoStage())
    with Spool(tmp_path) as spool:
        spooled = run_reference(model, text, NoStage(), spool=spool)
        assert held.model is not None and spooled.model is None and spooled.kept is None
        changed = make_tiny_model("llama", seed=1)
        for count in (None, 40, 3):
            first, second = (output.compare(r, changed, NoStage(), count) for r in (held, spooled))
            assert first.kl.shape == ((count or 70),) and (first.kl > 0).all()
            assert np.array_equal(first.kl, second.kl) and np.array_equal(first.nll_plan, second.nll_plan)


def test_the_bf16_floor_leaves_the_model_as_it_was(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    """Against a copy in bf16; buffers come back too."""
    model, text, output = make_tiny_model("llama"), random_text(6, 16), Tokens()
    before = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    reference = output.run_reference(model, text, NoStage())
    half = make_tiny_model("llama").to(torch.bfloat16)
    expected = output.compare(reference, half, NoStage()).mean_kl
    with Spool(tmp_path) as spool:
        for originals in (None, OnDisk(spool)):
            assert bf16_floor(model, output, reference, NoStage(), originals) == expected > 0
            after = dict((*model.named_parameters(), *model.named_buffers()))
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
            assert {tensor.dtype for tensor in after.values()} == {torch.float32}


def test_stored_arrays_are_a_safetensors_file(tmp_path: Path) -> None:
    """The library reads what we write; we read what it writes."""
    from safetensors.numpy import load_file, save_file

    arrays = {
        "site/codes": np.arange(12, dtype=np.uint8).reshape(3, 4)[:, :3],
        "site/scales": np.linspace(0, 1, 4, dtype=np.float16),
        "site/tensor_scale": np.array(0.25, np.float32),
        "site/signs": np.array([1, -1], np.int8),
        "other/codes": np.empty((0, 2), np.uint8),
    }
    with (tmp_path / "ours").open("wb") as file:
        write_arrays(file, arrays)
    save_file({name: array.copy(order="C") for name, array in arrays.items()}, tmp_path / "theirs")
    for found in (load_file(tmp_path / "ours"), StoredArrays(tmp_path / "ours"), StoredArrays(tmp_path / "theirs")):
        assert found.keys() == arrays.keys() and len(found) == 5 and "none" not in found
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            assert np.array_equal(found[name], array)


def test_arrays_of_other_types_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.ones(2, np.int64)}, tmp_path / "file")
    with pytest.raises(ModelError, match="holds I64"):
        StoredArrays(tmp_path / "file")
