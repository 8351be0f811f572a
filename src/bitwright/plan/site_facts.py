"""What rules look at of sites and transforms: names, roles and shapes, without torch."""

from __future__ import annotations

from typing import Protocol


class SiteFacts(Protocol):
    """What rules look at of a site: `models.Site` and `models.value_sites.ValueSite` both have it."""

    @property
    def name(self) -> str:
        """Unique in the model."""

    @property
    def role(self) -> str:
        """attn.q, mlp.down, kv_cache …"""

    @property
    def module(self) -> str:
        """Dotted name of the module that computes with it."""

    @property
    def tied_group(self) -> str | None:
        """What it is a part of in the checkpoint."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of a weight; (heads, numbers of a head) of a value."""


class TransformFacts(Protocol):
    """What rules look at of a transform (`quantize/transforms`)."""

    @property
    def name(self) -> str:
        """As plans write it."""

    @property
    def parts(self) -> frozenset[str]:
        """What it stores, and so what has to be applied to the input."""
