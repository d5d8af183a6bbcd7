"""Records drawn: tables for terminals and pipes, mask pictures as SVG and PNG, the page."""

from pellucid.reports.page import page_html, write_page
from pellucid.reports.plots import Panel, mask_figure, mask_panels, mask_png
from pellucid.reports.table import plain_lines, show

__all__ = ["Panel", "mask_figure", "mask_panels", "mask_png", "page_html", "plain_lines", "show", "write_page"]
