"""The page: one HTML file that holds all it shows and asks no network for anything.

It opens from a disk, on a telephone, in print and without scripts; what it shows may be hostile (see ``words``).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pellucid.reports.page.assemble import Section, page_html

__all__ = ["Section", "page_html", "write_page"]


def write_page(path: str | Path, title: str, sections: Sequence[Section], *, subtitle: str = "") -> None:
    """Write the page with these ``(heading, records)`` to ``path``: whole, or not at all.

    Raises:
        InputError: a record that the page cannot draw.
        OSError: what the disk refused, with the path as its filename.
    """
    html = page_html(title, sections, subtitle=subtitle)
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.unfinished-{uuid.uuid4().hex[:12]}")
    try:
        with open(unfinished, "w", encoding="utf-8", newline="\n") as file:
            file.write(html)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        with suppress(OSError):  # what went wrong before is what matters
            unfinished.unlink(missing_ok=True)
