"""The page: one HTML file that holds all it shows and asks no network for anything.

It opens from a disk, on a telephone, in print and without scripts; what it shows may be hostile (see ``text``).
"""

from pellucid.reports.page.assemble import Section, page_html, write_page

__all__ = ["Section", "page_html", "write_page"]
