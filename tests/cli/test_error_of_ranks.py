"""Errors under torchrun: once where all ranks have them, with their ranks where some have."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from bitwright.cli import error_of_ranks, main
from bitwright.cli.error_of_ranks import tell_among


def told(sentences: dict[int, str], size: int, *, late_s: float = 0.0, wait_s: float = 5.0) -> list[str]:
    """What ranks write that fail with these sentences, all at once, or one after another."""
    store, lines = dist.HashStore(), []
    store.set_timeout(timedelta(seconds=5))
    threads = []
    for rank, sentence in sentences.items():
        arguments = (store, rank, size, sentence)
        threads.append(
            threading.Thread(target=tell_among, args=arguments, kwargs={"wait_s": wait_s, "write": lines.append})
        )
        threads[-1].start()
        time.sleep(late_s)
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    return lines


def test_what_all_have_is_told_once_and_at_once() -> None:
    started = time.monotonic()
    assert told(dict.fromkeys(range(8), "no such file"), 8) == ["error: no such file"]
    assert time.monotonic() - started < 4


def test_it_is_told_once_however_late_others_are() -> None:
    assert told({2: "no", 1: "no", 0: "no"}, 3, late_s=0.2) == ["error: no"]


def test_what_some_have_names_them() -> None:
    assert told({1: "no such file"}, 4, wait_s=0.2) == ["error on rank 1 of 4: no such file"]
    assert told({3: "no", 1: "no"}, 4, wait_s=0.5) == ["error on ranks 1, 3 of 4: no"]
    lines = told({0: "no", 1: "yes", 2: "no"}, 3)
    assert sorted(lines) == ["error on rank 1 of 3: yes", "error on ranks 0, 2 of 3: no"]


def test_a_store_that_is_gone_hides_nothing() -> None:
    class Gone:
        def set(self, *_: object) -> None:
            raise dist.DistNetworkError("connection reset")

    lines: list[str] = []
    tell_among(Gone(), 1, 2, "no such file", write=lines.append)
    assert lines == ["error on rank 1 of 2: no such file"]


def test_a_store_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped:
        def set(self, *_: object) -> None:
            threading.Event().wait()

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(error_of_ranks, "WAIT_S", 0.05)
    monkeypatch.setattr(error_of_ranks, "connect_store", lambda **_: Stopped())
    started = time.monotonic()
    error_of_ranks.tell_error("no such file")
    assert time.monotonic() - started < 5
    assert capsys.readouterr().err == "error on rank 1 of 2: no such file\n"


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "2", "RANK": "1"}])
def test_one_process_says_it_plainly(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One, or several that do not know where the others are."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "policies", "bf17"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown policy 'bf17'")
