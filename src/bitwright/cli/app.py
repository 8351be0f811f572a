"""The application, assembled from its verbs: a new verb is one file and one line here.

A verb may have verbs of its own (`formats show`); it is then a callback and its commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from bitwright.cli import (
    bench,
    chat,
    comm,
    comm_bench,
    comm_explain,
    comm_fit,
    comm_time,
    compare,
    export,
    formats,
    formats_compare,
    formats_histogram,
    formats_show,
    hardware,
    hardware_profile,
    hardware_show,
    import_,
    memory,
    optimize,
    parallel,
    parallel_plan,
    parallel_serve,
    parallel_timeline,
    run_,
    schemes,
    show,
    train,
    train_plan,
    train_policies,
    train_run,
    verify,
)
from bitwright.cli.panels import PlainCommand, PlainGroup, without_braces
from bitwright.cli.usage import NUMBERS_MAY_BE_NEGATIVE, UsageMistake

#: What the parser raises for options it cannot read. Its public name differs between versions of typer.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def create_app() -> typer.Typer:
    """Return a new application with every verb."""
    app = typer.Typer(
        name="bitwright",
        cls=PlainGroup,
        help="Chooses, proves and guards the numerical precision of language models.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    app.command("optimize", cls=PlainCommand)(optimize.optimize_command)
    app.command("verify", cls=PlainCommand)(verify.verify_command)
    app.command("run", cls=PlainCommand)(run_.run_command)
    app.command("chat", cls=PlainCommand)(chat.chat_command)
    app.command("bench", cls=PlainCommand)(bench.bench_command)
    app.command("compare", cls=PlainCommand)(compare.compare_command)
    app.command("show", cls=PlainCommand)(show.show_command)
    app.command("export", cls=PlainCommand)(export.export_command)
    app.command("import", cls=PlainCommand)(import_.import_command)
    app.add_typer(_create_formats_app(), name="formats")
    app.command("schemes", cls=PlainCommand)(schemes.schemes_command)
    app.add_typer(_create_hardware_app(), name="hardware")
    app.add_typer(_create_comm_app(), name="comm")
    app.add_typer(_create_parallel_app(), name="parallel")
    app.command("memory", cls=PlainCommand)(memory.memory_command)
    app.add_typer(_create_train_app(), name="train")
    return app


def _create_formats_app() -> typer.Typer:
    app = typer.Typer(cls=PlainGroup, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(formats.formats_command)
    app.command("show", cls=PlainCommand, context_settings=NUMBERS_MAY_BE_NEGATIVE)(formats_show.show_command)
    app.command("compare", cls=PlainCommand, context_settings=NUMBERS_MAY_BE_NEGATIVE)(formats_compare.compare_command)
    app.command("histogram", cls=PlainCommand)(formats_histogram.histogram_command)
    return app


def _create_comm_app() -> typer.Typer:
    app = typer.Typer(cls=PlainGroup, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(comm.comm_command)
    app.command("explain", cls=PlainCommand)(comm_explain.explain_command)
    app.command("bench", cls=PlainCommand)(comm_bench.bench_command)
    app.command("fit", cls=PlainCommand)(comm_fit.fit_command)
    app.command("time", cls=PlainCommand)(comm_time.time_command)
    return app


def _create_parallel_app() -> typer.Typer:
    app = typer.Typer(cls=PlainGroup, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(parallel.parallel_command)
    app.command("plan", cls=PlainCommand)(parallel_plan.plan_command)
    app.command("serve", cls=PlainCommand)(parallel_serve.serve_command)
    app.command("timeline", cls=PlainCommand)(parallel_timeline.timeline_command)
    return app


def _create_hardware_app() -> typer.Typer:
    app = typer.Typer(cls=PlainGroup, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(hardware.hardware_command)
    app.command("list", cls=PlainCommand)(hardware.list_command)
    app.command("show", cls=PlainCommand)(hardware_show.show_command)
    app.command("profile", cls=PlainCommand)(hardware_profile.profile_command)
    return app


def _create_train_app() -> typer.Typer:
    app = typer.Typer(cls=train.TrainGroup, rich_markup_mode=None)
    app.callback()(train.train_command)
    app.command(train.RUN, cls=PlainCommand)(train_run.train_run_command)
    app.command("plan", cls=PlainCommand)(train_plan.plan_command)
    app.command("policies", cls=PlainCommand)(train_policies.policies_command)
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
    return without_braces(str(text)).rstrip(".").replace("\n", " ")


def _verb(arguments: Sequence[str]) -> str:
    """The verbs that the arguments begin with, each with a space after it."""
    commands = getattr(typer.main.get_command(create_app()), "commands", {})
    verbs = ""
    for word in arguments:
        if word not in commands:
            break
        verbs += f"{word} "
        commands = getattr(commands[word], "commands", {})
    return verbs


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
