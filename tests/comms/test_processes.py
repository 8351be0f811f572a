"""Real processes over Gloo: schedules as messages, and training with gradients in every format of the wire."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bitwright.comms.hooks import fsdp_advice, register
from bitwright.comms.wire import WIRE_FORMATS
from bitwright.comms.wire_codec import decode, encode
from bitwright.errors import CommsError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What so many processes wrote, all checks in one start."""
    out = tmp_path_factory.mktemp("ranks") / "found.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param)]
    script = str(ROOT / "tests/comms/some_ranks.py")
    done = subprocess.run([*command, script, str(out)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(out.read_text(encoding="utf-8")), "size": request.param}


def test_schedules_by_messages_are_those_in_numpy_bit_for_bit(found: dict[str, Any]) -> None:
    assert found["wrong"] == []


def test_messages_of_a_step_are_one_group_with_its_receives_first(found: dict[str, Any]) -> None:
    """NCCL runs ungrouped messages in their order, and Gloo answers what was asked for first."""
    size = found["size"]
    for rings, doublings, two_shots in found["groups"]:  # of each rank
        # All ranks take part in each of these steps; in doubling so where they are a power of two.
        assert (len(rings), len(two_shots)) == (2 * (size - 1), 2)
        assert size & (size - 1) or len(doublings) == math.log2(size)
        for group in (*rings, *two_shots):
            assert {kind for kind, _, _ in group} == {"irecv", "isend"}
        for group in (*rings, *doublings, *two_shots):
            kinds = [kind for kind, _, _ in group]
            assert kinds == sorted(kinds)


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


def test_fp32_on_the_wire_trains_as_ddp_does(found: dict[str, Any]) -> None:
    assert found["fp32 False"]["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("bf16 False", 0.001),
        ("fp16 False", 0.001),
        ("fp8_e4m3 False", 0.005),
        ("fp8_e4m3 True", 0.005),
        ("int8 True", 0.005),
    ],
)
def test_fewer_bits_train_alike_and_all_ranks_stay_equal(found: dict[str, Any], name: str, tolerance: float) -> None:
    run = found[name]
    assert run["is_equal_on_all_ranks"]
    assert mean(run["losses"]) == pytest.approx(mean(found["plain"]["losses"]), rel=tolerance)
    assert run["losses"][-1] < run["losses"][0] / 5


@pytest.mark.parametrize("num_ranks", [8, 512])
def test_fsdp_trains_alike_as_it_is_advised(found: dict[str, Any], num_ranks: int) -> None:
    run = found[f"sharded {num_ranks}"]
    assert run["kept_in"] == ["torch.float32"]
    # Products are in bf16 here, and gradients for eight ranks are added up in it.
    assert mean(run["losses"]) == pytest.approx(mean(found["plain"]["losses"]), rel=0.01)
    assert run["losses"] != found["plain"]["losses"]
    assert run["losses"][-1] < run["losses"][0] / 5


def test_fewer_bits_are_sent(found: dict[str, Any]) -> None:
    # Buckets end in blocks of their own, so that a little more is sent than for all gradients at once.
    for name, num_bytes in (("bf16 False", 2), ("fp8_e4m3 False", 1 + 4 / 128)):
        assert 1 <= found[name]["sent_bytes"] / (num_bytes * found[name]["numbers_sent"]) < 1.3
    assert found["fp8_e4m3 False"]["sent_bytes"] < 0.55 * found["bf16 False"]["sent_bytes"]


@pytest.mark.parametrize("wire", ["int8", "fp16"])
def test_what_was_lost_is_sent_later_whatever_buckets_and_processes_come_between(
    found: dict[str, Any], wire: str
) -> None:
    run = found[f"feedback {wire} None"]
    # What arrived and what is still owed are the gradient times the steps, but for the order of fp32 sums.
    assert run["error"] < 2e-5 < run["error_without"]
    assert set(run["resets"]) == {0}


@pytest.mark.parametrize("name", ["int8 inf", "bf16 nan", "fp16 1000000.0"])
def test_what_is_not_finite_spoils_its_step_and_no_later_one(found: dict[str, Any], name: str) -> None:
    run = found[f"feedback {name}"]
    assert run["finite"] == [True, False, True, True, True, True]
    assert set(run["resets"]) == {1.0}  # one block, and every rank says so


def test_feedback_of_another_run_is_refused(found: dict[str, Any]) -> None:
    refused = found["feedback int8 None"]["refused"]
    assert "was kept under 'fp32'" in refused["other format"]
    assert "weights.1" in refused["other parameters"]
    assert f"{found['size'] + 1} ranks" in refused["other ranks"]


def test_a_schedule_of_other_ranks_is_refused(found: dict[str, Any]) -> None:
    assert found["refused"].startswith(f"a schedule of {found['size'] + 1} ranks was run by {found['size']}")


@pytest.mark.parametrize("name", WIRE_FORMATS)
@pytest.mark.parametrize("length", [0, 1, 128, 300])
def test_bytes_stand_for_what_the_format_rounds_to(name: str, length: int) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(0))
    if length == 300:
        x[200] = float("nan")
    wire = WIRE_FORMATS[name]
    content = encode(x, wire)
    assert content.dtype == torch.uint8 and content.numel() == wire.num_bytes(length)
    wanted = torch.from_numpy(wire.rounded(x.numpy())) if length else x
    torch.testing.assert_close(decode(content, wire, length), wanted, rtol=0, atol=0, equal_nan=True)


def test_fsdp_is_told_fp32_where_a_ring_in_bf16_loses_too_much() -> None:
    few, many = fsdp_advice(8), fsdp_advice(512)
    assert few.policy.reduce_dtype is few.policy.param_dtype is torch.bfloat16
    assert many.policy.param_dtype is torch.bfloat16
    assert many.policy.reduce_dtype is torch.float32
    assert "512 ranks" in many.reasons[1]
    with pytest.raises(CommsError, match="float64"):
        fsdp_advice(8, compute=torch.float64)


def test_a_model_outside_ddp_is_refused() -> None:
    with pytest.raises(CommsError, match="wrap it in DistributedDataParallel"):
        register(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
