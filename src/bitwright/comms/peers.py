"""Who is there: processes of a group that tell each other where they are, so that one that fails can be named.

A backend says "connection closed" or nothing for minutes. Beside its messages every rank therefore writes two things
into the store of the rendezvous: what it is about to do, and, from a thread, that it is alive. When a collective fails
or takes longer than the timeout, the others read there

    no sign of life    the process is gone, or stopped
    behind             it lives, and is still before a step that others have reached

and the error names the rank and the step. The store is a connection of its own, so that it works while the backend
hangs. What ranks have been asked to do is compared before the first message: mismatched types make backends hang, or
worse, add up bytes of one type as another.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from bitwright.catalog import nearest_name_hint
from bitwright.errors import CommsError, UnknownName

_BEAT_EVERY_S = 0.25
#: Without a sign of life for so long a rank counts as gone.
_GONE_AFTER_S = 2.0
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Peers:
    """The processes that torchrun started, joined for collectives with a timeout.

    Raises:
        CommsError: no torchrun, or a rank that does not come in time.
    """

    def __init__(self, *, backend: str, timeout_s: float) -> None:
        missing = [name for name in _ENVIRONMENT if name not in os.environ]
        if missing:
            raise CommsError(
                f"{missing[0]} is not set, so there is one process and nobody to talk to; start it with: torchrun "
                "--nproc-per-node N --no-python bitwright comm bench"
            )
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.timeout_s = timeout_s
        self.device = _device(backend)
        self._step = 0
        self._is_closed = threading.Event()
        self._store = self._connect()
        self._thread = threading.Thread(target=self._beat, args=(self._connect(is_first=False),), daemon=True)
        self._say("here", 0)
        self._raise_if_missing("here/0", "to start")
        self._thread.start()
        self._guarded("joining", lambda: self._join(backend))

    def _join(self, backend: str) -> None:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout_s),
        )
        # NCCL connects all ranks at the first collective, which the steps of a schedule are not.
        dist.all_reduce(torch.zeros(1, device=self.device))

    def agree(self, asked: dict[str, object]) -> None:
        """Refuse to go on where ranks were asked for different things.

        Raises:
            CommsError: the first difference, with both ranks and both values.
        """
        self._store.set(f"asked/{self.rank}", json.dumps(asked))
        self._raise_if_missing("asked", "to say what it was asked for")
        first = json.loads(self._store.get("asked/0"))
        for rank in range(1, self.size):
            other = json.loads(self._store.get(f"asked/{rank}"))
            for name, value in first.items():
                if other.get(name) != value:
                    raise CommsError(
                        f"rank {rank} has {name} {_spell(other.get(name))} where rank 0 has {_spell(value)}; start all "
                        "ranks with the same options"
                    )

    def run(self, what: str, work: Callable[[], object]) -> None:
        """Do something that all ranks do together.

        Raises:
            CommsError: it failed or took longer than the timeout; the rank that is gone or behind is named.
        """
        self._step += 1
        self._say("at", self._step)
        self._guarded(what, work)

    def close(self) -> None:
        """Leave the group, once all are through."""
        self.run("leaving", dist.barrier)
        self._is_closed.set()
        self._thread.join()
        dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave after an error; the rank that keeps the store stays until the others have read who failed."""
        deadline = time.monotonic() + 2 * _GONE_AFTER_S + 1
        try:
            self._store.set(f"left/{self.rank}", "")
            others = [rank for rank in range(self.size) if rank != self.rank] if self.rank == 0 else []
            while others and time.monotonic() < deadline:
                others = [rank for rank in others if not self._store.check([f"left/{rank}"])]
                time.sleep(0.05)
        except (RuntimeError, dist.DistError):
            return

    def _connect(self, *, is_first: bool = True) -> TCPStore:
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            return TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                self.size,
                is_master=self.rank == 0 and is_first and not is_agents,
                timeout=timedelta(seconds=self.timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, dist.DistError) as error:
            raise CommsError(
                f"rank 0 does not answer at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
                f"{self.timeout_s:g} s ({_first_line(error)}); start it, or open that port"
            ) from error

    def _say(self, what: str, step: int) -> None:
        self._store.set(f"{what}/{step}/{self.rank}" if what == "here" else f"{what}/{self.rank}", str(step))

    def _raise_if_missing(self, what: str, purpose: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        missing = list(range(self.size))
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._store.check([f"{what}/{rank}"])]
            time.sleep(0.02 if missing else 0)
        if missing:
            raise CommsError(
                f"{_ranks(missing)} did not come within {self.timeout_s:g} s {purpose}; see what it printed, or give "
                "it a longer --timeout"
            )

    def _beat(self, store: TCPStore) -> None:
        count = 0
        while not self._is_closed.wait(_BEAT_EVERY_S):
            count += 1
            try:
                store.set(f"beat/{self.rank}", str(count))
            except (RuntimeError, dist.DistError):
                return

    def _guarded(self, what: str, work: Callable[[], object]) -> None:
        started = time.monotonic()
        try:
            work()
        except (RuntimeError, dist.DistError) as error:
            found = self._find_culprit(time.monotonic() - started)
            raise CommsError(f"{what}: {found}; see what that rank printed ({_first_line(error)})") from error

    def _find_culprit(self, waited_s: float) -> str:
        try:
            before = self._beats()
            time.sleep(_GONE_AFTER_S)
            after = self._beats()
            silent = [rank for rank in range(self.size) if before[rank] == after[rank] and rank != self.rank]
            at = {rank: int(self._store.get(f"at/{rank}")) for rank in range(self.size) if rank not in silent}
        except (RuntimeError, dist.DistError):
            return f"rank 0, which keeps the store, is gone after {waited_s:.0f} s"
        if silent:
            return f"{_ranks(silent)} gave no sign of life for {_GONE_AFTER_S:g} s (ended, or stopped)"
        behind = [rank for rank, step in at.items() if step < self._step]
        if behind:
            return f"{_ranks(behind)} lives but has not come to this step within {waited_s:.0f} s"
        return f"all ranks live and are here, and the backend failed after {waited_s:.0f} s"

    def _beats(self) -> list[bytes]:
        keys = [f"beat/{rank}" for rank in range(self.size)]
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]


def _device(backend: str) -> torch.device:
    """Where a backend's numbers lie: Gloo's in memory, NCCL's on the GPU of the local rank."""
    known = dist.Backend.backend_capability
    if backend not in known:
        raise UnknownName(
            f"unknown backend {backend!r}{nearest_name_hint(backend, list(known))} Known backends: {', '.join(known)}"
        )
    if "cpu" in known[backend]:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CommsError(f"backend '{backend}' moves numbers of GPUs, and torch sees none here; use --backend gloo")
    local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(local)
    return local


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _spell(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:160]
