"""A plan and its evidence as one self-contained HTML page: no network, no scripts to load, equal plans → equal bytes.

The page answers, from top to bottom: is the budget met, what was chosen where, how far can the predictions be trusted,
what else was on offer, where does the error sit; then every figure as a table, and what is needed to repeat it.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import Any

from bitwright.errors import MissingExtra
from bitwright.plan import Plan
from bitwright.report import units
from bitwright.report.comparison_words import say_uniform
from bitwright.report.figures import draw_frontier, draw_predictions, draw_site_errors
from bitwright.report.groups import bits_of_schemes, total_roles
from bitwright.report.layer_map import build_layer_map
from bitwright.report.limit_words import say_bound, say_limits
from bitwright.report.page import load_templates
from bitwright.report.palette import ink_on, scheme_colours
from bitwright.report.pareto_figure import draw_pareto
from bitwright.report.whole_file import write_file


def raise_if_no_report_extra() -> None:
    """Raise ``MissingExtra`` where a package that reports need is not installed: before long work, not after."""
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "report", "writing a report")


def render_report(plan: Plan) -> bytes:
    """Return the report of ``plan`` as UTF-8 HTML.

    Raises ``MissingExtra`` where jinja2 or matplotlib is not installed.
    """
    page: str = load_templates().get_template("report.html.j2").render(_context(plan))
    return page.encode("utf-8")


def write_report(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write the report of ``plan`` as one HTML file, completely or not at all; return its path.

    Raises ``ReportError`` where the file cannot be written.
    """
    return write_file(Path(path), render_report(plan), "the report")


def _context(plan: Plan) -> dict[str, Any]:
    bits = bits_of_schemes(plan)
    colours = scheme_colours(list(bits))
    num_sites = {scheme: sum(site.scheme == scheme for site in plan.sites) for scheme in bits}
    of_weights = [site for site in plan.sites if site.kind == "weight"]
    weights = {scheme: sum(math.prod(site.shape) for site in of_weights if site.scheme == scheme) for scheme in bits}
    total = max(sum(weights.values()), 1)
    return {
        "plan": plan,
        "balanced": _balanced,
        "roles": total_roles(plan),
        "legend": [
            {
                "scheme": scheme,
                "colour": colours[scheme],
                "ink": ink_on(colours[scheme]),
                "bits": bits[scheme],
                "num_sites": num_sites[scheme],
                "share": weights[scheme] / total,
            }
            for scheme in bits
        ],
        "colours": colours,
        "map": build_layer_map(plan, colours),
        "prediction_plot": draw_predictions(plan, colours),
        "frontier_plot": draw_frontier(plan),
        "error_plot": draw_site_errors(plan, colours),
        "pareto_plot": draw_pareto(plan),
        "pareto": [{"point": point, "memory": point.memory_bytes} for point in plan.pareto],
        "binding": say_limits(plan),
        "uniform": [
            {"found": found, "sentence": say_uniform(plan.summary.weight_bytes, found)} for found in plan.uniform
        ],
        # Stored bytes of the same model in a 16-bit format.
        "bytes_16_bit": 2 * plan.model.params,
        "limits": [
            {
                "limit": limit,
                "title": units.LIMIT_TITLES.get(limit.name, limit.name),
                "at": say_bound(limit),
                "is": units.spell_limit_value(limit.name, limit.value),
            }
            for limit in plan.limits
        ],
        "sites_by_kl": sorted(plan.sites, key=lambda site: (-site.predicted_kl, site.name)),
    }


def _balanced(count: int, most: int) -> int:
    """Columns for so many tiles, at most `most`, so that no row is more than needed shorter than the others."""
    rows = math.ceil(count / most)
    return math.ceil(count / rows)
