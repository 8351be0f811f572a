"""The folder of a run: what was refused leaves nothing behind, and what is somebody else's is left alone."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitwright.cli.train_run import _facts, say_summary
from bitwright.errors import TrainingError
from bitwright.training.checkpoints.random_state import seed_generators
from bitwright.training.fine_tuning.config import parse_config
from bitwright.training.fine_tuning.run_folder import RunFolder, open_run_folder
from bitwright.training.fine_tuning.trainer import train
from bitwright.training.fine_tuning.training_summary import TrainingSummary
from bitwright.training.fine_tuning.validation import ValidationLoss
from bitwright.training.optimizer.optimizers import make_optimizer

ASKED = {"policy": "bf16-mixed", "steps": 3}


def test_what_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    out = tmp_path / "run"
    config = parse_config(
        f'model = "none"\nout = "{out}"\nsteps = 3\n[data]\ntrain = "{tmp_path / "missing.txt"}"\n'
        "[optimizer]\nlr = 1e-3\n",
        "test.toml",
    )
    with pytest.raises(Exception, match=r"missing\.txt"):
        train(config)
    assert not out.exists()


def test_a_folder_without_a_step_is_begun_anew(tmp_path: Path) -> None:
    open_run_folder(str(tmp_path), {**ASKED, "policy": "bf16-mxied"}, resume=False)
    (tmp_path / "metrics.jsonl").write_text("")
    assert open_run_folder(str(tmp_path), ASKED, resume=False).resume_from is None
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(TrainingError, match="holds a run already"):
        open_run_folder(str(tmp_path), ASKED, resume=False)


def test_a_checkpoint_that_is_half_there_is_not_passed_over(tmp_path: Path) -> None:
    open_run_folder(str(tmp_path), ASKED, resume=False)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    with pytest.raises(TrainingError, match=r"step-000002/checkpoint\.json' is missing, so the checkpoint is damaged"):
        open_run_folder(str(tmp_path), ASKED, resume=True)


def test_checkpoints_are_sorted_by_their_number(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path, resume_from=None)
    steps = (999_998, 999_999, 1_000_000, 1_000_002)

    def there() -> set[str]:
        return {path.name for path in (tmp_path / "checkpoints").iterdir()}

    for step in steps:
        folder.checkpoint(step).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-best").mkdir()  # somebody else's
    assert folder.drop_checkpoints_after(1_000_002) == ()
    folder.drop_old_checkpoints(3)
    assert there() == {"step-999999", "step-1000000", "step-1000002", "step-best"}
    assert folder.drop_checkpoints_after(999_999) == ("step-1000000", "step-1000002")
    folder.drop_old_checkpoints(1)
    assert there() == {"step-999999", "step-best"}


def test_of_two_that_are_half_there_the_newest_is_named(tmp_path: Path) -> None:
    open_run_folder(str(tmp_path), ASKED, resume=False)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for step in (999_998, 1_000_000):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    with pytest.raises(TrainingError, match=r"step-1000000/checkpoint\.json' is missing"):
        open_run_folder(str(tmp_path), ASKED, resume=True)


def test_there_is_no_going_on_from_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(TrainingError, match="holds no run that could go on"):
        open_run_folder(str(out), ASKED, resume=False, checkpoint=tmp_path)
    assert not out.exists()


def test_a_model_folder_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for resume in (False, True):
        with pytest.raises(TrainingError, match="holds no training run"):
            open_run_folder(str(tmp_path), ASKED, resume=resume)
    assert "LlamaForCausalLM" in (tmp_path / "config.json").read_text()


def test_too_few_numbers_in_an_option_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(TrainingError, match="betas"):
        make_optimizer("adamw", [weight], {"lr": 1e-3, "betas": [0.9]})


def test_a_seed_is_of_all_generators() -> None:
    drawn = []
    for _ in range(2):
        seed_generators(2**40 + 7)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def summary(**changes: Any) -> TrainingSummary:
    fields: dict[str, Any] = {
        "steps": 4,
        "skipped": 1,
        "policy": "fp16-mixed",
        "reason": "as asked for",
        "loss": 2.5,
        "validation": ValidationLoss(loss=2.25, error=0.5, num_tokens=3, num_rows=1),
        "tokens": 3,
        "seconds": 1.0,
        "model": Path("model"),
        "checkpoint": Path("checkpoint"),
        "notes": (),
    }
    return TrainingSummary(**{**fields, **changes})


NO_LOSS = ValidationLoss(loss=math.nan, error=math.inf, num_tokens=3, num_rows=1)


def test_a_loss_that_is_nan_is_null_in_json() -> None:
    text = json.dumps(_facts(summary(loss=math.nan, validation=NO_LOSS)), allow_nan=False)
    assert json.loads(text)["validation"] == {"loss": None, "error": None, "tokens": 3}


def test_paths_in_json_are_absolute() -> None:
    facts = _facts(summary())
    assert facts["model"] == str(Path.cwd() / "model") and facts["checkpoint"] == str(Path.cwd() / "checkpoint")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"validation": NO_LOSS}, "the validation loss is nan, so the model is of no use"),
        ({"skipped": 3}, "3 of 4 steps were skipped, so hardly anything was learned"),
        ({"skipped": 4, "loss": math.nan, "validation": None}, "4 of 4 steps were skipped"),
    ],
)
def test_a_run_that_came_to_nothing_says_so(changes: dict[str, Any], said: str) -> None:
    found = summary(**changes)
    assert found.trouble is not None and said in found.trouble
    assert said in say_summary(found)[0] and said in str(_facts(found)["trouble"])


def test_a_run_that_came_to_something_says_nothing_of_it() -> None:
    assert summary(skipped=2).trouble is None and "failed" not in " ".join(say_summary(summary()))
    huge = ValidationLoss(loss=1e4, error=1.0, num_tokens=3, num_rows=1)
    assert any("beyond every float" in line for line in say_summary(summary(validation=huge)))
