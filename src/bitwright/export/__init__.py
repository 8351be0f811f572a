"""Hand a plan to the engines that people use: one target a file. What can be refused is, before a file is written."""

from bitwright.export.driver import ExportReport, Findings, Refused, examine, export
from bitwright.export.exporter import EXPORTERS, Exporter
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
    "export",
    "open_source",
]
