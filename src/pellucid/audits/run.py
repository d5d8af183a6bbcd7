"""``audit``: ask every check, gather what they found."""

from __future__ import annotations

import difflib
import inspect
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from pellucid.audits.checks import CHECKS
from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.influence import InfluenceMatrix
from pellucid.audits.engine.module_copies import shallow_weight_copy
from pellucid.audits.engine.preserve_state import preserve_state
from pellucid.audits.probes.hf import probe_for_hf
from pellucid.audits.probes.named import NamedProbe, named_arguments
from pellucid.audits.probes.tokens import TokensProbe
from pellucid.audits.probes.torch_layers import TorchLayersProbe, is_torch_layer
from pellucid.errors import InputError, one_line
from pellucid.probe import Probe
from pellucid.records import Finding, Flow, Status, Table, TokenView, worst

_PARTS = ("name", "vocab_size", "rules", "module", "max_length", "capabilities", "logits", "with_module")


@dataclass(frozen=True)
class AuditReport:
    """What an audit found."""

    target: str
    findings: tuple[Finding, ...]
    seconds: float
    length: int | None = None
    """How many tokens the long sequences had; None: the target took none at all."""
    flows: tuple[Flow, ...] = ()
    """Who may see whom beside who really does, as far as a check has measured it."""
    views: tuple[TokenView, ...] = ()
    """The same token by token."""
    unasked: tuple[str, ...] = ()
    """Checks that were to be asked and were not, because the budget was spent."""
    called: str = ""
    """How the target was called, and what it therefore was not asked."""

    @property
    def finished(self) -> bool:
        """Whether every check was asked."""
        return not self.unasked

    @property
    def passed(self) -> bool:
        """Something was shown to hold, nothing leaked and nothing raised: of what was asked (see ``finished``)."""
        shown = any(finding.status in ("pass", "fragile") for finding in self.findings)
        return shown and not any(finding.failed for finding in self.findings)

    @property
    def passed_strictly(self) -> bool:
        """The same, nothing is fragile, and every check was asked."""
        return self.passed and self.finished and "fragile" not in self.verdicts.values()

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
            "finished": self.finished,
            "unasked": list(self.unasked),
            "called": self.called,
            "verdicts": self.verdicts,
            "seconds": round(self.seconds, 3),
            "length": self.length,
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def table(self) -> Table:
        """One line a check: its verdict and the finding that says why."""
        rows = []
        for name, status in self.verdicts.items():
            found = self.of(name)
            first = next(finding for finding in found if finding.status == status)
            where = str(first.where) if first.where and status in ("leak", "fragile") else ""
            said = first.message if status != "pass" else f"{CHECKS[name].asks} {_yes(found)}"
            if status == "pass" and name == "future":
                said = first.message
            shown = "not asked" if name in self.unasked else status
            rows.append((name, shown, first.case if status != "pass" else "", where, said))
        return Table(f"audit of {self.target}", ("check", "verdict", "case", "where", "what was seen"), tuple(rows))


def _yes(found: Sequence[Finding]) -> str:
    """In how many cases, and which were not asked."""
    silent = [finding.case for finding in found if finding.status == "not_applicable" and finding.case]
    more = f" Not asked: {', '.join(silent)}." if silent else ""
    return f"Yes, in {sum(finding.status == 'pass' for finding in found)} cases.{more}"


def audit(
    target: object = None,
    probe: Probe | None = None,
    checks: Sequence[str] | None = None,
    *,
    length: int = 24,
    budget: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> AuditReport:
    """Who really sees whom in ``target``?

    ``probe`` says how the target is called. Left out, the target is asked for one (``target.probe()``), known by
    its kind (:func:`probe_for`), and else taken for a causal ``forward(tokens) -> [B, T, V]``. ``checks`` are
    names out of ``CHECKS``; None asks all. ``length`` is the length of the long sequences (a target that cannot
    take it is asked shorter ones). ``budget`` in seconds decides how many tokens of long sequences are changed;
    checks not begun when it is spent are ``unasked``: such an audit is not finished. While it is audited the module
    is in eval mode; afterwards its mode, weights, buffers and all random states are what they were. ``progress``
    hears each check's name before it runs.

    Raises:
        InputError: a check that does not exist, or a target that nobody knows how to call.
    """
    chosen = _chosen(checks)
    if length < 2:
        raise InputError(f"length is {length}, but nothing can be hidden from fewer than 2 tokens; give 2 or more")
    if budget is not None and not 0 < budget < math.inf:
        raise InputError(f"budget is {budget}, but a number of seconds above 0 is needed; leave it out for no bound")
    start = time.perf_counter()
    for module in (target, getattr(probe, "module", None)):
        _refuse_meta(module)
    given = target if probe is None else getattr(probe, "module", None)
    untouched = shallow_weight_copy(given)  # before anybody asks it
    probe = probe_for(target) if probe is None else probe
    if getattr(probe, "module", None) is not given:
        untouched = shallow_weight_copy(getattr(probe, "module", None))
    _refuse_incomplete(probe)
    findings: list[Finding] = []
    unasked: list[str] = []
    with preserve_state(probe.module):
        context = AuditContext(probe, length=length, seed=seed, budget=budget)
        context.untouched = untouched
        for check in chosen:
            if progress is not None:
                progress(check.name)
            if context.spent:
                unasked.append(check.name)
                message = f"not asked: the budget of {context.budget:g} s was spent"
                findings.append(Finding(check.name, "not_applicable", message))
            else:
                findings += _answers(check, context)
                if check.name == "future":
                    findings += _restricted(check, context)
        flows, views = _pictures(context)
    seconds = time.perf_counter() - start
    return AuditReport(
        probe.name, tuple(findings), seconds, context.taken, flows, views, tuple(unasked), _called(probe)
    )


def _called(probe: Probe) -> str:
    """In words: the probe, what it can be asked, and how to choose another."""
    kind, can = type(probe).__name__, ", ".join(sorted(probe.capabilities))
    if getattr(probe, "hidden_states", False):
        can += ", watched by its hidden states for it gives no logits"
    told = f"called by {kind} ({can or 'tokens alone'})"
    if isinstance(probe, TokensProbe) and probe.said:
        told += f"; {probe.said}"
    if isinstance(probe, TokensProbe):
        told += "; for what is missing there, padding or a cache say, write a probe: audit(probe=…)"
    return told


def _pictures(context: AuditContext) -> tuple[tuple[Flow, ...], tuple[TokenView, ...]]:
    measured = context.measured("flow")
    if not isinstance(measured, InfluenceMatrix):
        return (), ()
    views: tuple[TokenView, ...] = ()
    with suppress(Exception):  # the target is anybody's code, and a picture is no verdict
        views = (measured.view(context),)
    return (measured.record(context.probe.name),), views


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


def probe_for(target: object) -> Probe:
    """How a target is called: as it says itself (``target.probe()``), or as its kind is known to be called.

    Known are transformers models, what takes their arguments, torch's own layers, and anything else that takes tokens
    and gives logits.
    """
    if isinstance(target, type):
        raise InputError(f"{target.__name__} is a class; audit an instance of it: {target.__name__}(…)")
    own = getattr(target, "probe", None)
    if inspect.ismethod(own):
        made: Probe = own()
        return made
    if not callable(target):
        if not _lacking(target):
            return cast(Probe, target)
        raise InputError(
            f"{type(target).__name__} cannot be called, so it cannot be audited; give a module, a function or a probe"
        )
    _refuse_factory(target)
    if is_torch_layer(target):
        return TorchLayersProbe(cast(nn.Module, target))
    return probe_for_hf(target) or (NamedProbe(target) if named_arguments(target) else TokensProbe(target))


def _refuse_factory(target: object) -> None:
    """A function without arguments makes a model; it cannot be asked anything."""
    if not inspect.isfunction(target):
        return
    parameters = inspect.signature(target).parameters.values()
    if not any(each.kind is not each.KEYWORD_ONLY and each.kind is not each.VAR_KEYWORD for each in parameters):
        name = target.__name__
        raise InputError(
            f"{name} takes no tokens; it is a factory, perhaps: call it, and audit what it makes: {name}()"
        )


def _lacking(probe: object) -> list[str]:
    return [name for name in _PARTS if not hasattr(probe, name)]


def _refuse_meta(module: object) -> None:
    if isinstance(module, nn.Module) and any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        raise InputError("the target has weights on the meta device, which hold nothing; build it on a real one")


def _refuse_incomplete(probe: object) -> None:
    missing = _lacking(probe)
    if missing:
        raise InputError(
            f"{type(probe).__name__} is no probe: it lacks {', '.join(missing)}; subclass pellucid.probe.Probe"
        )
    size = probe.vocab_size  # type: ignore[attr-defined]
    if size < 2:
        raise InputError(f"the vocabulary has {size} tokens, but a token can only be changed where there are 2 or more")


def _answers(check: Check, context: AuditContext) -> list[Finding]:
    """What one check finds; a target that raises is a finding too."""
    found: list[Finding] = []
    try:
        reason = _not_applicable(check, context)
        if reason:
            return [Finding(check.name, "not_applicable", reason)]
        if context.not_finite:
            return [Finding(check.name, "error", f"{context.not_finite}, so nothing can be shown")]
        if check.steady and context.unsteady:
            message = (
                f"two equal requests differ by {context.unsteady:.1e}, so nothing can be compared (see determinism)"
            )
            return [Finding(check.name, "not_applicable", message)]
        for finding in check.run(context):
            found.append(finding)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the target is anybody's code)
        found.append(Finding(check.name, "error", _raised(error)))
    return found


def _restricted(check: Check, context: AuditContext) -> list[Finding]:
    """The same question to a target that takes a mask which its declaration does not: handed one, it obeys."""
    ways: dict[str, Probe] = getattr(context.probe, "restricted", dict)()
    found: list[Finding] = []
    for way, probe in ways.items():
        answers = _answers(check, AuditContext(probe, length=context.wanted_length, budget=context.budget))
        found += [replace(each, case=f"{way}, {each.case}".removesuffix(", ")) for each in answers]
    return found


def _not_applicable(check: Check, context: AuditContext) -> str:
    probe = context.probe
    missing = sorted(check.needs - probe.capabilities)
    if missing:
        said = next((f": it raises {raised}" for name in missing if (raised := _refused(probe).get(name))), "")
        return f"{probe.name} cannot be asked for {', '.join(missing)}{said}"
    if context.length < check.length:
        return f"the check needs {check.length} tokens in a row, but {probe.name} takes {context.length}"
    return ""


def _refused(probe: Probe) -> Mapping[str, str]:
    return getattr(probe, "refused", {})


def _raised(error: BaseException) -> str:
    """The exception on one line, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {one_line(error)} ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
