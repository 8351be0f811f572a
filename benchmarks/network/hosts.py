"""A cluster in one machine: a network namespace for each rank, a bridge for each node, thin links between nodes.

    rank 0 ─┐ inner                       inner ┌─ rank 2
    rank 1 ─┴─ node 0 ── outer ── core ── outer ┴─ node 1

Every link has a token bucket in both directions (`tc tbf`): inner at the port of each rank, outer at the port of each
node. Where a delay is asked for, the link of a node passes through a relay (`relay.py`) that holds every frame for so
long; `tc netem` is not built into every kernel. Needs root, iproute2 and veth; all names begin with "bw-" and are
removed again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

FABRIC = "bw-fabric"
RELAY = Path(__file__).parent / "relay.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What to build."""

    num_nodes: int
    ranks_per_node: int
    #: 10⁶ bits per second of each rank's link, and of each node's.
    inner_mbit: float
    outer_mbit: float
    #: Seconds that a frame is held on its way out of a node.
    delay_s: float = 0.0

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


def address(rank: int) -> str:
    """Where a rank is reached."""
    return f"10.77.{rank // 250}.{rank % 250 + 1}"


def host(rank: int) -> str:
    """The namespace of a rank."""
    return f"bw-rank{rank}"


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _inside(namespace: str, *words: str) -> None:
    _run("ip", "netns", "exec", namespace, *words)


def _limit(namespace: str, port: str, mbit: float) -> None:
    # A bucket of 4 ms. What an idle link has saved passes without a limit, and a larger one would let a good part of a
    # message of 64 KiB pass; a smaller one is full before a busy processor comes back to it, and time is lost for good.
    # The queue holds what all sockets may send: nothing is lost, so nothing is sent again.
    burst = max(16_000, int(mbit * 1e6 / 8 * 0.004))
    _inside(
        namespace, "tc", "qdisc", "add", "dev", port, "root", "tbf",
        "rate", f"{mbit}mbit", "burst", str(burst), "limit", "32mb",
    )  # fmt: skip


def _bridge(name: str) -> None:
    _inside(FABRIC, "ip", "link", "add", name, "type", "bridge")
    _inside(FABRIC, "ip", "link", "set", name, "up")


def _join(near: str, far: str, bridge: str) -> None:
    """A cable in the fabric whose far end is a port of a bridge."""
    _inside(FABRIC, "ip", "link", "add", near, "type", "veth", "peer", "name", far)
    for port in (near, far):
        _inside(FABRIC, "ip", "link", "set", port, "up")
    _inside(FABRIC, "ip", "link", "set", far, "master", bridge)


@contextmanager
def running(cluster: Cluster) -> Iterator[None]:
    """Build a cluster, and take it down again whatever happens."""
    tear_down()
    relays: list[subprocess.Popen[bytes]] = []
    try:
        _run("ip", "netns", "add", FABRIC)
        _bridge("core")
        for node in range(cluster.num_nodes):
            _bridge(f"node{node}")
            relays += _uplink(cluster, node)
        for rank in range(cluster.num_ranks):
            _rank(cluster, rank)
        yield
    finally:
        for relay in relays:
            relay.send_signal(signal.SIGTERM)
            relay.wait(timeout=10)
        tear_down()


def _uplink(cluster: Cluster, node: int) -> list[subprocess.Popen[bytes]]:
    up, down = f"up{node}", f"down{node}"
    if cluster.delay_s <= 0:
        _join(up, down, "core")
        _inside(FABRIC, "ip", "link", "set", up, "master", f"node{node}")
        _limit(FABRIC, up, cluster.outer_mbit)
        _limit(FABRIC, down, cluster.outer_mbit)
        return []
    for port, bridge in ((up, f"node{node}"), (down, "core")):
        _inside(FABRIC, "ip", "tuntap", "add", "dev", port, "mode", "tap")
        _inside(FABRIC, "ip", "link", "set", port, "master", bridge)
        _inside(FABRIC, "ip", "link", "set", port, "up")
        _limit(FABRIC, port, cluster.outer_mbit)
    command = ["ip", "netns", "exec", FABRIC, sys.executable, str(RELAY), up, down, str(cluster.delay_s)]
    relay = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert relay.stdout is not None
    relay.stdout.readline()  # it has both ports
    return [relay]


def _rank(cluster: Cluster, rank: int) -> None:
    name, port = host(rank), f"port{rank}"
    _run("ip", "netns", "add", name)
    _inside(FABRIC, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    _inside(FABRIC, "ip", "link", "set", port, "master", f"node{rank // cluster.ranks_per_node}")
    _inside(FABRIC, "ip", "link", "set", port, "up")
    _inside(name, "ip", "addr", "add", f"{address(rank)}/16", "dev", "eth0")
    _inside(name, "ip", "link", "set", "eth0", "up")
    _inside(name, "ip", "link", "set", "lo", "up")
    # Windows that are open from the start: acknowledgements wait behind data here, and what estimates a rate from
    # them, or begins slowly, would measure itself. Nothing is lost, so nothing has to be found out.
    # Small buffers keep queues short, behind which the handshake of the next message would wait; a delay needs what is
    # on its way there and back, through two nodes' links, four times over (a buffer counts headers and spare room too).
    room = 262_144 + int(4 * cluster.outer_mbit * 1e6 / 8 * 4 * cluster.delay_s)
    for setting in ("congestion_control=reno", "slow_start_after_idle=0", f"rmem=4096 {room} {room}",
                    f"wmem=4096 {room} {room}"):  # fmt: skip
        _inside(name, "sysctl", "-q", "-w", f"net.ipv4.tcp_{setting}")
    route = ("10.77.0.0/16", "dev", "eth0", "src", address(rank), "initcwnd", "4000", "initrwnd", "4000")
    # A queue of a second is no loss: waiting for less before sending again would fill the link with copies.
    route += ("rto_min", "10s")
    _inside(name, "ip", "route", "replace", *route)
    _limit(FABRIC, port, cluster.inner_mbit)
    _limit(name, "eth0", cluster.inner_mbit)


def tear_down() -> None:
    """Remove every namespace whose name begins as ours do."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        if name == FABRIC or name.startswith("bw-rank"):
            _run("ip", "netns", "del", name)


def launch(cluster: Cluster, script: Path, arguments: list[str], *, timeout_s: float, pin: str | None) -> None:
    """Run a script as every rank of a built cluster, and wait for all; what rank 0 prints is passed on at once.

    Raises:
        RuntimeError: a rank failed or took too long; its last words are in the message.
    """
    source = Path(__file__).parents[2] / "src"
    processes = []
    for rank in range(cluster.num_ranks):
        environment = {
            **os.environ,
            "PYTHONPATH": str(source),
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(cluster.num_ranks),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        command = ["ip", "netns", "exec", host(rank), sys.executable, str(script), *arguments]
        if pin:
            command = ["taskset", "-c", pin, *command]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said: list[list[str]] = [[] for _ in processes]
    readers = [Thread(target=_read, args=(rank, process, said[rank])) for rank, process in enumerate(processes)]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + timeout_s
    failed = ""
    for rank, process in enumerate(processes):
        try:
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
            why = f"rank {rank} ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            why = f"rank {rank} took more than {timeout_s:g} s"
        readers[rank].join()
        if process.returncode:
            failed = failed or f"{why}: {''.join(said[rank])[-1500:]}"
            deadline = time.monotonic()
    if failed:
        raise RuntimeError(failed)


def _read(rank: int, process: subprocess.Popen[str], said: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if rank == 0:
            print(line, end="", flush=True)
