"""``bitwright train``: a run from a file, and the verbs about training.

    bitwright train CONFIG.toml        the run itself (`train_run.py`)
    bitwright train plan MODEL         which precision where, measured (`train_plan.py`)
    bitwright train policies [NAME]    what runs in which format (`train_policies.py`)

The first word decides: it is a verb's name, or the configuration of a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitwright.catalog import nearest_name_hint
from bitwright.cli.panels import PlainGroup
from bitwright.cli.usage import UsageMistake

#: The verb that is meant where the first word is none.
RUN = "run"


class TrainGroup(PlainGroup):
    """A group whose first word may be the argument of `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` before words that begin with no verb and no option of the group."""
        args = args or ["--help"]
        if args[0] not in self.commands and args[0] not in ctx.help_option_names:
            self._raise_if_misspelt(args[0])
            args = [RUN, *args]
        return super().parse_args(ctx, args)

    def _raise_if_misspelt(self, word: str) -> None:
        """Refuse what is no file and looks like a verb."""
        hint = nearest_name_hint(word, list(self.commands))
        if not word.startswith("-") and hint.endswith("?") and not Path(word).exists() and not Path(word).suffix:
            raise UsageMistake(f"'{word}' is neither a verb of train nor a file{hint} See: bitwright train --help")


def train_command() -> None:
    """Train in low precision: give a CONFIG.toml, or one of the verbs."""
