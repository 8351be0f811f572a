"""Random words against the vectors of their authors, and against Triton's generator."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from bitwright.formats.philox import philox4x32, random_words

#: Random123 1.14, tests/kat_vectors, philox4x32 10: counter, key, block.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "block"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, block: str) -> None:
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in words(counter))
    k0, k1 = words(key)
    assert [int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == words(block)


def test_a_word_depends_on_seed_and_index_alone() -> None:
    assert random_words(0, 1)[0] == 0x6627E8D5
    np.testing.assert_array_equal(random_words(5, 1000)[:10], random_words(5, 10))
    index = np.arange(1000, dtype=np.uint64)
    zero = np.zeros_like(index)
    np.testing.assert_array_equal(random_words(5 + (7 << 32), 1000), philox4x32((index, zero, zero, zero), (5, 7))[0])
    assert random_words(3, 0).shape == (0,)


def test_words_look_uniform() -> None:
    """Each bit is set half of the time, within five standard deviations."""
    drawn = random_words(11, 100_000)
    for bit in range(32):
        share = np.mean((drawn >> np.uint32(bit)) & np.uint32(1))
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(drawn.size)


_TRITON = """
import torch, triton, triton.language as tl

@triton.jit
def draw(out, seed, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out + index, tl.randint(seed, index).to(tl.int32, bitcast=True))

for seed in (0, 1234567890123456789):
    out = torch.empty(64, dtype=torch.int32)
    draw[(1,)](out, seed, 64)
    print(*(word % 2**32 for word in out.tolist()))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_words_are_those_of_triton(tmp_path: pytest.TempPathFactory) -> None:
    script = tmp_path / "draw.py"  # type: ignore[operator]
    script.write_text(_TRITON, encoding="utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    found = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert found == [random_words(seed, 64).tolist() for seed in (0, 1234567890123456789)]
