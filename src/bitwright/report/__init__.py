"""A plan and its evidence as a page for people."""

from bitwright.report.groups import SiteGroup, group_sites
from bitwright.report.render import render_report, write_report

__all__ = ["SiteGroup", "group_sites", "render_report", "write_report"]
