"""Noisy logarithms of ratios, drawn towards their mean as far as each can err.

    drawn = m + τ² / (τ² + ε²) · (y − m),      m = Σ y / (τ² + ε²) / Σ 1 / (τ² + ε²)

ε is how far one errs, τ what really sets them apart. τ is estimated from the numbers themselves, as empirical Bayes
does (Efron & Morris 1973), by moments that allow each its own ε (DerSimonian & Laird 1986). Where they differ by no
more than they err, all are drawn to one mean.
"""

from __future__ import annotations

from collections.abc import Mapping


def drawn_to_mean(logs: Mapping[str, float], errors: Mapping[str, float]) -> dict[str, float]:
    """Key → drawn logarithm.

    Args:
        logs: key → logarithm.
        errors: key → its standard error, positive.
    """
    if not logs:
        return {}
    precision = {key: errors[key] ** -2 for key in logs}
    apart = _variance_apart(logs, precision)
    weights = {key: 1 / (apart + 1 / precision[key]) for key in logs}
    mean = sum(weights[key] * value for key, value in logs.items()) / sum(weights.values())
    return {key: mean + apart * weights[key] * (value - mean) for key, value in logs.items()}


def _variance_apart(logs: Mapping[str, float], precision: Mapping[str, float]) -> float:
    """τ² by moments: the variance that errors of these precisions do not account for."""
    if len(logs) < 2:
        return 0.0
    total = sum(precision.values())
    mean = sum(precision[key] * value for key, value in logs.items()) / total
    excess = sum(precision[key] * (value - mean) ** 2 for key, value in logs.items()) - (len(logs) - 1)
    return max(0.0, excess / (total - sum(p**2 for p in precision.values()) / total))
