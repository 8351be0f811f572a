"""Hand a plan to the engines that people use: one target a file. What can be refused is, before a file is written."""

from bitwright.export.driver import (
    ExportReport,
    Findings,
    Refused,
    examine,
    examine_model,
    export,
    raise_if_refused,
    supported_schemes,
)
from bitwright.export.exporter import EXPORTERS, Exporter
from bitwright.export.shared_scales import share_tensor_scales
from bitwright.export.site_names import spell_sites
from bitwright.export.source import ExportSource, SiteWeight, open_source

__all__ = [
    "EXPORTERS",
    "ExportReport",
    "ExportSource",
    "Exporter",
    "Findings",
    "Refused",
    "SiteWeight",
    "examine",
    "examine_model",
    "export",
    "open_source",
    "raise_if_refused",
    "share_tensor_scales",
    "spell_sites",
    "supported_schemes",
]
