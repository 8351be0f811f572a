"""What an exporter is: the way from a plan to what one engine loads.

One file of `targets/` defines EXPORTERS, a tuple of final classes with these members; `bitwright export --list`, the
laws over all exporters and the generated tables find it there. `driver.py` asks every question before it lets an
exporter write:

    why_not         one choice, by facts of the plan alone
    why_not_plan    the choices together
    why_not_model   what only the loaded model shows: how a weight is stored, which norm a factor would be folded into

and, for the engine that is asked for, the rules of `plan/rules.py`. So an exporter says only what its *checkpoint*
cannot hold; what an engine does not run is data of `plan/engines`.

An exporter computes no codes: `ExportSource` has those that were measured (`source.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from bitwright.catalog import Catalog
from bitwright.export.source import ExportSource
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.value_scheme import ValueScheme


@runtime_checkable
class Exporter(Protocol):
    """What every exporter is."""

    @property
    def name(self) -> str:
        """As the command line writes it."""

    @property
    def description(self) -> str:
        """One line for tables: what is written, and who loads it."""

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines (`plan/engines`) whose rules a plan has to keep: of one of them, the first unless told otherwise."""

    @property
    def loaded_by(self) -> tuple[str, ...]:
        """Programs that load it, for people; those of `plan/engines` under their names there."""

    @property
    def keeps_caches(self) -> bool:
        """Whether what loads it keeps caches as a plan has them, where `why_not` has no reason against it."""

    def why_not(self, choice: SiteChoice, scheme: Scheme | ValueScheme) -> str | None:
        """Why it cannot express a choice; None if it can.

        Sites that stay as loaded are not asked about.

        Args:
            choice: of a plan: site, rounding, transform.
            scheme: the record of `choice.scheme`, of weights or, at a value site, of values.
        """

    def why_not_plan(self, plan: Plan) -> str | None:
        """Why it cannot express the choices together; None if it can."""

    def why_not_model(self, source: ExportSource) -> Mapping[str, str]:
        """Site name → why this model's weight there cannot be written; empty if all can."""

    def write(self, source: ExportSource, folder: Path) -> tuple[str, ...]:
        """Write everything into an empty folder; return notes: what a reader of the export must know.

        Nothing is refused any more: the driver has asked. Two writes of one source give equal bytes.

        Raises:
            OSError: the disk is full, or another reason of the system; the driver tells it in a sentence.
        """


#: Every exporter, by name.
EXPORTERS: Catalog[Exporter] = Catalog(
    kind="exporter", package="bitwright.export.targets", attribute="EXPORTERS", record_type=Exporter
)
