"""A fixture for other people's suites: ``def test_mine(no_leaks): no_leaks(my_model())``.

Registered with pytest by the package itself. Nothing heavy is imported until the fixture is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pellucid.audits import AuditReport


@pytest.fixture
def no_leaks() -> Callable[..., AuditReport]:
    """Audit a target and fail the test with the findings where it leaks.

    Takes what :func:`pellucid.audit` takes, and ``strict=True`` to fail on what is fragile too.
    """
    return _no_leaks


def _no_leaks(target: object = None, probe: Any = None, *, strict: bool = False, **how: Any) -> AuditReport:
    __tracebackhide__ = True
    from pellucid.audits import audit
    from pellucid.reports import plain_lines

    report = audit(target, probe, **how)
    if not (report.passed_strictly if strict else report.passed):
        pytest.fail("\n".join(plain_lines(report.table())), pytrace=False)
    return report
