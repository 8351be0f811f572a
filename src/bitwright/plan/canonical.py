"""One text for one content: how numbers and records become bytes that can be hashed.

The same plan must give the same bytes on every run, so that a hash means something and two plan files can be compared
with ``diff``. Three rules make that so:

- a float keeps ``SIGNIFICANT_DIGITS`` = 9 significant decimal digits, rounded when a record is built, before anything
  is hashed or written. Nine digits identify every fp32 value and shed the last bits of a double, which sums in another
  order would change. ``-0.0`` becomes ``0.0``. ``repr`` of the rounded double is the shortest text that reads back to
  the same double, so text → number → text is the identity;
- keys are sorted, and NaN and infinities are refused (JSON has no such numbers, RFC 8259 §6);
- text is UTF-8, indented by one space, and ends with one newline.

Hashes are SHA-256 in lower-case hexadecimal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

#: Decimal digits that every float in a plan keeps.
SIGNIFICANT_DIGITS = 9


def round_significant(value: float) -> float:
    """Return ``value`` rounded to nine significant decimal digits; ``-0.0`` becomes ``0.0``."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") + 0.0


#: A finite float of a plan: rounded to nine significant digits when the record is built.
Number = Annotated[float, Field(allow_inf_nan=False), AfterValidator(round_significant)]


def canonical_json(content: Any) -> str:
    """Return the one JSON text of ``content`` (dicts, lists, strings, numbers, None), with a final newline.

    Raises ``ValueError`` where ``content`` holds NaN or an infinity.
    """
    return json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def hash_json(content: Any) -> str:
    """Return the SHA-256 of ``canonical_json(content)`` in hexadecimal."""
    return hashlib.sha256(canonical_json(content).encode("utf-8")).hexdigest()


def hash_tensors(tensors: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and little-endian C-order bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.asarray(tensors[name], order="C")
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{name}\0{little.dtype.str}\0{list(little.shape)}\0".encode())
        digest.update(little.tobytes())
    return digest.hexdigest()
