"""What a weight aims at under changed inputs, against the objective written out window by window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize import ROUNDINGS, SCHEMES
from bitwright.quantize.compensation import compensated
from bitwright.quantize.seen import Seen

ROWS, COLUMNS, TOKENS, WINDOW = 5, 12, 100, 8


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lacking", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_the_aim_has_no_slope(with_gradients: bool, lacking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitwright.quantize.seen.product_dtype", lambda: torch.float32)
    monkeypatch.setattr("bitwright.quantize.compensation.SHRINKAGE", 1.0)
    w, meant = drawn(ROWS, COLUMNS, seed=0), drawn(TOKENS, COLUMNS, seed=1)
    read = meant + 0.2 * drawn(TOKENS, COLUMNS, seed=2) + 0.1
    g = drawn(TOKENS, ROWS, seed=3) if with_gradients else None
    seen = Seen(x_TK=read, g_TN=g, window_tokens=WINDOW)
    lack = drawn(TOKENS, ROWS, seed=4) + 0.5 if lacking else torch.zeros(TOKENS, ROWS)
    aim = compensated(w, seen, meant, lack if lacking else None).double().requires_grad_(True)
    off = aim @ read.double().T - w.double() @ meant.double().T - lack.double().T
    if g is None:
        damage = off.square().sum() / TOKENS
    else:
        # products of two tokens fade by the share of all runs of WINDOW tokens in their window that have both
        runs = [
            slice(max(start, first), min(first + WINDOW, start + WINDOW, TOKENS))
            for start in range(0, TOKENS, WINDOW)
            for first in range(start - WINDOW + 1, min(start + WINDOW, TOKENS))
        ]
        parts = [off[:, run] @ g[run].double() for run in runs]
        faded = sum((part.square().sum() for part in parts), torch.zeros(())) / WINDOW
        damage = faded / g.double().square().sum()
    plain = Seen(x_TK=read, g_TN=g, window_tokens=WINDOW).weighted.matrix_KK
    moved = (aim - w).square().sum()
    raised = float(plain.trace()) * 0.3 / 1.3 / COLUMNS  # the diagonal is raised by three tenths of its mean
    (damage + raised * moved).backward()
    assert aim.grad is not None
    assert float(aim.grad.abs().max()) < 1e-5 * float(damage.detach() + 1)
    assert float((aim.detach() - w).abs().max()) > 0.01


def test_inputs_as_they_were_meant_leave_the_weight() -> None:
    w, x = drawn(ROWS, COLUMNS, seed=0), drawn(TOKENS, COLUMNS, seed=1)
    assert torch.equal(compensated(w, Seen(x_TK=x, g_TN=drawn(TOKENS, ROWS, seed=2)), x), w)


def test_learned_codes_are_no_choice_of_a_search() -> None:
    learned = ROUNDINGS["learned"]
    assert not any(learned.applies_to(s.weights) for s in SCHEMES.values() if s.weights is not None)
    scheme = SCHEMES["int4_g32"].weights
    assert scheme is not None
    with pytest.raises(SchemeError, match="--effort high"):
        learned.quantize(torch.ones(2, 32), scheme, None)
