"""``bitwright comm``: collectives told, measured and fitted. Its verbs are files beside this one."""

from __future__ import annotations

import typer


def comm_command(context: typer.Context) -> None:
    """Show how ranks exchange data, measure it, and fit a model of the links to what was measured."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
