"""Help in sections: options stand under the panel that they name, in the order in which panels are first named.

The parser groups options only in its boxed help, which needs a terminal that can draw boxes; this is the same in plain
text, for any terminal and for files.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class PanelledCommand(TyperCommand):
    """A command whose help is written panel by panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options without a panel last, and in between every panel."""
        sections: dict[str, list[tuple[str, str]]] = {}
        loose: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            panel = getattr(parameter, "rich_help_panel", None)
            if parameter.param_type_name == "argument":
                panel = "Arguments"
            (loose if panel is None else sections.setdefault(panel, [])).append(record)
        for title, records in (*sections.items(), ("Options", loose)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
