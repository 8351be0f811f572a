"""A plan and its evidence as a page for people."""

from bitwright.report.groups import SiteGroup, group_sites
from bitwright.report.render import raise_if_no_report_extra, render_report, write_report

__all__ = ["SiteGroup", "group_sites", "raise_if_no_report_extra", "render_report", "write_report"]
