"""The keys of the file that `bitwright train` is given, off the classes that read it."""

from __future__ import annotations

import json
from typing import Any

from measured import markdown_table

from bitwright.training.fine_tuning.config import TrainConfig, key_meanings, section_class


def keys_table() -> str:
    """Every key, section by section; the keys of no section come first, as TOML has it."""
    defaults = _defaults()
    meanings = key_meanings()
    rows = [
        (f"`{key}`", defaults[key], meanings[key].replace("None:", "left out:").removesuffix("."))
        for key in sorted(meanings, key=lambda key: "." in key)
    ]
    return markdown_table(("key", "default", "meaning"), rows)


def _defaults() -> dict[str, str]:
    """Key → what it is where the file does not say."""
    found: dict[str, str] = {}
    for name, field in TrainConfig.model_fields.items():
        section = section_class(field.annotation)
        fields: dict[str, Any] = {name: field}
        if section is not None:
            fields = {f"{name}.{key}": inner for key, inner in section.model_fields.items()}
        for key, inner in fields.items():
            found[key] = "required" if inner.is_required() else _spelled(inner.default)
    return found


def _spelled(value: Any) -> str:
    """A value as TOML has it, which has none for None."""
    return "" if value is None else f"`{json.dumps(value)}`"
