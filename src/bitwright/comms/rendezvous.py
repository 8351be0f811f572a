"""What torchrun tells its processes, and the store at which they meet.

The store works whatever state a backend is in: ranks write there who they are, how far they have come and what went
wrong. torchrun keeps it; where somebody else started the ranks, the first one does.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def missing_variables() -> list[str]:
    """Variables of the environment that a process of many needs, and that are not set."""
    return [name for name in _VARIABLES if name not in os.environ]


def is_kept_by_torchrun() -> bool:
    """Whether the store is torchrun's, and no rank has to keep it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_store(*, timeout_s: float, may_keep: bool = True) -> TCPStore:
    """Return a connection of this process's own to the store.

    Args:
        timeout_s: how long to wait for whoever keeps it, seconds.
        may_keep: let the first rank keep the store where torchrun does not; False for its second connection.

    Raises:
        RuntimeError: it does not answer.
    """
    # Heavy, and not for those who only ask for variables.
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=may_keep and int(os.environ["RANK"]) == 0 and not is_kept_by_torchrun(),
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
