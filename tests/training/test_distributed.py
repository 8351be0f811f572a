"""Two real processes under torchrun (Gloo): DDP and FSDP2 against one process with the same global batch.

Gradients are means over the same rows, added up in another order. Two processes therefore agree with one up to fp32
rounding where nothing is rounded to fewer bits, and up to what a code that flips moves elsewhere (`TOLERANCES`).
Between ranks everything is equal bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from two_ranks import (
    GLOBAL_BATCH,
    SCENARIOS,
    SPOILED,
    STEPS,
    new_batches,
    new_run,
    take_steps,
    tiny_model,
    whole_weights,
)

from bitwright.errors import TrainingError, UnknownName
from bitwright.training.checkpoints.checkpoint import load_checkpoint
from bitwright.training.fine_tuning.config import parse_config
from bitwright.training.fine_tuning.metrics_file import read_metrics
from bitwright.training.fine_tuning.trainer import train
from bitwright.training.prepare import prepare
from bitwright.training.processes.distributed import PARALLEL, spread
from bitwright.training.processes.ranks import Ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
#: Way to spread → what names of a checkpoint's parts end in.
RANK_FILES = {"ddp": ("",), "fsdp2": (".rank-0", ".rank-1")}

#: Policy → how far two processes may be from one: their losses, relatively; and the mean distance of their weights, as
#: a share of the mean distance that weights have moved. Under fp8-hybrid the first step scales by what a rank sees.
TOLERANCES = {
    "fp32": (1e-6, 1e-5),
    "bf16-mixed": (5e-4, 0.02),
    "fp16-mixed": (1e-4, 0.005),
    "fp8-hybrid": (3e-3, 0.25),
    "bf16-pure-sr": (1e-3, 0.25),
}


CONFIG = """
model = "{model}"
out = "{out}"
policy = "bf16-mixed"
parallel = "{parallel}"
device = "cpu"
steps = 4
batch = {batch}
[data]
train = "{text}"
task = "chat"
validation_share = 0.3
sequence_length = 48
[optimizer]
lr = 1e-3
[checkpoint]
every_steps = 2
"""


COMMUNICATION = """
[communication]
wire = "fp8_e4m3"
error_feedback = true
"""


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of different lengths, so that ranks have different numbers of tokens."""
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{n}" * (1 + n)}]}
        for n in range(10)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_tiny_folder: Callable[..., Path], talks: Path) -> Path:
    """What two processes wrote, all scenarios in one start."""
    folder = tmp_path_factory.mktemp("ranks")
    facts = {"model": make_tiny_folder("llama"), "text": talks, "batch": 2}
    for parallel in PARALLEL:
        (folder / f"{parallel}.toml").write_text(CONFIG.format(out=folder / parallel, parallel=parallel, **facts))
    on_the_wire = CONFIG.format(out=folder / "wire", parallel="ddp", **facts) + COMMUNICATION
    (folder / "wire.toml").write_text(on_the_wire)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "tests/training/two_ranks.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Policy → the same in this process: (steps, weights)."""
    found = {}
    for policy in TOLERANCES:
        run, ranks = new_run(policy, "ddp", Ranks()), Ranks()
        assert new_batches(ranks).batch == GLOBAL_BATCH
        found[policy] = take_steps(run, new_batches(ranks), ranks, range(STEPS)), whole_weights(run)
    return found


def reports(folder: Path, scenario: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{scenario}.rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_ranks_agree_bit_for_bit(scenario: str, folder: Path) -> None:
    first, second = reports(folder, scenario)
    for name in ("weights", "run", "counters"):
        assert first[name] == second[name], name
    for here, there in zip(first["steps"], second["steps"], strict=True):
        assert {k: v for k, v in here.items() if k != "skipped"} == {k: v for k, v in there.items() if k != "skipped"}
        assert (here["skipped"] is None) == (there["skipped"] is None)


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_two_processes_do_what_one_does(scenario: str, folder: Path, alone: dict[str, Any]) -> None:
    policy, _ = SCENARIOS[scenario]
    of_loss, of_way = TOLERANCES[policy]
    steps, weights = alone[policy]
    found = reports(folder, scenario)[0]["steps"]
    for here, there in zip(found, steps, strict=True):
        assert (here["skipped"] is None) == (there["skipped"] is None)
        assert (here["scale"], here["level"]) == (there["scale"], there["level"])
        if here["skipped"] is None:
            assert here["loss"] == pytest.approx(there["loss"], rel=of_loss)
            assert here["norm"] == pytest.approx(there["norm"], rel=10 * of_loss)
    spread_out = safetensors.torch.load_file(folder / f"{scenario}.safetensors")
    assert set(spread_out) == set(weights)
    start = tiny_model().state_dict()
    assert distance(spread_out, weights) < of_way * distance(weights, start)


def distance(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> float:
    """Sum of the magnitudes of all differences."""
    return sum(float((here[name].float() - there[name].float()).abs().sum()) for name in there)


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_one_rank_s_inf_is_everybody_s(scenario: str, folder: Path) -> None:
    first, second = reports(folder, scenario)
    assert first["steps"][SPOILED]["skipped"].startswith("a loss on another rank is not finite")
    assert second["steps"][SPOILED]["skipped"].startswith("the loss of micro-batch 1 of 2 is inf")
    assert first["counters"] == [STEPS - 1, 1]
    if first["steps"][0]["scale"] is not None:
        scales = [step["scale"] for step in first["steps"]]
        assert scales == [65536.0, 65536.0, 32768.0, 32768.0]


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_resuming_is_not_having_stopped(scenario: str, folder: Path) -> None:
    for report in reports(folder, scenario):
        assert report["resumed"] == report["final"]


@pytest.mark.parametrize("parallel", PARALLEL)
def test_the_trainer_on_two_processes_is_that_on_one(
    parallel: str, folder: Path, talks: Path, make_tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Tokens count alike however they fall on ranks; the model is written whole, the metrics once."""
    facts = {"model": make_tiny_folder("llama"), "text": talks, "batch": 4, "parallel": parallel}
    config = CONFIG.format(out=tmp_path / "alone", **facts)
    summary = train(parse_config(config, "alone.toml"))
    here, there = (
        [line for line in read_metrics(path / "metrics.jsonl") if line["kind"] == kind]
        for path in (folder / parallel, tmp_path / "alone")
        for kind in ("step",)
    )
    assert [line["step"] for line in here] == [1, 2, 3, 4]
    assert [line["loss"] for line in here] == pytest.approx([line["loss"] for line in there], rel=5e-4)
    assert [line["grad_norm"] for line in here] == pytest.approx([line["grad_norm"] for line in there], rel=5e-3)
    measured = [read_metrics(path / "metrics.jsonl")[-1] for path in (folder / parallel, tmp_path / "alone")]
    assert measured[0]["tokens"] == measured[1]["tokens"]
    assert measured[0]["loss"] == pytest.approx(measured[1]["loss"], rel=5e-4)
    assert measured[0]["error"] == pytest.approx(measured[1]["error"], rel=1e-2)
    weights = safetensors.torch.load_file(folder / parallel / "model" / "model.safetensors")
    torch.testing.assert_close(
        weights, safetensors.torch.load_file(summary.model / "model.safetensors"), rtol=0.05, atol=5e-3
    )
    saved = {path.name for path in (folder / parallel / "checkpoints" / "step-000004").glob("*.safetensors")}
    own = {"rank-0.safetensors", "rank-1.safetensors"}
    parts = [f"{name}{rank}.safetensors" for name in ("model", "optimizer", "run") for rank in RANK_FILES[parallel]]
    assert saved == own | set(parts)


def test_gradients_travel_in_the_format_that_is_asked_for(folder: Path) -> None:
    """The run learns as it does without, and each rank saves what it owes of every trained parameter."""
    here, there = (
        [line for line in read_metrics(folder / name / "metrics.jsonl") if line["kind"] == "step"]
        for name in ("wire", "ddp")
    )
    assert here[0]["loss"] == there[0]["loss"]
    assert [line["loss"] for line in here] == pytest.approx([line["loss"] for line in there], rel=0.01)
    assert here[1]["loss"] != there[1]["loss"]
    place = folder / "wire" / "checkpoints" / "step-000004"
    trained = safetensors.torch.load_file(place / "model.safetensors")
    for rank in range(2):
        assert "fp8_e4m3" in (place / f"rank-{rank}.json").read_text()
        owed = [
            v for v in safetensors.torch.load_file(place / f"rank-{rank}.safetensors").values() if v.is_floating_point()
        ]
        assert sum(value.numel() for value in owed) == sum(value.numel() for value in trained.values())
        assert any(value.any() for value in owed)


def test_a_checkpoint_of_two_processes_is_told_from_one_of_one(folder: Path) -> None:
    run = new_run("bf16-mixed", "ddp", Ranks())
    with pytest.raises(TrainingError, match="saved by 2 processes, and there are 1 now; start 2"):
        load_checkpoint(folder / "ddp-bf16-mixed-saved", run)
    batches = new_batches(Ranks())
    resumed = load_checkpoint(folder / "ddp-bf16-mixed-saved", run, data=batches, allow_other_world_size=True)
    assert (resumed.step, batches.num_taken) == (3, 3 * 2 * GLOBAL_BATCH)
    with pytest.raises(TrainingError, match="each file holds one process's pieces"):
        load_checkpoint(folder / "fsdp2-bf16-mixed-saved", run, allow_other_world_size=True)


def test_ddp_s_own_exchange_of_bf16_gradients_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(tiny_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with pytest.raises(
            TrainingError, match=r"exchanges gradients in bf16; spread the model by bitwright\.training\."
        ):
            prepare(model, optimizer, policy="bf16-pure-sr")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        prepare(model, optimizer, policy="bf16-mixed")
    finally:
        torch.distributed.destroy_process_group()


def test_alone_nothing_is_spread() -> None:
    model = tiny_model()
    assert spread(model, "fsdp2", Ranks()) is model
    with pytest.raises(UnknownName, match="unknown way to spread a model 'fsdp'; did you mean 'fsdp2'"):
        spread(model, "fsdp", Ranks())
