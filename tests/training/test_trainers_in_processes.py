"""transformers' Trainer and Lightning's in two processes (torchrun, Gloo), against one with the same global batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore:.*LeafSpec.*:FutureWarning", "ignore::UserWarning:lightning"
    ),
]

from two_ranks import tiny_model  # noqa: E402
from two_ranks_of_trainers import ACCUMULATE, LIBRARIES, RESUMED, SCENARIOS, STEPS  # noqa: E402

from bitwright.training.policy import policy_named  # noqa: E402
from bitwright.training.processes.ranks import Ranks  # noqa: E402
from bitwright.training.run import TrainingRun  # noqa: E402

ROOT = Path(__file__).parents[2]
#: Policy → how far two processes may be from one: losses, relatively; weights, of the way that they have moved.
TOLERANCES = {"bf16-mixed": (5e-4, 0.02), "fp16-mixed": (1e-4, 0.005), "bf16-pure-sr": (1e-3, 0.25)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote, all scenarios in one start."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, str(ROOT / "tests/training/two_ranks_of_trainers.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def reports(folder: Path, scenario: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{scenario}.rank-{rank}.json").read_text()) for rank in range(2)]


def parameters(run: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run.model.state_dict().items()}


def distance(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> float:
    """Sum of the magnitudes of all differences."""
    return sum(float((here[name].float() - there[name].float()).abs().sum()) for name in there)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_agree_bit_for_bit(scenario: str, folder: Path) -> None:
    first, second = reports(folder, scenario)
    assert first == second
    assert first["counters"] == [STEPS, 0, STEPS * ACCUMULATE]
    is_mixed = policy_named(SCENARIOS[scenario][1]).parameters == "fp32"
    assert first["wrapped"] == ("DistributedDataParallel" if is_mixed else "Replicated")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes_do_what_one_does(scenario: str, folder: Path, tmp_path: Path) -> None:
    library, policy = SCENARIOS[scenario]
    of_loss, of_way = TOLERANCES[policy]
    run, losses = LIBRARIES[library](policy, tmp_path, Ranks())
    assert len(losses) == STEPS
    assert reports(folder, scenario)[0]["losses"] == pytest.approx(losses, rel=of_loss)
    alone, together = parameters(run), safetensors.torch.load_file(folder / f"{scenario}.safetensors")
    assert set(together) == set(alone)
    start = {name: value for name, value in parameters_at_start(library).items() if name in alone}
    assert set(start) == set(alone)
    assert distance(together, alone) < of_way * distance(alone, start)


def parameters_at_start(library: str) -> dict[str, torch.Tensor]:
    prefix = "model." if library == "lightning" else ""  # of the LightningModule that holds it
    return {f"{prefix}{name}": value for name, value in tiny_model().state_dict().items()}


def test_resuming_is_not_having_stopped(folder: Path) -> None:
    for report in reports(folder, RESUMED):
        assert report["resumed"] == report["weights"]
