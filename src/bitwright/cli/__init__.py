"""The command line: one verb a file; each parses, calls, prints.

Exit codes: 0 done and every limit met; 2 bad input (one sentence on stderr, nothing written); 3 done, but a limit is
missed (the plan is written and says which); 130 interrupted. Anything else is a defect and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from bitwright.cli.error_of_ranks import tell_error
from bitwright.cli.output import show_look_alikes
from bitwright.errors import BitwrightError, MissingExtra


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``bitwright`` with ``arguments`` (default: the process's own) and return its exit code."""
    show_look_alikes()
    try:
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except BitwrightError as error:
        tell_error(str(error))
        return 2
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_what_stdout_holds()
        tell_error(
            f"could not write {error.filename or 'the output'} ({error.strerror}); free some space or send it "
            "elsewhere (a plan that was made before that stands in its folder)"
        )
        return 2
    except KeyboardInterrupt:
        code = 130
    if code == 130 and os.environ.get("RANK", "0") == "0":
        print("interrupted", file=sys.stderr)
    return code


def _drop_what_stdout_holds() -> None:
    """Let the interpreter end quietly: it flushes stdout once more, which would fail as it did before."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _run(arguments: Sequence[str]) -> int:
    try:
        from bitwright.cli.app import run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        raise MissingExtra(package, "cli", "the command line") from error
    return run(arguments)
