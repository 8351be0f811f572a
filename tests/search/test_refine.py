"""Refined codes on tiny models: found for every site in question, kept only where they help, run as a plan runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_search import NoStage, random_text, search_options

from bitwright.errors import DataError
from bitwright.models import find_sites, site_weight
from bitwright.models.loaded import LoadedModel
from bitwright.quantize import SCHEMES, QTensor
from bitwright.search.calibrate import calibrate
from bitwright.search.optimize import optimize, verify
from bitwright.search.outputs.tokens import Tokens
from bitwright.search.refine_flow import find_in_flow

INT4 = SCHEMES["int4_g32"].weights
assert INT4 is not None


def decoder_sites(model: Any) -> list[Any]:
    return [site for site in find_sites(model) if site.role not in ("embedding", "lm_head", "router")]


def flow_through(model: Any) -> dict[str, QTensor]:
    sites, text = decoder_sites(model), random_text(8, 64)
    statistics = calibrate(model, sites, text, seed=0, stage=NoStage())
    return find_in_flow(model, sites, {s.name: INT4 for s in sites}, text, statistics, Tokens(), NoStage())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3"])
def test_every_matrix_is_found_and_the_model_stays(make_tiny_model: Callable[..., Any], architecture: str) -> None:
    model = make_tiny_model(architecture)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = flow_through(model)
    sites = decoder_sites(model)
    assert set(found) == {site.name for site in sites}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for site in sites:
        values, weight = found[site.name].dequantize(), site_weight(model, site)
        assert values.dtype == torch.float32
        assert float((values - weight).norm() / weight.norm()) < 0.3


def test_experts_keep_their_codes(make_tiny_model: Callable[..., Any]) -> None:
    found = flow_through(make_tiny_model("mixtral"))
    assert found
    assert not any("experts" in name for name in found)


def test_a_plan_says_what_refining_gained_and_runs_it(prose: Path, load_tiny: Callable[..., LoadedModel]) -> None:
    loaded = load_tiny("llama")
    plan = optimize(loaded, **search_options(prose, effort="high", schemes=("int4_g32",)))
    notes = [note for note in plan.notes if "repair text the KL is" in note]
    assert len(notes) == 1
    assert plan.calibration is not None and plan.calibration.tokens
    refined_on = int(notes[0].split(" tokens: on ")[0].split()[-1].replace(",", ""))
    assert plan.calibration.tokens < refined_on <= 4 * plan.calibration.tokens
    learned = [choice for choice in plan.sites if choice.rounding == "learned"]
    assert bool(learned) == ("were refined" in notes[0])
    for choice in learned:
        assert plan.tensors[f"{choice.name}/codes"].dtype == np.uint8
    assert plan.measured is not None
    again = verify(plan, model=loaded, evaluation=prose)
    assert again.kl.mean == pytest.approx(plan.measured.kl.mean, abs=1e-9)


def test_a_disk_without_room_is_refused_before_any_work(
    prose: Path, load_tiny: Callable[..., LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kibibyte is free, in a folder that is not there yet."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1024))
    monkeypatch.setattr("bitwright.search.optimize.learn_scores", None)
    with pytest.raises(DataError, match=r"--effort high keeps up to .* 0\.0 GiB are free; name a folder .* --spool"):
        optimize(load_tiny("llama"), **search_options(prose, effort="high", spool=tmp_path / "not" / "there"))
