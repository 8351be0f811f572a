"""Templates of pages: every value is escaped, an unknown name is an error, figures are spelled as everywhere else."""

from __future__ import annotations

from typing import Any

from bitwright.errors import MissingExtra
from bitwright.report import comparison_words, units


def load_templates() -> Any:
    """Return the jinja2 environment of ``report/templates``.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise MissingExtra("jinja2", "report", "writing a report") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bitwright.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_keep_units,
    )
    environment.filters.update(
        bytes=units.spell_bytes,
        count=units.spell_count,
        number=units.spell_number,
        percent=units.spell_percent,
        seconds=units.spell_seconds,
        excess=units.spell_excess,
        share=units.spell_share,
        signed=comparison_words.spell_signed,
        decibels=units.spell_decibels,
    )
    return environment


def _keep_units(value: Any) -> Any:
    """Text whose numbers no line parts from their units; markup (plots) stays as it is."""
    return units.BEFORE_UNIT.sub("\u00a0", value) if type(value) is str else value
