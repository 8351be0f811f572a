"""A plan and its evidence as a page for people."""

from bitwright.report.groups import RoleTotal, SiteGroup, group_sites, total_roles
from bitwright.report.render import raise_if_no_report_extra, render_report, write_report

__all__ = [
    "RoleTotal",
    "SiteGroup",
    "group_sites",
    "raise_if_no_report_extra",
    "render_report",
    "total_roles",
    "write_report",
]
