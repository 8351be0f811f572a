"""Counters over HTTP: what is scraped is what happened."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

import prometheus_client
import torch
from small_plans import uniform_plan
from torch import nn

from bitwright.inference import FallbackSettings, apply
from bitwright.models import find_sites


def scraped(port: int) -> dict[tuple[str, str | None], float]:
    """(sample, matrix) → value, as a server that scrapes reads the text on the wire."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["model"] for sample in samples} == {"small"}
    return {(sample.name, sample.labels.get("matrix")): sample.value for sample in samples}


def test_what_fell_back_is_scraped() -> None:
    """Inputs of INT8 under a scale of 0.02 reach 2.54; of eight rows two overflow, then four of four."""
    from bitwright.inference.metrics import RunCollector

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False)).requires_grad_(False)
    settings = FallbackSettings(max_fallbacks_per_batch=3)
    planned: Any = apply(
        uniform_plan(find_sites(model), "int8_static"), model, mode="native", dtype=torch.float32, fallback=settings
    )
    registry = prometheus_client.CollectorRegistry()
    registry.register(RunCollector(planned.bitwright_run, "small"))
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        before = scraped(server.server_port)
        x = torch.rand(8, 64)
        x[2, 5], x[6, 0] = 40.0, -3.0
        planned(x)
        planned(torch.full((4, 64), 9.0))
        after = scraped(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    (matrix,) = planned.bitwright_run.counters.fallbacks
    assert before["bitwright_run_fallback_calls_total", matrix] == 0
    found = {
        match[1]: value
        for (name, of_matrix), value in after.items()
        if (match := re.fullmatch(r"bitwright_run_fallback_(\w+)_total", name)) and of_matrix == matrix
    }
    assert found == {
        "calls": 2,
        "tokens": 12,
        "overflows": 2 + 4 * 64,
        "overflowed_tokens": 6,
        "token_fallbacks": 2,
        "batch_fallbacks": 1,
        "held_calls": 0,
        "switches": 0,
    }
    assert after["bitwright_run_weight_bytes", None] == planned.bitwright_run.weight_bytes
    assert after["bitwright_run_repeated_steps_total", None] == 0


def test_expansions_say_what_they_were_for(make_tiny_model: Any) -> None:
    from bitwright.inference.metrics import RunCollector

    model = make_tiny_model("mixtral")
    planned: Any = apply(uniform_plan(find_sites(model), "int8_w"), model, mode="packed", dtype=torch.float32)
    experts = planned.model.layers[0].mlp.experts
    torch.einsum("tk,enk->etn", torch.randn(3, 64), experts.gate_up_proj)
    registry = prometheus_client.CollectorRegistry()
    registry.register(RunCollector(planned.bitwright_run, "mixture"))
    labels = {"model": "mixture", "what": "model.layers.0.mlp.experts.gate_up_proj by einsum"}
    assert registry.get_sample_value("bitwright_run_expansions_total", labels) == 1
