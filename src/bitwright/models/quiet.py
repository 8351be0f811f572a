"""Run transformers without its progress bars, log lines and warnings, and put everything back afterwards.

bitwright has its own progress and its own sentences; stderr belongs to them. What a library reports through its log
(missing or unexpected tensors) is read from its return values instead and becomes an error or a note.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers, huggingface_hub and tqdm inside the block; no setting outlives it."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    had_bars, had_hub_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # tqdm bars that ask no setting (the GGUF reader's) write to whatever sys.stderr is
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars or had_hub_bars:
            logging.enable_progress_bar()
