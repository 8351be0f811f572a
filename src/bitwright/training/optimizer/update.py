"""How an optimizer's result is stored in parameters that are narrower than it: rules as data.

The optimizer computes in fp32 in any case, its weight decay included; a rule only says what becomes of the result.

    rounding        how it is rounded to the parameters' format
    compensation    whether what rounding took away is kept, and added to the parameter before the next step
    moment_rounding how moments are rounded, where they are kept in less than fp32

`stand_ins.py` does the work, for every optimizer that treats numbers one by one (`elementwise.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.catalog import Catalog


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRule:
    """One way to store updated parameters."""

    name: str
    #: One line, for lists.
    description: str
    #: Where it is from.
    source: str
    #: Formats that parameters may have under it.
    parameters: tuple[str, ...]
    #: How parameters narrower than fp32 are rounded, a name in `formats.ROUNDINGS`.
    rounding: str = "nearest_even"
    #: What rounding took away is kept in a second number of the parameters' format.
    is_compensated: bool = False
    #: How moments narrower than fp32 are rounded, a name in `formats.ROUNDINGS`.
    moment_rounding: str = "stochastic"


#: Every update rule, by name.
UPDATES: Catalog[UpdateRule] = Catalog(
    kind="update rule", package="bitwright.training.updates", attribute="UPDATES", record_type=UpdateRule
)
