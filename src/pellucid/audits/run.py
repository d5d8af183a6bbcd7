"""``audit``: ask every check, gather what they found."""

from __future__ import annotations

import difflib
import inspect
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.audits.bench import Bench
from pellucid.audits.care import left_as_found
from pellucid.audits.check import Check
from pellucid.audits.checks import CHECKS
from pellucid.audits.probes import TokensProbe
from pellucid.errors import InputError
from pellucid.probe import Probe
from pellucid.records import Finding, Status, Table, worst

_PARTS = ("name", "vocab_size", "rules", "module", "max_length", "capabilities", "logits", "over")


@dataclass(frozen=True)
class AuditReport:
    """What an audit found."""

    target: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Something was shown to hold, nothing leaked and nothing raised."""
        shown = any(finding.status in ("pass", "fragile") for finding in self.findings)
        return shown and not any(finding.failed for finding in self.findings)

    @property
    def verdicts(self) -> dict[str, Status]:
        """The worst status of each check that was asked."""
        names = dict.fromkeys(finding.check for finding in self.findings)
        return {name: worst(self.of(name)) for name in names}

    def of(self, check: str) -> tuple[Finding, ...]:
        """The findings of one check."""
        return tuple(finding for finding in self.findings if finding.check == check)

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "passed": self.passed,
            "verdicts": self.verdicts,
            "seconds": round(self.seconds, 3),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def table(self) -> Table:
        """One line a check: its verdict and the finding that says why."""
        rows = []
        for name, status in self.verdicts.items():
            found = self.of(name)
            first = next(finding for finding in found if finding.status == status)
            where = str(first.where) if first.where and status in ("leak", "fragile") else ""
            said = first.message if status != "pass" else f"{CHECKS[name].asks} Yes, in {len(found)} cases."
            if status == "pass" and name == "future":
                said = first.message
            rows.append((name, status, first.case if status != "pass" else "", where, said))
        return Table(f"audit of {self.target}", ("check", "verdict", "case", "where", "what was seen"), tuple(rows))


def audit(
    target: object = None,
    probe: Probe | None = None,
    checks: Sequence[str] | None = None,
    *,
    length: int = 24,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> AuditReport:
    """Who really sees whom in ``target``?

    ``probe`` says how the target is called. Left out, the target is asked for one (``target.probe()``), and
    else taken for a causal ``forward(tokens) -> [B, T, V]``. ``checks`` are names out of ``CHECKS``; None
    asks all. ``length`` is the length of the long sequences. While it is audited the module is in eval mode;
    afterwards its mode, weights, buffers and all random states are what they were. ``progress`` hears each
    check's name before it runs.

    Raises:
        InputError: a check that does not exist, or a target that nobody knows how to call.
    """
    chosen = _chosen(checks)
    if length < 2:
        raise InputError(f"length is {length}, but nothing can be hidden from fewer than 2 tokens; give 2 or more")
    start = time.perf_counter()
    probe = _probe_for(target) if probe is None else probe
    _refuse_incomplete(probe)
    findings: list[Finding] = []
    with left_as_found(probe.module):
        bench = Bench(probe, length=length, seed=seed)
        for check in chosen:
            if progress is not None:
                progress(check.name)
            findings += _answers(check, bench)
    return AuditReport(probe.name, tuple(findings), time.perf_counter() - start)


def _chosen(names: Sequence[str] | None) -> list[Check]:
    if names is None:
        return list(CHECKS.values())
    if isinstance(names, str) or not names:
        raise InputError(f"checks is {names!r}, but a list of names is needed: one or more of {', '.join(CHECKS)}")
    for name in names:
        if name not in CHECKS:
            near = difflib.get_close_matches(name, CHECKS, 1, 0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(f"there is no check {name!r}; {hint}there are {', '.join(CHECKS)}")
    return [CHECKS[name] for name in dict.fromkeys(names)]


def _probe_for(target: object) -> Probe:
    own = getattr(target, "probe", None)
    if inspect.ismethod(own):
        made: Probe = own()
        return made
    if not callable(target):
        raise InputError(
            f"{type(target).__name__} cannot be called, so it cannot be audited; give a module, a function or a probe"
        )
    return TokensProbe(target)


def _refuse_incomplete(probe: object) -> None:
    missing = [name for name in _PARTS if not hasattr(probe, name)]
    if missing:
        raise InputError(
            f"{type(probe).__name__} is no probe: it lacks {', '.join(missing)}; subclass pellucid.probe.Probe"
        )
    size = probe.vocab_size  # type: ignore[attr-defined]
    if size < 2:
        raise InputError(f"the vocabulary has {size} tokens, but a token can only be changed where there are 2 or more")


def _answers(check: Check, bench: Bench) -> list[Finding]:
    """What one check finds; a target that raises is a finding too."""
    reason = _not_applicable(check, bench)
    if reason:
        return [Finding(check.name, "not_applicable", reason)]
    found: list[Finding] = []
    try:
        if check.name != "trace" and bench.unsteady:
            message = f"two equal requests differ by {bench.unsteady:.1e}, so nothing can be compared (see trace)"
            return [Finding(check.name, "not_applicable", message)]
        for finding in check.run(bench):
            found.append(finding)
    except Exception as error:  # noqa: BLE001 (the target is anybody's code)
        found.append(Finding(check.name, "error", _raised(error)))
    return found


def _not_applicable(check: Check, bench: Bench) -> str:
    probe = bench.probe
    missing = sorted(check.needs - probe.capabilities)
    if missing:
        return f"{probe.name} cannot be asked for {', '.join(missing)}"
    if probe.max_length is not None and probe.max_length < check.length:
        return f"the check needs {check.length} positions, but {probe.name} has {probe.max_length}"
    return ""


def _raised(error: Exception) -> str:
    """The exception on one line, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:300]} ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
