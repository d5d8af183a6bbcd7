"""Does information flow only where it should? For any model, through a :class:`~pellucid.probe.Probe`.

>>> from pellucid.audits import audit, broken
>>> report = audit(broken.SeesOneAhead(), checks=["future"])
>>> report.passed, str(report.findings[0].where)
(False, 'row 0, query 0, key 1')
"""

from pellucid.audits.broken import BROKEN_MODELS, BrokenModel, TinyDecoder
from pellucid.audits.checks import CHECKS
from pellucid.audits.engine.expected_flow import expected_flow
from pellucid.audits.probes.tokens_probe import TokensProbe
from pellucid.audits.report import AuditReport
from pellucid.audits.run import audit

__all__ = [
    "BROKEN_MODELS",
    "CHECKS",
    "AuditReport",
    "BrokenModel",
    "TinyDecoder",
    "TokensProbe",
    "audit",
    "expected_flow",
]
