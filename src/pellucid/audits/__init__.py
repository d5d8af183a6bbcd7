"""Does information flow only where it should? For any model, through a :class:`~pellucid.probe.Probe`.

>>> from pellucid.audits import audit, twins
>>> report = audit(twins.SeesOneAhead(), checks=["future"])
>>> report.passed, str(report.findings[0].where)
(False, 'row 0, query 0, key 1')
"""

from pellucid.audits.checks import CHECKS
from pellucid.audits.engine.expected import expected_flow
from pellucid.audits.probes.tokens import TokensProbe
from pellucid.audits.run import AuditReport, audit
from pellucid.audits.twins import TWINS
from pellucid.audits.twins.toy import Toy
from pellucid.audits.twins.twin import Twin

__all__ = ["CHECKS", "TWINS", "AuditReport", "TokensProbe", "Toy", "Twin", "audit", "expected_flow"]
