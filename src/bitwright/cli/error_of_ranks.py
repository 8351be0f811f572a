"""An error under torchrun: told once, and by whom it is one of some ranks alone.

    error: …                  every rank has it; the first one tells it
    error on rank 3 of 8: …   the others have another one, or none

Ranks learn of each other's errors from the store of the rendezvous, which works whatever state the backend is in: each
puts its sentence there, waits for the others (a few seconds: most of them may be well), and tells what no rank before
it tells. None leaves before all who failed with it have told theirs, since torchrun ends all processes with the first
that ends. A store that does not answer (whoever keeps it was stopped) is asked aside, and not waited for without end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from bitwright.comms.rendezvous import connect_store, missing_variables

#: Seconds that a rank waits for others, which may have failed too.
WAIT_S = 10.0
_POLL_EVERY_S = 0.02


def tell_error(sentence: str) -> None:
    """Write an error to stderr; under torchrun once for all ranks that have it."""
    if missing_variables() or int(os.environ["WORLD_SIZE"]) == 1:
        _write(f"error: {sentence}")
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # to connect, to wait for others that fail, and to wait for them to tell
    asking = threading.Thread(target=_ask_and_tell, args=(rank, size, sentence), daemon=True)
    asking.start()
    asking.join(4 * WAIT_S)
    if asking.is_alive():
        _write(word_error(sentence, [rank], size))


def _ask_and_tell(rank: int, size: int, sentence: str) -> None:
    try:
        store = connect_store(timeout_s=WAIT_S)
    except RuntimeError:
        _write(word_error(sentence, [rank], size))
        return
    # torchrun starts processes again where it is told to
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    tell_among(store, rank, size, sentence, prefix=f"bitwright/{attempt}/", wait_s=WAIT_S)


def tell_among(
    store: Any,
    rank: int,
    size: int,
    sentence: str,
    *,
    prefix: str = "",
    wait_s: float = WAIT_S,
    write: Callable[[str], None] | None = None,
) -> None:
    """Tell an error unless a rank before this one has the same.

    Args:
        store: any of torch.distributed, shared by all ranks.
        rank, size: which rank this is, and of how many.
        sentence: the error.
        prefix: of the keys in the store.
        wait_s: how long others may take to fail, and to tell.
        write: takes the line; stderr unless given.
    """
    write = _write if write is None else write
    failed = same = [rank]
    try:
        store.set(f"{prefix}failed/{rank}", sentence)
        failed = _arrived(store, f"{prefix}failed", range(size), wait_s)
        same = [other for other in failed if store.get(f"{prefix}failed/{other}").decode() == sentence]
    except RuntimeError:  # the store went with whoever kept it
        pass
    if same[0] == rank:
        write(word_error(sentence, same, size))
    try:
        store.set(f"{prefix}told/{rank}", "")
        _arrived(store, f"{prefix}told", failed, wait_s)
    except RuntimeError:
        return


def word_error(sentence: str, ranks: list[int], size: int) -> str:
    """An error of some ranks out of `size`, as a line."""
    if len(ranks) == size:
        return f"error: {sentence}"
    return f"error on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {size}: {sentence}"


def _arrived(store: Any, what: str, ranks: Iterable[int], wait_s: float) -> list[int]:
    """Those of some ranks who have put something into the store, once all have or the time is up."""
    wanted, deadline = list(ranks), time.monotonic() + wait_s
    while True:
        found = [rank for rank in wanted if store.check([f"{what}/{rank}"])]
        if len(found) == len(wanted) or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_EVERY_S)


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
