"""What a packed model counts, as a server exports it: a collector for `prometheus_client`.

    from prometheus_client import REGISTRY, start_http_server

    REGISTRY.register(RunCollector(planned.bitwright_run, "my-model"))
    start_http_server(9000)

Counts are read when they are scraped: running costs nothing more. A name is `bitwright_run_<count>_total`, with the
label "model"; counts of one matrix, or of one kind of value, have the label "matrix" too, and expansions what they
were made for.

    fallback_…          calls, tokens, overflows, and what was computed again: of inputs and values that may overflow
    padding_…           numbers that kernels were given, and those that were filling
    expansions          packed weights that were expanded for a function that is no product
    …_steps             steps of generation that overflowed, and those that were run again
    weight_bytes        a gauge: what all weights take in memory
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from bitwright.errors import MissingExtra
from bitwright.inference.counters import FallbackCounts
from bitwright.inference.run_report import RunReport

_PREFIX = "bitwright_run"
_FALLBACKS = {
    "calls": "Calls of what may overflow: inputs of matrices, and rounded values",
    "tokens": "Rows of inputs of these calls",
    "overflows": "Inputs beyond the range of the format, counted before they were cast",
    "overflowed_tokens": "Rows with at least one such input",
    "token_fallbacks": "Rows that were computed again by themselves in the wide format",
    "batch_fallbacks": "Calls that were sent to the wide format as a whole",
    "held_calls": "Calls that ran wide because calls before them had overflowed",
    "switches": "How often a matrix was held in the wide format, or let go",
}
assert set(_FALLBACKS) == {field.name for field in fields(FallbackCounts)}


class RunCollector:
    """Gives the counters of one model to a registry.

    Args:
        run: the `bitwright_run` of a model under a plan.
        model: its name, for the label.

    Raises:
        MissingExtra: prometheus_client is not installed.
    """

    def __init__(self, run: RunReport, model: str) -> None:
        try:
            self._core: Any = importlib.import_module("prometheus_client.core")
        except ImportError as error:
            raise MissingExtra("prometheus-client", "monitor", "exporting counters") from error
        self._run, self._model = run, model

    def collect(self) -> Iterable[Any]:
        """All counts as they are now, as metric families."""
        counters = self._run.counters
        for name, what in _FALLBACKS.items():
            of_matrix = {matrix: getattr(counts, name) for matrix, counts in list(counters.fallbacks.items())}
            yield self._counter(f"fallback_{name}", what, "matrix", of_matrix)
        padding = counters.padding
        yield self._counter("padding_values", "Numbers that kernels were given", None, padding.values)
        yield self._counter("padding_padded_values", "Those of them that were filling", None, padding.padded_values)
        yield self._counter("expansions", "Packed weights expanded for no product", "what", dict(counters.expansions))
        yield self._counter("overflowed_steps", "Steps in which something overflowed", None, counters.overflowed_steps)
        yield self._counter("repeated_steps", "Steps that were run again for it", None, counters.repeated_steps)
        gauge = self._core.GaugeMetricFamily(
            f"{_PREFIX}_weight_bytes", "Bytes of all weights in memory", labels=["model"]
        )
        gauge.add_metric([self._model], self._run.weight_bytes)
        yield gauge

    def _counter(self, name: str, what: str, label: str | None, found: dict[str, int] | int) -> Any:
        labels = ["model"] if label is None else ["model", label]
        family = self._core.CounterMetricFamily(f"{_PREFIX}_{name}", what, labels=labels)
        if isinstance(found, int):
            family.add_metric([self._model], found)
        else:
            for value, count in found.items():
                family.add_metric([self._model, value], count)
        return family
