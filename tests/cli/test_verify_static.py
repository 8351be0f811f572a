"""verify --static on a tiny model folder: what fits, what does not, and a plan with scales found anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_plans import uniform_plan

from bitwright.cli import main
from bitwright.models import find_sites, load
from bitwright.plan import ModelInfo, Run, load_plan, write_plan

SITE = "model.layers.0.mlp.up_proj"


@pytest.fixture
def plan(make_tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan whose scales reach 8.96; texts in one file."""
    folder = make_tiny_folder("llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    loaded = load(folder)
    plan = uniform_plan(find_sites(loaded.model), "fp8_static")
    info = ModelInfo(name=loaded.name, hash=loaded.hash, params=loaded.num_parameters)
    plan = plan.replace(model=info).attach(run=Run(paths={"model": str(folder)}))
    texts = [f"Text {n}. " + " ".join(f"{(n * 31 + k * k) % 97} of {k}" for k in range(30)) for n in range(12)]
    Path("texts.txt").write_text("\n\n".join(texts), encoding="utf-8")
    return write_plan(plan, tmp_path / "plan")


def test_scales_are_found_by_a_rule_and_held_against_the_fourth_prompt(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", "plan", "--static", "texts.txt", "--rule", "percentile", "--percentile", "100"]
    assert main([*arguments, "--out", "new"]) in (0, 3)
    out = " ".join(capsys.readouterr().out.split())
    assert "static scales of 14 sites are by percentile 100 over" in out and "of 9 prompts" in out
    old, new = load_plan(plan), load_plan("new")
    assert new.sites == old.sites and f"{SITE}/calibrated_on" in new.tensors
    assert float(new.tensors[f"{SITE}/input_scale"]) == float(new.tensors[f"{SITE}/calibrated_amax"][0] / 448)
    assert main(["verify", "new", "--static", "texts.txt", "--json"]) in (0, 3)
    found = json.loads(capsys.readouterr().out)
    assert found["num_sites"] == 14
    assert {finding["what"] for finding in found["findings"]} <= {"beyond the range"}


def test_scales_that_do_not_fit_are_told_and_do_not_run(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = load_plan(plan)
    small = held.attach(tensors={**held.tensors, f"{SITE}/input_scale": np.float32(1e-4).reshape(())})
    write_plan(small, "small")
    assert main(["verify", "small", "--static", "texts.txt", "--tokens", "200"]) == 3
    out = capsys.readouterr().out
    assert SITE in out and "beyond the range" in out and "of 14 static sites do not fit" in out
    assert "200 tokens" in out
    unset = held.attach(tensors={**held.tensors, f"{SITE}/input_scale": np.ones((), np.float32)})
    write_plan(unset, "unset")
    assert main(["run", "unset", "--prompt", "Hello"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert f"the static scales of 1 of 14 sites do not fit (never set): {SITE}: its scale is 1.0" in err
    assert "loading" not in err
    assert main(["export", "unset", "--to", "safetensors-dequantized", "--out", "exported"]) == 2
    assert "its scale is 1.0" in capsys.readouterr().err and not Path("exported").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "mse"], "say on which prompts with --static PROMPTS"),
        (["--static", "texts.txt", "--rule", "mse"], "give both --rule and --out, or neither"),
        (["--static", "texts.txt", "--tasks", "x"], "ask for one at a time"),
        (["--static", "none.txt"], "none.txt"),
        (["--static", "texts.txt", "--rule", "max", "--out", "new"], "no rule 'max' for static scales"),
        (["--static", "texts.txt", "--rule", "mse", "--out", "new", "--tokens", "9"], "has 1 prompt, and every 4th"),
        (["--static", "texts.txt", "--rule", "mse", "--out", "texts.txt"], "is a file, and a plan is a folder"),
    ],
)
def test_what_makes_no_sense_is_refused(
    plan: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "plan", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("new").exists()
