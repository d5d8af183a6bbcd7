"""An audit as JUnit XML, which build servers draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from pellucid.records import Finding

if TYPE_CHECKING:
    from pellucid.audits.report import AuditReport


def write_junit(path: Path, report: AuditReport, *, strict: bool = False) -> None:
    """One test suite: a case for every finding, failed where it leaks (``strict``: or is fragile)."""
    suite = ElementTree.Element("testsuite", name=_clean(f"audit of {report.target}"), time=f"{report.seconds:.3f}")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for finding in report.findings:
        counts["tests"] += 1
        name = _clean(finding.case or finding.check)
        case = ElementTree.SubElement(suite, "testcase", classname=f"pellucid.{finding.check}", name=name)
        kind, tag = _outcome(finding, strict)
        if tag is not None:
            counts[kind] += 1
            told = ElementTree.SubElement(case, tag, message=_clean(finding.message))
            told.text = _clean("; ".join(filter(None, (str(finding.where or ""), finding.decided))))
    for name, count in counts.items():
        suite.set(name, str(count))
    text = ElementTree.tostring(suite, encoding="unicode", xml_declaration=False)
    path.write_text(f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n', encoding="utf-8")


def _outcome(finding: Finding, strict: bool) -> tuple[str, str | None]:
    """Which count it adds to, and the element that says so."""
    if finding.status == "leak" or (strict and finding.status == "fragile"):
        return "failures", "failure"
    if finding.status == "error":
        return "errors", "error"
    return ("skipped", "skipped") if finding.status == "not_applicable" else ("tests", None)


def _clean(text: str) -> str:
    """Without the characters that XML 1.0 has no way to write."""
    return "".join(
        c if c in "\t\n" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c >= "\U00010000" else "\ufffd"
        for c in text
    )
