"""``bitwright train CONFIG.toml``: fine-tune a causal language model on text, under a training policy.

    bitwright train run.toml
    torchrun --nproc-per-node 8 --no-python bitwright train run.toml

On a terminal one line moves: loss, tokens in a second, skipped steps, the level of precision. Elsewhere a line is
written now and then. stdout gets the summary at the end, or it as JSON.
"""

from __future__ import annotations

import json as json_format
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from bitwright.cli.output import write_json
from bitwright.report.units import spell_count, spell_number, spell_seconds

if TYPE_CHECKING:
    from bitwright.training.fine_tuning.training_summary import TrainingSummary

#: Seconds between two lines where there is no terminal.
_LINE_EVERY_S = 10.0


def train_run_command(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="What to train, on what, and how: a .toml file.", show_default=False),
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the run's folder, if there is one.")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="Go on from this checkpoint of the run, not from its newest; later ones are deleted.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else on stdout.")] = False,
) -> None:
    """Fine-tune a causal language model on a text, as a configuration says.

    Under torchrun every process runs this command; the first one tells how it goes. Exit code 3: the run came to its
    end, but its validation loss is not finite, or most of its steps were skipped.
    """
    from bitwright.training.fine_tuning.config import read_config

    asked = read_config(config)
    # Heavy (torch): after everything that can be refused without it.
    from bitwright.quantize.backends.cpu.announce import announcing
    from bitwright.training.fine_tuning.trainer import train

    # the bar tells of steps that were skipped; without a handler Python writes them a second time, on every process
    logging.getLogger("bitwright.training").addHandler(logging.NullHandler())
    with TrainingBar() as bar, announcing(bar.waiting):
        bar.say("reading the model and its text")
        try:
            summary = train(asked, resume=resume, checkpoint=checkpoint, watcher=bar)
        except KeyboardInterrupt:
            bar.say(bar.how_to_go_on(config))
            raise
    if _is_first_process():
        if json:
            write_json(json_format.dumps(_facts(summary), indent=2, allow_nan=False) + "\n")
        else:
            typer.echo("\n".join(say_summary(summary)))
    if summary.trouble is not None:
        raise typer.Exit(3)


class TrainingBar:
    """Tells how a run goes, on stderr; a `Watcher` of `training/fine_tuning/training_progress.py`."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = (
            Console(stderr=True, highlight=False, quiet=not _is_first_process()) if console is None else console
        )
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._num_skipped = 0
        self._told_s = -math.inf
        self._saved_at: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def waiting(self, message: str) -> Any:
        """Say what is waited for while the context is open."""
        if self._bar is None and self._console.is_terminal:
            return self._console.status(message)
        return _Said(self._console, message)

    def began(self, facts: Mapping[str, Any]) -> None:
        """Say what is trained, and show the bar."""
        self._total = int(facts["steps"])
        self.say(f"policy {facts['policy']} ({facts['reason']})")
        trained = spell_count(facts["trained_parameters"], "trained parameter")
        rows = spell_count(facts["rows"], "sequence")
        processes = f", {facts['processes']} processes" if facts["processes"] > 1 else ""
        self.say(f"{trained}, {rows} to learn from, {facts['validation_rows']:,} to measure on{processes}")
        for note in facts["notes"]:
            self.say(f"note: {note}")
        if facts["first_step"]:
            self._saved_at = facts["first_step"]
            self.say(f"going on after step {facts['first_step']:,}")
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = Progress(
                TextColumn("train"),
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("train", total=self._total, completed=facts["first_step"], state="")
            self._bar.start()

    def stepped(self, record: Mapping[str, Any]) -> None:
        """Move the bar; a skipped step is told with its reason."""
        if record["skipped"] is not None:
            self._num_skipped += 1
            self.say(f"step {record['step']:,} was skipped: {record['skipped']}")
        state = self._state(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], state=state)
        elif record["step"] == self._total or time.monotonic() - self._told_s >= _LINE_EVERY_S:
            self._told_s = time.monotonic()
            self.say(f"step {record['step']:,}/{self._total:,}  {state}")

    def measured(self, record: Mapping[str, Any]) -> None:
        """Say the validation loss."""
        self.say(
            f"step {record['step']:,}: validation loss {record['loss']:.4f} ± {record['error']:.4f} "
            f"({spell_count(record['tokens'], 'token')})"
        )

    def saved(self, checkpoint: Path, step: int) -> None:
        """Remember it, for whoever stops the run."""
        self._saved_at = step

    def how_to_go_on(self, config: Path) -> str:
        """What is left of a run that was stopped."""
        if self._saved_at is None:
            return "nothing was saved yet; checkpoint.every_steps saves now and then"
        return f"saved after step {self._saved_at:,}; go on with: bitwright train {config} --resume"

    def _state(self, record: Mapping[str, Any]) -> str:
        scale = "" if record["scale"] is None else f"  scale {record['scale']:g}"
        return (
            f"loss {record['loss']:.4f}  {spell_number(record['tokens_per_s'])} tokens/s  "
            f"{self._num_skipped} skipped  {record['level']}{scale}"
        )

    def say(self, line: str) -> None:
        """Write a line above the bar."""
        self._console.print(line, markup=False, soft_wrap=True)


class _Said:
    """A context that says a line when it opens."""

    def __init__(self, console: Console, message: str) -> None:
        self._console, self._message = console, message

    def __enter__(self) -> None:
        self._console.print(self._message, markup=False)

    def __exit__(self, *_: object) -> None:
        pass


def say_summary(summary: TrainingSummary) -> list[str]:
    """Return a finished run in lines."""
    skipped = f"{summary.skipped:,} of them skipped" if summary.skipped else "none skipped"
    lines = [
        f"steps       {summary.steps:,}, {skipped}",
        f"policy      {summary.policy}",
        f"train loss  {summary.loss:.4f}, mean of the last steps"
        if math.isfinite(summary.loss)
        else "train loss  none: no step was taken",
    ]
    if summary.trouble is not None:
        lines.insert(0, f"failed      {summary.trouble}")
    found = summary.validation
    if found is not None:
        rows = spell_count(found.num_rows, "sequence")
        lines.append(
            f"validation  {found.loss:.4f} ± {found.error:.4f} (standard error over {rows}), perplexity "
            f"{_perplexity(found.loss)}"
            if math.isfinite(found.loss)
            else f"validation  {found.loss}, not finite, over {rows}"
        )
    if summary.tokens:
        speed = spell_number(summary.tokens_per_s)
        lines.append(f"speed       {speed} tokens/s, {spell_seconds(summary.seconds)} in all")
    return [*lines, f"checkpoint  {_shown(summary.checkpoint)}", f"model       {_shown(summary.model)}"]


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.2f}" if loss < 700 else "beyond every float"


def _facts(summary: TrainingSummary) -> dict[str, Any]:
    found = summary.validation
    return {
        "steps": summary.steps,
        "skipped": summary.skipped,
        "policy": summary.policy,
        "reason": summary.reason,
        "loss": _finite(summary.loss),
        "validation": None
        if found is None
        else {
            "loss": _finite(found.loss),
            "error": _finite(found.error),
            "tokens": found.num_tokens,
        },
        "tokens": summary.tokens,
        "seconds": summary.seconds,
        "tokens_per_s": summary.tokens_per_s,
        "trouble": summary.trouble,
        "model": str(summary.model.absolute()),
        "checkpoint": str(summary.checkpoint.absolute()),
        "notes": list(summary.notes),
    }


def _shown(path: Path) -> str:
    """Return ``path`` relative to the working folder where it lies in it."""
    here, path = Path.cwd(), path.absolute()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _finite(value: float) -> float | None:
    """JSON has no NaN and no Inf."""
    return value if math.isfinite(value) else None
