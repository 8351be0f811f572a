"""Who is there: processes of a group that tell each other where they are, so that one that fails can be named.

A backend says "connection closed" or nothing for minutes. Beside its messages every rank therefore writes two things
into the store of the rendezvous: what it is about to do, and, from a thread, that it is alive. When a collective fails
or takes longer than the timeout, the others read there

    no sign of life    the process is gone, or stopped; a beat tells how long its rank has been there, so that the last
                       one, held against the reader's own time, tells how long the silence is
    behind             it lives, and is still before a step that others have reached

and the error names the rank and the step. The store is a connection of its own, so that it works while the backend
hangs; if it does not answer itself, whoever keeps it is named: torchrun, or rank 0 where somebody else started the
ranks. What ranks have been asked to do is compared before the first message: mismatched types make backends hang, or
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
from bitwright.comms.rendezvous import connect_store, is_kept_by_torchrun, missing_variables
from bitwright.errors import CommsError, UnknownName

_BEAT_EVERY_S = 0.25
#: Without a sign of life for so long a rank counts as gone.
_GONE_AFTER_S = 2.0


class Peers:
    """The processes that torchrun started, joined for collectives with a timeout.

    Raises:
        CommsError: no torchrun, or a rank that does not come in time.
    """

    def __init__(self, *, backend: str, timeout_s: float) -> None:
        missing = missing_variables()
        if missing:
            raise CommsError(
                f"{missing[0]} is not set, so there is one process and nobody to talk to; start it with: torchrun "
                "--nproc-per-node N --no-python bitwright comm bench"
            )
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.timeout_s = timeout_s
        self.device = _device(backend)
        self._step = 0
        #: Of this machine; who starts ranks without torchrun is taken to start all of them here.
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self._is_closed = threading.Event()
        self._beats_since = time.monotonic()
        self._keeper = "torchrun" if is_kept_by_torchrun() else "rank 0"
        self._store = self._connect()
        self._thread = threading.Thread(target=self._beat, args=(self._connect(may_keep=False),), daemon=True)
        self._guarded("joining", lambda: self._store.set(f"here/{self.rank}", ""))
        try:
            self._raise_if_missing("here", "to start")
        except CommsError:
            self.abandon()
            raise
        # All ranks begin within moments of each other: as soon as everybody is here.
        self._beats_since = time.monotonic()
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
        self._guarded("comparing", lambda: self._store.set(f"asked/{self.rank}", json.dumps(asked)))
        self._raise_if_missing("asked", "to say what it was asked for")
        all_asked: list[dict[str, object]] = []
        keys = [f"asked/{rank}" for rank in range(self.size)]
        self._guarded("comparing", lambda: all_asked.extend(json.loads(self._store.get(key)) for key in keys))
        first = all_asked[0]
        for rank, other in enumerate(all_asked):
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

        def say_and_work() -> None:
            self._store.set(f"at/{self.rank}", str(self._step))
            work()

        self._guarded(what, say_and_work)

    def close(self) -> None:
        """Leave the group, once all are through."""
        self.run("leaving", dist.barrier)
        self.stop_beating()
        dist.destroy_process_group()

    def stop_beating(self) -> None:
        """End the thread that tells of this rank; an interpreter that ends while it is in the store aborts."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join(_GONE_AFTER_S)

    def abandon(self) -> None:
        """Leave after an error; the rank that keeps the store stays until the others have read who failed."""
        _within(2 * _GONE_AFTER_S + 1, self._wait_for_the_others)

    def _wait_for_the_others(self) -> None:
        try:
            self._store.set(f"left/{self.rank}", "")
            others = list(range(1, self.size)) if self.rank == 0 and self._keeper == "rank 0" else []
            while others:
                others = [
                    r for r in others if self._store.check([f"here/{r}"]) and not self._store.check([f"left/{r}"])
                ]
                time.sleep(0.05)
        except RuntimeError:
            return

    def _connect(self, *, may_keep: bool = True) -> TCPStore:
        try:
            return connect_store(timeout_s=self.timeout_s, may_keep=may_keep)
        except RuntimeError as error:
            raise CommsError(
                f"{self._keeper} does not answer at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
                f"{self.timeout_s:g} s ({_first_line(error)}); start it, or open that port"
            ) from error

    def _raise_if_missing(self, what: str, purpose: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        missing = list(range(self.size))
        verdict = [b""]

        def look() -> None:
            # Whoever was here first gives up first, and the others with it.
            if self._store.check([f"{what}/missing"]):
                verdict[0] = self._store.get(f"{what}/missing")
            missing[:] = [rank for rank in missing if not self._store.check([f"{what}/{rank}"])]

        while missing and not verdict[0] and time.monotonic() < deadline:
            self._guarded(f"waiting for the others {purpose}", look)
            time.sleep(0.02 if missing else 0)
        if missing:
            sentence = verdict[0].decode() or (
                f"{_ranks(missing)} did not come within {self.timeout_s:g} s {purpose}; see what it printed, or give "
                "it a longer --timeout"
            )
            self._guarded("giving up", lambda: self._store.set(f"{what}/missing", sentence))
            raise CommsError(sentence)

    def _beat(self, store: TCPStore) -> None:
        while not self._is_closed.wait(_BEAT_EVERY_S):
            try:
                store.set(f"beat/{self.rank}", f"{time.monotonic() - self._beats_since:.2f}")
            except RuntimeError:
                return

    def _guarded(self, what: str, work: Callable[[], object]) -> None:
        started = time.monotonic()
        try:
            work()
        except RuntimeError as error:
            found = self._find_culprit(time.monotonic() - started)
            raise CommsError(f"{what}: {found}; see what that rank printed ({_first_line(error)})") from error

    def _find_culprit(self, waited_s: float) -> str:
        found: list[str] = []
        _within(2 * _GONE_AFTER_S + 1, lambda: found.append(self._read_culprit(waited_s)))
        return found[0] if found else self._keeper_is_gone(waited_s)

    def _read_culprit(self, waited_s: float) -> str:
        try:
            before = self._beats()
            time.sleep(_GONE_AFTER_S)
            after = self._beats()
            silent = [rank for rank in range(self.size) if before[rank] == after[rank] and rank != self.rank]
            at = {rank: self._step_of(rank) for rank in range(self.size) if rank not in silent}
        except RuntimeError:
            return self._keeper_is_gone(waited_s)
        if silent:
            last = max(float(after[rank] or 0) for rank in silent)
            silence = time.monotonic() - self._beats_since - last
            return f"{_ranks(silent)} gave no sign of life for {silence:.0f} s (ended, or stopped)"
        behind = [rank for rank, step in at.items() if step < self._step]
        if behind:
            return f"{_ranks(behind)} lives but has not come to this step within {waited_s:.0f} s"
        return f"all ranks live and are here, and the backend failed after {waited_s:.0f} s"

    def _keeper_is_gone(self, waited_s: float) -> str:
        return f"{self._keeper}, which keeps the store, does not answer after {waited_s:.0f} s (ended, or stopped)"

    def _step_of(self, rank: int) -> int:
        return int(self._store.get(f"at/{rank}")) if self._store.check([f"at/{rank}"]) else 0

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


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Do something that may wait for ever, and wait so long for it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _spell(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:160]
