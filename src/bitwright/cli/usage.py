"""What a person typed that the command line does not have, where the parser lets it through.

Numbers start with "−" too, so a command that takes numbers has its parser pass on every word that is no option it
knows (`NUMBERS_MAY_BE_NEGATIVE`). A misspelt option then arrives among the numbers, and is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from bitwright.catalog import nearest_name_hint
from bitwright.errors import BitwrightError

#: `context_settings` of a command whose arguments are numbers.
NUMBERS_MAY_BE_NEGATIVE = {"ignore_unknown_options": True}


class UsageMistake(BitwrightError):
    """An option or argument that the command line does not have or cannot read."""


def raise_if_option(context: typer.Context, words: Iterable[str]) -> None:
    """Refuse words that were meant as options: "--cod", "-x".

    Raises:
        UsageMistake: the first of them, with the nearest option that exists.
    """
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") or (name.startswith("-") and name[1:2].isalpha() and name[1:2].lower() not in "in"):
            known = [option for parameter in context.command.params for option in parameter.opts]
            hint = nearest_name_hint(name, [option for option in known if option.startswith("--")])
            see = "See" if hint.endswith("?") else "see"
            raise UsageMistake(f"no such option: {name}{hint.rstrip('.') or ';'} {see}: {context.command_path} --help")


def split_names(text: str, kind: str) -> Sequence[str]:
    """Return the names of "a,b".

    Raises:
        UsageMistake: there are none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageMistake(f"{text!r} names no {kind}; write one or more, with commas between them")
    return names


def raise_if_there(path: Path) -> None:
    """Refuse to replace a file.

    Raises:
        UsageMistake: something has that name.
    """
    if path.exists():
        raise UsageMistake(f"'{path}' exists, and nothing is replaced; give another name or remove it")


def is_given(context: typer.Context, option: str) -> bool:
    """Whether an option stands on the command line; otherwise its value is the default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"
