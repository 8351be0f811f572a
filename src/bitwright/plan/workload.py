"""What a plan has to serve: how long a context, for how many sequences at once.

    bytes      weights + KV cache(context · batch) + activations + workspace
    prefill    `batch` prompts of `prefill_tokens` tokens are read
    decode     one step: every sequence of the batch gains a token, and its whole context is read from the KV cache

Without a context nothing is said of the KV cache: bytes are those of the weights, and times those of the linear layers.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from bitwright.errors import BudgetError
from bitwright.plan.schema import Record

#: Prompt length of the prefill time where no context is given, tokens.
PREFILL_TOKENS = 512


class Workload(Record):
    """The load that bytes and times are stated for.

    Raises ``BudgetError`` for a context or a batch that is no whole number above zero.
    """

    #: Tokens that each sequence keeps in the KV cache; None leaves the cache out of everything.
    context: int | None = None
    #: Sequences that are served at once.
    batch: int = Field(default=1)

    @field_validator("*", mode="before")
    @classmethod
    def _raise_if_no_count(cls, value: Any, info: Any) -> Any:
        if value is None and info.field_name == "context":
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BudgetError(f"{info.field_name} must be a whole number of at least 1, not {value!r}; correct it")
        return value

    @property
    def prefill_tokens(self) -> int:
        """Tokens of each prompt that prefill times are stated for."""
        return PREFILL_TOKENS if self.context is None else self.context
