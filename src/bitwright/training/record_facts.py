"""A frozen record as plain values, and what differs between two of them, field by field.

plain_facts(policy)                 {"name": "fp8-hybrid", "products": {"forward_x": {"format": "fp8_e4m3", …}}}
differences(there, here)            [("products.forward_x.format", "fp8_e4m3", "fp8_e5m2")]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

#: What stands for a field that one of the two does not have.
ABSENT = "absent"


def plain_facts(record: Any) -> Any:
    """Return a record as dicts, lists, text, numbers and None, so that JSON holds it."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: plain_facts(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, Enum):
        return plain_facts(record.value)
    if isinstance(record, Mapping):
        return {str(key): plain_facts(value) for key, value in record.items()}
    if isinstance(record, list | tuple | set | frozenset):
        items = sorted(record, key=str) if isinstance(record, set | frozenset) else record
        return [plain_facts(item) for item in items]
    return record if record is None or isinstance(record, bool | int | float | str) else str(record)


def differences(there: Any, here: Any, *, ignored: Collection[str] = (), field: str = "") -> list[tuple[str, Any, Any]]:
    """Return (field, its value there, its value here) wherever plain values differ; fields named in `ignored` never."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        return [
            found
            for name in dict.fromkeys([*there, *here])
            if name not in ignored
            for found in differences(
                there.get(name, ABSENT),
                here.get(name, ABSENT),
                ignored=ignored,
                field=f"{field}.{name}" if field else name,
            )
        ]
    return [] if there == here else [(field, there, here)]
