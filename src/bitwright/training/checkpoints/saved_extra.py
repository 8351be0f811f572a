"""What a caller saves beside a run (`extra`): plain values that come back as they were, NaN and Inf among them.

JSON has no NaN, no Inf, no tuple and no number as a key; `state_tree.py` writes them in a way that any reader of JSON
can read. A tensor would need a file of its own, and what is not known here would come back as something else: both are
refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bitwright.errors import TrainingError
from bitwright.training.checkpoints.checkpoint_facts import to_json
from bitwright.training.checkpoints.state_tree import join_state, split_state

_KNOWN = "extra holds numbers, text, None, and lists, tuples and dicts of them"


def extra_to_json(extra: Any) -> Any:
    """Return `extra` as a value for JSON.

    Raises:
        TrainingError: it holds something that JSON does not know; names the key.
    """
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TrainingError(f"extra is of type {type(extra).__name__}; give a dict of plain values")
    for key, value in extra.items():
        if not isinstance(key, str):
            raise TrainingError(f"extra has the key {key!r}, but its keys are text; give '{key}'")
        try:
            for place, what in _unknown(value, (key,)):
                raise TrainingError(
                    f"{place} is of type {what}, but {_KNOWN}; give those (of a tensor or an array: .item() or "
                    ".tolist()), or save it in a file of its own"
                )
            to_json(split_state({key: value})[0])
        except (ValueError, RecursionError) as error:  # a lone surrogate, a number of thousands of digits, a circle
            raise TrainingError(f"{key!r} of extra cannot be written as JSON ({error}); leave it out") from error
    return split_state(dict(extra))[0]


def extra_from_json(tree: Any) -> dict[str, Any]:
    """Undo `extra_to_json`."""
    return dict(join_state(tree, {}))


def _unknown(value: Any, place: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Where something is that JSON does not know, and its type."""
    name = f"'{'.'.join(place)}' of extra"
    match value:
        case None | bool() | int() | float() | str():
            return
        case Mapping():
            for key, item in value.items():
                if not (key is None or isinstance(key, bool | int | float | str)):
                    yield f"a key of {name}", type(key).__name__
                yield from _unknown(item, (*place, str(key)))
        case list() | tuple():
            for index, item in enumerate(value):
                yield from _unknown(item, (*place, str(index)))
        case _:
            yield name, type(value).__name__
