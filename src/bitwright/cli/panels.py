"""Help in plain text, for any terminal and for files.

    options    under the panel that they name, in the order in which panels are first named
    arguments  PLAN, never {PLAN}; what they take stands in their own sentence
    values     N, X, TEXT and PATH, whatever the parser calls its types
    verbs      each with its whole first sentence

The parser groups options only in its boxed help, which needs a terminal that can draw boxes, names types in the words
of its release, and cuts sentences off.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

#: What releases of the parser call a type → what a reader sees.
_VALUES = (
    (re.compile(r"<int(eger)?( range)?>|\bINTEGER( RANGE)?\b", re.IGNORECASE), "N"),
    (re.compile(r"<float( range)?>|\bFLOAT( RANGE)?\b", re.IGNORECASE), "X"),
    (re.compile(r"<(str|text)>", re.IGNORECASE), "TEXT"),
    (re.compile(r"<path>", re.IGNORECASE), "PATH"),
)
_BRACES = re.compile(r"\{([^{}]+)\}")
_TYPE = re.compile(r" +<[^<>]*>$")
#: More columns than any sentence has.
_ALL_THE_ROOM = 1000


class PlainCommand(TyperCommand):
    """A command with its help panel by panel."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """As the parser has it, arguments without braces."""
        return [without_braces(piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options without a panel last, and in between every panel."""
        sections: dict[str, list[tuple[str, str]]] = {}
        loose: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            panel = getattr(parameter, "rich_help_panel", None)
            if parameter.param_type_name == "argument":
                panel = "Arguments"
                name = _TYPE.sub("", without_braces(name))
            for pattern, word in _VALUES:
                name = pattern.sub(word, name)
            (loose if panel is None else sections.setdefault(panel, [])).append((name, text))
        for title, records in (*sections.items(), ("Options", loose)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class PlainGroup(TyperGroup):
    """Verbs, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of them."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(_ALL_THE_ROOM)) for name, command in commands if command is not None]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def without_braces(text: str) -> str:
    """{PLAN} as PLAN, as releases of the parser before had it."""
    return _BRACES.sub(r"\1", text)
