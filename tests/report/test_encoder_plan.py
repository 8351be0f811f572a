"""A plan for a sentence encoder, shown: cosines and neighbours, and nothing of tokens that it does not predict."""

from __future__ import annotations

import io

import pytest
from fabricated_plan import make_plan
from rich.console import Console

from bitwright.cli.table import measured_rows, print_summary
from bitwright.plan import EmbeddingFigures, Interval, Measured, Neighbours, Plan
from bitwright.report import render_report


def share(mean: float) -> Interval:
    return Interval(mean=mean, low=mean - 0.01, high=mean + 0.01)


@pytest.fixture
def plan() -> Plan:
    measured = Measured(
        kl=Interval(mean=0.0046, low=0.0043, high=0.0051),
        unit="text",
        bf16_floor_kl=3.7e-5,
        embedding=EmbeddingFigures(
            cosine=share(0.9954),
            cosine_low=share(0.9929),
            neighbours=(Neighbours(k=1, overlap=share(0.934)), Neighbours(k=10, overlap=share(0.921))),
            rank_correlation=share(0.873),
            corpus=138,
        ),
        tokens=8218,
        sequences=138,
        overflows=12.5,
        fallback_rate=0.004,
    )
    return make_plan(num_layers=2).replace(task="embedding", measured=measured)


def test_on_the_command_line(plan: Plan) -> None:
    assert plan.measured is not None
    rows = dict(measured_rows(plan.measured))
    assert rows["KL"].endswith("nats per text; bf16 itself 3.70e-5")
    assert rows["cosine"].startswith("0.99540 [0.98540, 1.00540]; one text in twenty falls below 0.99290")
    assert rows["nearest"].startswith("93.4 %") and rows["nearest 10"].endswith("stay, among 138 texts")
    assert "0.873" in rows["their order"]
    assert rows["overflows"].startswith("12.5 per million rounded values; 0.4")
    assert not {"perplexity", "same top token", "repetition"} & set(rows)
    out = io.StringIO()
    print_summary(Console(file=out, width=100), plan)
    assert "nearest 10" in out.getvalue()


def test_in_the_report(plan: Plan) -> None:
    html = render_report(plan).decode()
    assert "<h2>Cosine</h2>" in html and "<h2>Nearest 10 texts</h2>" in html and "<h2>Nearest text</h2>" in html
    assert "nats per text" in html and "0.99540" in html and "nats per token" not in html
    assert "<h2>Perplexity</h2>" not in html and "<h2>Same top token</h2>" not in html
