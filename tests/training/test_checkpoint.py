"""Going on from a checkpoint is not having stopped, bit for bit, under every policy; another run is told apart."""

from __future__ import annotations

import errno
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from training_runs import new_run, random_rows, take_steps

from bitwright.errors import CommsError, DataError, TrainingError
from bitwright.training.checkpoints import checkpoint_files
from bitwright.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from bitwright.training.checkpoints.checkpoint_checks import raise_if_other_policy
from bitwright.training.checkpoints.checkpoint_facts import CHECKPOINT_FILE, latest_checkpoint, write_checkpoint_facts
from bitwright.training.checkpoints.run_state import load_run_state, save_run_state
from bitwright.training.checkpoints.state_tree import split_state
from bitwright.training.data.batches import Batches
from bitwright.training.policy import POLICIES
from bitwright.training.prepare import prepare
from bitwright.training.processes.ranks import Ranks
from bitwright.training.record_facts import plain_facts


def bits(state: Any) -> tuple[Any, dict[str, bytes]]:
    """A state as plain values and bytes, so that NaNs and zeros of either sign are told apart."""
    tree, tensors = split_state(state)
    return tree, {name: value.reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}


def everything(run: Any, batches: Batches) -> list[Any]:
    return [
        bits(run.model.state_dict()),
        bits(run.optimizer.state_dict()),
        bits(run.state_dict()),
        batches.state_dict(),
        torch.get_rng_state().tolist(),
    ]


def say(saved: Path, **changes: Any) -> None:
    """Let a checkpoint say something else of itself, as if it had been saved so."""
    file = saved / CHECKPOINT_FILE
    facts = json.loads(file.read_text())
    file.unlink()
    write_checkpoint_facts(saved, {name: value for name, value in facts.items() if name != "sha256"} | changes)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_resuming_is_not_having_stopped(policy: str, make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(11)
    run, batches = new_run(make_tiny_model, policy, accumulate=2), Batches(random_rows(), batch=2)
    take_steps(run, batches, 3)
    save_checkpoint(tmp_path / "saved", run, step=3, data=batches)
    expected = take_steps(run, batches, 3), everything(run, batches)

    torch.manual_seed(99)
    again, data = new_run(make_tiny_model, policy, seed=5, accumulate=2), Batches(random_rows(), batch=2)
    take_steps(again, data, 1)  # what it holds is overwritten
    resumed = load_checkpoint(tmp_path / "saved", again, data=data)
    assert resumed.step == 3
    assert (take_steps(again, data, 3), everything(again, data)) == expected


def test_loss_scale_and_skipped_steps_come_back(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run, batches = new_run(make_tiny_model, "fp16-mixed"), Batches(random_rows(), batch=2)
    with run.step() as step:
        step.backward(run.model(**next(batches)).loss * torch.inf)
    assert run.counters.skipped == 1
    scale = run.scale
    save_checkpoint(tmp_path / "saved", run, step=1, data=batches)
    again = new_run(make_tiny_model, "fp16-mixed")
    assert again.scale != scale
    load_checkpoint(tmp_path / "saved", again, data=Batches(random_rows(), batch=2))
    assert (again.scale, again.counters.skipped) == (scale, 1)


def test_every_generator_comes_back(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "fp32")
    np.random.normal()  # half of a pair: the other half is state too
    save_checkpoint(tmp_path / "saved", run, step=0, extra={"note": "kept"})
    expected = torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.random()
    assert load_checkpoint(tmp_path / "saved", run).extra == {"note": "kept"}
    assert (torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.random()) == expected


def test_extra_comes_back_as_it_was(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "fp16-mixed")
    extra = {
        "loss": math.inf,
        "losses": [math.nan, -math.inf, 0.1, -0.0],
        "pair": (1, "ü"),
        "best": {4: 2.5, 8: math.inf},
        "$": {"$": "nan"},
        "none": None,
    }
    saved = save_checkpoint(tmp_path / "saved", run, step=1, extra=extra)
    found = load_checkpoint(saved, run).extra
    assert repr(found) == repr(extra)  # NaN is not equal to itself
    assert "NaN" not in (saved / CHECKPOINT_FILE).read_text()  # any reader of JSON can read it


def test_extra_of_an_older_release_is_read(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "fp32")
    saved = save_checkpoint(tmp_path / "saved", run, step=1)
    facts = json.loads((saved / CHECKPOINT_FILE).read_text())
    (saved / CHECKPOINT_FILE).unlink()
    write_checkpoint_facts(
        saved,
        {name: value for name, value in facts.items() if name not in ("sha256", "settings")} | {"extra": {"a": [1]}},
    )
    resumed = load_checkpoint(saved, run)
    assert (resumed.extra, resumed.notes) == ({"a": [1]}, ())


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"t": torch.ones(2)}, "'t' of extra is of type Tensor"),
        ({"t": {1, 2}}, "'t' of extra is of type set"),
        ({"a": [{"b": (0, b"x")}]}, "'a.0.b.1' of extra is of type bytes"),
        ({"a": {torch.float32: 1}}, "a key of 'a' of extra is of type dtype"),
        ({"loss": np.float32(1.0)}, "'loss' of extra is of type float32"),
        ({"text": "\ud800"}, "'text' of extra cannot be written as JSON"),
        ({"number": 10**5000}, "'number' of extra cannot be written as JSON"),
        ({3: 1}, "extra has the key 3"),
        ([1], "extra is of type list"),
    ],
)
def test_extra_that_json_does_not_know_is_refused(
    extra: Any, words: str, make_tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    run = new_run(make_tiny_model, "fp32")
    with pytest.raises(TrainingError, match=words):
        save_checkpoint(tmp_path / "saved", run, step=1, extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_extra_that_holds_itself_is_refused(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TrainingError, match="'a' of extra cannot be written as JSON"):
        save_checkpoint(tmp_path / "saved", new_run(make_tiny_model, "fp32"), step=1, extra={"a": endless})


@pytest.mark.parametrize("step", [-1, "a", 1.5, True, None, math.nan])
def test_a_step_that_is_no_count_is_refused(step: Any, make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "fp32")
    with pytest.raises(TrainingError, match=rf"step is {step!r}; give how many steps were taken"):
        save_checkpoint(tmp_path / "saved", run, step=step)
    assert list(tmp_path.iterdir()) == []


def test_a_step_of_numpy_is_a_count(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "fp32")
    assert load_checkpoint(save_checkpoint(tmp_path / "saved", run, step=np.int64(7)), run).step == 7  # type: ignore[arg-type]


def test_inside_a_step_nothing_is_saved_or_loaded(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run, data = new_run(make_tiny_model, "fp16-mixed"), Batches(random_rows(), batch=2)
    saved = save_checkpoint(tmp_path / "saved", run, step=0, data=data)
    with run.step() as step:
        with pytest.raises(TrainingError, match="cannot be saved inside a step; do it after the block"):
            save_checkpoint(tmp_path / "other", run, step=0, data=data)
        with pytest.raises(TrainingError, match="cannot be loaded inside a step; do it after the block"):
            load_checkpoint(saved, run, data=data)
        step.backward(run.model(**next(data)).loss)
        with pytest.raises(TrainingError, match="cannot be loaded inside a step"):
            load_checkpoint(saved, run, data=data)
    assert (run.counters.steps, data.num_taken) == (1, 2)
    assert not (tmp_path / "other").exists()
    assert load_checkpoint(saved, run, data=data).step == 0


def test_a_closed_run_is_neither_saved_nor_loaded(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "fp32")
    saved = save_checkpoint(tmp_path / "saved", run, step=0)
    run.close()
    with pytest.raises(TrainingError, match="closed, and a checkpoint cannot be saved from it; save before"):
        save_checkpoint(tmp_path / "other", run, step=0)
    assert not (tmp_path / "other").exists()
    before = bits(run.model.state_dict())
    with pytest.raises(TrainingError, match="closed, and a checkpoint cannot be loaded into it; prepare the model ag"):
        load_checkpoint(saved, run)
    assert bits(run.model.state_dict()) == before


def test_another_size_of_a_step_is_noted(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run, data = new_run(make_tiny_model, "fp32"), Batches(random_rows(), batch=4)
    saved = save_checkpoint(tmp_path / "saved", run, step=0, data=data)
    assert load_checkpoint(saved, run, data=data).notes == ()
    (note,) = load_checkpoint(saved, run, data=Batches(random_rows(), batch=8)).notes
    assert "saved with batch 4, gone on with 8" in note
    (note,) = load_checkpoint(saved, new_run(make_tiny_model, "fp32", accumulate=2), data=data).notes
    assert "saved with accumulate 1, gone on with 2" in note
    run.close()
    other = prepare(run.model, run.optimizer, policy="fp32", scheduler=run.scheduler)
    (note,) = load_checkpoint(saved, other, data=data).notes
    assert "saved with max_grad_norm 1.0, gone on with None" in note
    older = dict(data.state_dict())
    del older["batch"]
    assert Batches(random_rows(), batch=8).load_state_dict(older).num_taken == 0


def test_what_is_saved_and_not_taken_up_is_noted(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run, data = new_run(make_tiny_model, "fp32"), Batches(random_rows(), batch=4)
    saved = save_checkpoint(tmp_path / "saved", run, step=0, data=data, exchange=Owing(0.25))
    notes = load_checkpoint(saved, run).notes
    assert len(notes) == 2
    assert "position in its data was not set, since no data was passed" in notes[0]
    assert "owed of gradients was not set, since no exchange was passed" in notes[1]


@pytest.mark.parametrize(("was", "now"), [(False, True), (True, False)])
def test_another_tying_of_weights_is_told_as_another_model(
    was: bool, now: bool, make_tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    def tied_or_not(is_tied: bool) -> Any:
        model = make_tiny_model("llama").requires_grad_(True).train()
        if is_tied:
            model.lm_head.weight = model.model.embed_tokens.weight
        return prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy="fp32")

    saved = save_checkpoint(tmp_path / "saved", tied_or_not(was), step=0)
    words = {False: "a tensor of its own", True: "tied to 'model.embed_tokens.weight'"}
    with pytest.raises(TrainingError, match=f"another model: 'lm_head.weight' was {words[was]} and is {words[now]}"):
        load_checkpoint(saved, tied_or_not(now))
    assert load_checkpoint(saved, tied_or_not(was)).notes == ()


def test_weights_are_a_plain_file(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "bf16-mixed")
    save_checkpoint(tmp_path / "saved", run, step=0)
    found = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        name: tuple(value.shape) for name, value in run.model.state_dict().items()
    }
    assert not [path for path in tmp_path.rglob("*") if path.suffix not in (".json", ".safetensors", "")]


def test_another_policy_is_told_field_by_field(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "bf16-mixed")
    save_checkpoint(tmp_path / "saved", run, step=0)
    other = new_run(make_tiny_model, "fp16-mixed")
    before = bits(other.model.state_dict())
    with pytest.raises(TrainingError) as caught:
        load_checkpoint(tmp_path / "saved", other)
    message = str(caught.value)
    assert "saved under policy 'bf16-mixed', and this run's is 'fp16-mixed'" in message
    assert "compute was bf16, is fp16" in message
    assert "loss scale: none then, some now" in message
    assert "description" not in message
    assert "prepare the run with policy 'bf16-mixed'" in message
    assert bits(other.model.state_dict()) == before


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ("bf16-mixed", "fp8-hybrid", ["products: none then, some now", "kept: none then, some now"]),
        ("mxfp8", "nvfp4", ["products differ in forward x, forward w, dgrad g, wgrad g, wgrad x"]),
        ("bf16-pure-sr", "bf16-pure-kahan", ["update was stochastic, is kahan"]),
    ],
)
def test_another_policy_is_told_in_words(was: str, now: str, words: list[str]) -> None:
    with pytest.raises(TrainingError) as caught:
        raise_if_other_policy("saved", plain_facts(POLICIES[was]), plain_facts(POLICIES[now]))
    message = str(caught.value)
    assert f"policy '{was}', and this run's is '{now}'" in message
    assert [word for word in words if word not in message] == []
    assert len(message) < 400 and "{" not in message and "[" not in message


def test_another_model_optimizer_and_data_are_told(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run, batches = new_run(make_tiny_model, "fp32"), Batches(random_rows(), batch=2)
    save_checkpoint(tmp_path / "saved", run, step=0, data=batches)
    other = new_run(make_tiny_model, "fp32")
    other.model.lm_head.weight = torch.nn.Parameter(torch.zeros(4, 64))
    with pytest.raises(
        TrainingError, match=r"another model: the shape of 'lm_head.weight' was \[260, 64\] and is \[4, 64"
    ):
        load_checkpoint(tmp_path / "saved", other)
    fewer = new_run(make_tiny_model, "fp32")
    fewer.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(
        TrainingError, match=r"an optimizer with \[21\] parameters in its groups, and this run's has \[20"
    ):
        load_checkpoint(tmp_path / "saved", fewer)
    with pytest.raises(DataError, match="num_rows is 25, not 24"):
        load_checkpoint(tmp_path / "saved", run, data=Batches(random_rows(25), batch=2))
    save_checkpoint(tmp_path / "bare", run, step=0)
    with pytest.raises(TrainingError, match="saved without a position in its data"):
        load_checkpoint(tmp_path / "bare", run, data=batches)


def test_another_number_of_processes_is_told(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "fp32")
    saved = save_checkpoint(tmp_path / "saved", run, step=7)
    say(saved, world_size=4)
    with pytest.raises(TrainingError, match=r"saved by 4 processes, and there are 1 now; start 4 \(torchrun"):
        load_checkpoint(saved, run)
    resumed = load_checkpoint(saved, run, allow_other_world_size=True)
    assert resumed.step == 7
    assert "saved by 4 processes, gone on by 1" in resumed.notes[0]
    say(saved, world_size=4, is_sharded=True)
    with pytest.raises(TrainingError, match="each file holds one process's pieces of the model; start 4 of them"):
        load_checkpoint(saved, run, allow_other_world_size=True)


def test_another_way_to_spread_is_told(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "fp32")
    saved = save_checkpoint(tmp_path / "saved", run, step=7)
    say(saved, is_sharded=True)
    with pytest.raises(
        TrainingError, match=r"that lay in pieces \(fsdp2\), and this one lies whole .*spread it as before"
    ):
        load_checkpoint(saved, run)


def test_a_step_in_progress_is_not_saved(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run, batches = new_run(make_tiny_model, "fp32", accumulate=2), Batches(random_rows(), batch=2)
    with run.step() as step:
        step.backward(run.model(**next(batches)).loss)
    with pytest.raises(TrainingError, match="1 of 2 micro-batches of a step are done"):
        save_checkpoint(tmp_path / "saved", run, step=0)
    assert not (tmp_path / "saved").exists()


def test_a_full_disk_leaves_the_older_checkpoint(
    make_tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(make_tiny_model, "fp32")
    saved = save_checkpoint(tmp_path / "saved", run, step=1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "write_and_sync", full)
    with pytest.raises(TrainingError, match="No space left on device; free some space; the one before it stands"):
        save_checkpoint(saved, run, step=2)
    assert load_checkpoint(saved, run).step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_what_is_no_checkpoint_is_not_replaced(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(TrainingError, match="exists and is no checkpoint; choose another folder"):
        save_checkpoint(tmp_path / "mine", new_run(make_tiny_model, "fp32"), step=0)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_damage_is_told(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "fp32")
    saved = save_checkpoint(tmp_path / "saved", run, step=1)
    with pytest.raises(
        TrainingError, match=r"no checkpoint at '.*elsewhere' .*give a folder that holds checkpoint.json"
    ):
        load_checkpoint(tmp_path / "elsewhere", run)
    weights = saved / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(TrainingError, match=r"model.safetensors' has [\d,]+ bytes instead of [\d,]+, .*an earlier one"):
        load_checkpoint(saved, run)
    weights.unlink()
    with pytest.raises(TrainingError, match=r"model.safetensors' is missing, so the checkpoint is damaged"):
        load_checkpoint(saved, run)
    weights.write_bytes(b"x" * len(content))
    with pytest.raises(TrainingError, match=r"model\.safetensors' has other bytes than were written"):
        load_checkpoint(saved, run)
    (saved / "checkpoint.json").write_text("{")
    with pytest.raises(TrainingError, match=r"checkpoint.json' is damaged"):
        load_checkpoint(saved, run)


def test_a_flipped_byte_anywhere_is_refused_and_nothing_has_changed(
    make_tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    run, data = new_run(make_tiny_model, "fp8-hybrid"), Batches(random_rows(), batch=2)
    take_steps(run, data, 2)
    earlier = save_checkpoint(tmp_path / "step-1", run, step=1, data=data)
    saved = save_checkpoint(tmp_path / "step-2", run, step=2, data=data)
    take_steps(run, data, 1)
    before = everything(run, data)
    files = sorted(saved.iterdir())
    assert len(files) == 9
    for file in files:
        content = file.read_bytes()
        for place in {0, 9, len(content) // 3, len(content) // 2, len(content) - 1}:
            spoiled = bytearray(content)
            spoiled[place] ^= 1
            file.write_bytes(spoiled)
            with pytest.raises(TrainingError) as caught:
                load_checkpoint(saved, run, data=data)
            assert f"'{file}' " in str(caught.value), (file, place)
            assert f"--from {earlier}" in str(caught.value), (file, place)
        file.write_bytes(content)
    assert everything(run, data) == before
    assert load_checkpoint(saved, run, data=data).step == 2


def test_other_data_or_products_leave_everything_as_it_is(
    make_tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = new_run(make_tiny_model, "fp16-mixed"), Batches(random_rows(), batch=2)
    take_steps(run, data, 1)
    saved = save_checkpoint(tmp_path / "saved", run, step=1, data=data)
    take_steps(run, data, 1)
    run.scaler.update(True)
    before = everything(run, data)
    with pytest.raises(DataError):
        load_checkpoint(saved, run, data=Batches(random_rows(25), batch=2))
    assert everything(run, data) == before

    def refuse(*_: Any) -> None:  # the last part of the run's own state
        monkeypatch.undo()
        raise TrainingError("of another schedule")

    monkeypatch.setattr(type(run.scheduler), "load_state_dict", refuse)
    with pytest.raises(TrainingError, match="of another schedule"):
        load_checkpoint(saved, run, data=data)
    assert everything(run, data) == before


class Owing:
    """An exchange of gradients that owes something of one parameter."""

    def __init__(self, owed: float, wire: str = "int8") -> None:
        self.wire, self.owed = wire, torch.tensor([owed])

    def state_dict(self) -> dict[str, Any]:
        return {"wire": self.wire, "owed": {"model.layers.0.weight": self.owed}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["wire"] != self.wire:
            raise CommsError(f"kept under {state['wire']}")
        self.owed = state["owed"]["model.layers.0.weight"]


def test_what_is_owed_of_gradients_comes_back(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run, data = new_run(make_tiny_model, "bf16-mixed"), Batches(random_rows(), batch=2)
    saved = save_checkpoint(tmp_path / "saved", run, step=0, data=data, exchange=Owing(0.25))
    again = Owing(7.0)
    load_checkpoint(saved, run, data=data, exchange=again)
    assert again.owed.tolist() == [0.25]
    take_steps(run, data, 1)
    before, other = everything(run, data), Owing(7.0, wire="fp16")
    with pytest.raises(CommsError, match="kept under int8"):
        load_checkpoint(saved, run, data=data, exchange=other)
    assert (everything(run, data), other.owed.tolist()) == (before, [7.0])
    # Of other processes' gradients nothing is owed here.
    say(saved, world_size=2)
    alone = Owing(7.0)
    notes = load_checkpoint(saved, run, data=data, exchange=alone, allow_other_world_size=True).notes
    assert "is dropped" in notes[1]
    assert alone.owed.tolist() == [7.0]


class OtherRankFails(Ranks):
    """A group in which the second process cannot read its files."""

    def gather(self, fact: Any) -> list[Any]:
        return [fact, TrainingError("'saved/rank-1.json' has other bytes than were written")]


def test_what_one_rank_cannot_read_no_rank_loads(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run, data = new_run(make_tiny_model, "fp16-mixed"), Batches(random_rows(), batch=2)
    saved = save_checkpoint(tmp_path / "saved", run, step=0, data=data)
    take_steps(run, data, 1)
    before = everything(run, data)
    with pytest.raises(TrainingError, match=r"rank-1\.json' has other bytes"):
        load_checkpoint(saved, run, data=data, ranks=OtherRankFails())
    assert everything(run, data) == before


def test_another_class_of_optimizer_or_scheduler_is_told(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    run = new_run(make_tiny_model, "fp32")
    saved = save_checkpoint(tmp_path / "saved", run, step=0)
    constant, steps = torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.StepLR
    for kind, schedule, message in (
        (torch.optim.RMSprop, constant, "with optimizer AdamW, and this run has optimizer RMSprop"),
        (torch.optim.AdamW, steps, "with scheduler LambdaLR, and this run has scheduler StepLR; make the run"),
        (torch.optim.AdamW, None, "with scheduler LambdaLR, and this run has no scheduler; make the run"),
    ):
        model = make_tiny_model("llama").requires_grad_(True).train()
        optimizer = kind(model.parameters(), lr=1e-3)
        scheduler = None if schedule is None else schedule(optimizer, 3 if schedule is steps else float)
        with pytest.raises(TrainingError, match=message):
            load_checkpoint(saved, prepare(model, optimizer, policy="fp32", scheduler=scheduler))


def test_what_is_kept_beside_another_librarys_checkpoint_is_checked_too(
    make_tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    run = new_run(make_tiny_model, "fp8-hybrid")
    save_run_state(tmp_path, "policy", run)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["policy.json", "policy.safetensors", "policy.sha256.json"]
    for file in files:
        content = file.read_bytes()
        spoiled = bytearray(content)
        spoiled[len(content) // 2] ^= 1
        file.write_bytes(spoiled)
        with pytest.raises(TrainingError, match="damaged"):
            load_run_state(tmp_path, "policy", run)
        file.write_bytes(content)
    load_run_state(tmp_path, "policy", run)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1.0)
    with pytest.raises(TrainingError, match="with optimizer AdamW, and this run has optimizer SGD"):
        load_run_state(tmp_path, "policy", run)


def test_the_latest_is_that_with_most_steps(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    run = new_run(make_tiny_model, "fp32")
    for step in (9, 10, 2):
        save_checkpoint(tmp_path / f"step-{step}", run, step=step, ranks=Ranks())
    shutil.copytree(tmp_path / "step-10", tmp_path / ".step-11.tmp")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-10"
    (tmp_path / "step-10" / CHECKPOINT_FILE).write_text("{")  # nobody knows how many steps it has
    with pytest.raises(TrainingError, match=r"step-10/checkpoint.json' is damaged .*--from .*step-9\)"):
        latest_checkpoint(tmp_path)
