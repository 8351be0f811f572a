"""`bitwright train` in two real processes: an error that both have is told once, one of a single rank names it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT / "src"),
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
CONFIG = """
model = "{model}"
out = "{out}"
policy = "fp32"
device = "cpu"
steps = 4
batch = 1
[data]
train = "{text}"
sequence_length = 16
[optimizer]
lr = 1e-3
"""
COMMAND = "import sys; from bitwright.cli import main; sys.exit(main(sys.argv[1:]))"
#: The second rank alone fails, while the first waits for it in an exchange.
ONE_FAILS = """
import os, sys
from bitwright.cli import main
from bitwright.errors import TrainingError
from bitwright.training.fine_tuning import trainer

if os.environ["RANK"] == "1":
    def refuse(*_):
        raise TrainingError("this rank has no room")
    trainer.set_up = refuse
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def config(tmp_path: Path, make_tiny_folder: Callable[..., Path]) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The scale of group {number} multiplies its codes." for number in range(40)))
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(model=make_tiny_folder("llama"), out=tmp_path / "out", text=text))
    return file


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error")]


def test_without_torchrun_s_store_too(config: Path) -> None:
    """Found before anything is loaded: nobody has joined a group yet."""
    config.write_text(config.read_text().replace("batch", "bacth"))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND, "train", str(config)],
            env={**ENVIRONMENT, **place, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert told[1] == "" and len(errors(told[0])) == 1 and "did you mean 'batch'" in told[0]


def under_torchrun(tmp_path: Path, code: str, config: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, str(script), "train", str(config)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )


def test_what_both_find_once_they_have_joined(config: Path, tmp_path: Path) -> None:
    config.write_text(config.read_text().replace("sequence_length = 16", "sequence_length = 100000"))
    done = under_torchrun(tmp_path, COMMAND.replace("; ", "\n"), config)
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    (line,) = errors(done.stderr)
    assert line.startswith("error: data.sequence_length is 100000")


def test_what_one_rank_finds_ends_both(config: Path, tmp_path: Path) -> None:
    done = under_torchrun(tmp_path, ONE_FAILS, config)
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr, done.stderr
    told = errors(done.stderr)
    assert "error on rank 1 of 2: this rank has no room" in told
    for line in told:
        assert line.startswith(("error on rank 1 of 2: this", "error on rank 0 of 2: another process of this run has"))
    assert "TrainingError" not in done.stderr and "RuntimeError" not in done.stderr  # no traceback but torchrun's own
