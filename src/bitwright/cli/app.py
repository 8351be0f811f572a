"""The application, assembled from its verbs: a new verb is one file and one line here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from bitwright.cli import formats, hardware, optimize, schemes, show, verify
from bitwright.errors import BitwrightError

#: What the parser raises for options it cannot read. Its public name differs between versions of typer.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class UsageMistake(BitwrightError):
    """An option or argument that the command line does not have or cannot read."""


def create_app() -> typer.Typer:
    """Return a new application with every verb."""
    app = typer.Typer(
        name="bitwright",
        help="Chooses, proves and guards the numerical precision of language models.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    app.command("optimize")(optimize.optimize_command)
    app.command("verify")(verify.verify_command)
    app.command("show")(show.show_command)
    app.command("formats")(formats.formats_command)
    app.command("schemes")(schemes.schemes_command)
    app.command("hardware")(hardware.hardware_command)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run the application and return its exit code.

    Raises ``BitwrightError`` for whatever the user can mend, misspelt options included.
    """
    try:
        result = create_app()(args=list(arguments) or ["--help"], prog_name="bitwright", standalone_mode=False)
    except _UsageError as error:
        what = _sentence(error)
        see = " See" if what.endswith("?") else "; see"
        raise UsageMistake(f"{what}{see}: bitwright {_verb(arguments)}--help") from None
    return result if isinstance(result, int) else 0


def _sentence(error: Exception) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return str(text).rstrip(".").replace("\n", " ")


def _verb(arguments: Sequence[str]) -> str:
    known = ("optimize", "verify", "show", "formats", "schemes", "hardware")
    return f"{arguments[0]} " if arguments[0] in known else ""


def _print_version(asked: bool) -> None:
    if asked:
        try:
            version = metadata.version("bitwright")
        except metadata.PackageNotFoundError:
            version = "(run from its sources, not installed)"
        typer.echo(f"bitwright {version}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Choose, prove and guard the numerical precision of language models."""
