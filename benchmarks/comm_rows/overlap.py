"""Work and collectives side by side: published times, and what `parallel.overlap` says with the device's own γ.

Nothing is calibrated. Where a row tells how long work takes beside a collective, γ times alone is predicted; where it
tells how long both take, `both_s`. The constant is one after the other, the roofline the longer of both: what is said
by who hides nothing, and by who hides everything. Where a row gives the sum of both only, they are parted by the
product's own predicted time.
"""

from __future__ import annotations

from typing import Any

from bitwright.parallel.gemm_time import gemm_time
from bitwright.parallel.overlap import both_s
from comm_rows.read import LeftOut, Prediction, read_rows
from comm_rows.sources import device_of

#: Side of the square product of the row that gives no parts.
_SIDE = 8192


def predict_overlap() -> tuple[list[Prediction], list[LeftOut]]:
    """Return every row, predicted or left out."""
    found: list[Prediction] = []
    left: list[LeftOut] = []
    for row in read_rows("overlap"):
        known = device_of(row["device"])
        if known is None:
            left.append(LeftOut(row=row["id"], reason=f"no figures for {row['device']}, and no times in the row"))
        elif "beside_ms" not in row and "compute_beside_ms" not in row:
            left.append(LeftOut(row=row["id"], reason="a whole step, without what its collectives take"))
        else:
            found += _predictions(row, known[0].name, known[1].contention)
    return found, left


def _predictions(row: dict[str, Any], device: str, contention: float) -> list[Prediction]:
    """Of work beside a collective, and of both, as far as the row has them."""
    group = f"{row['repo'].split('/')[-1]}, {device}"
    found = []
    compute = row.get("compute_ms") or 1e3 * _product_s(row)
    if "compute_beside_ms" in row:
        measured, said = row["compute_beside_ms"], contention * compute
        found.append(
            Prediction(row=f"{row['id']}-work", group=f"{group}, {row['kernel']} beside a collective",
                       measured=measured, predicted=said, roofline=compute)
        )  # fmt: skip
    if "beside_ms" in row:
        collective = row.get("collective_ms") or row["sequential_ms"] - compute
        found.append(
            Prediction(row=row["id"], group=f"{group}, both", measured=row["beside_ms"],
                       predicted=both_s(compute, collective, contention), constant=compute + collective,
                       roofline=max(compute, collective))
        )  # fmt: skip
    return found


def _product_s(row: dict[str, Any]) -> float:
    known = device_of(row["device"])
    assert known is not None
    device, record, _ = known
    return gemm_time(device, record, m=_SIDE, n=_SIDE, k=_SIDE, format="fp16").seconds
