"""Run the checks on a target, by the probe that calls it, and collect what they find."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from pellucid.audits.checks import CHECKS
from pellucid.audits.checks.check import Check
from pellucid.audits.engine.compare import is_refusal
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.influence import InfluenceMatrix
from pellucid.audits.engine.state import preserve_state, shallow_weight_copy
from pellucid.audits.probes.hf_detect import probe_for_hf
from pellucid.audits.probes.keyword_probe import KeywordProbe, keyword_arguments
from pellucid.audits.probes.tokens_probe import TokensProbe
from pellucid.audits.probes.torch_layers_probe import TorchLayersProbe, is_torch_layer
from pellucid.audits.report import AuditReport
from pellucid.errors import ArgumentError, one_line
from pellucid.messages import did_you_mean, join_some
from pellucid.probe import Probe, Visibility
from pellucid.records import Finding, Flow, TokenView
from pellucid.visibility import parse

_OF_FLOW = ("future", "window", "prefix", "padding", "packing", "batch", "cross")  # checks that look for paths
_BY_MODE = ("padding", "mask_ignored", "polarity", "cache", "positions")  # that ask in every way of calling, too
_AS_GOOD_AS_ZERO = 1e-9  # weights so small hide what is behind them in float32
_REQUIRED = ("name", "vocab_size", "rules", "module", "max_length", "capabilities", "logits", "with_module")


def audit(
    target: object = None,
    probe: Probe | None = None,
    checks: Sequence[str] | None = None,
    *,
    length: int = 24,
    budget: float | None = None,
    seed: int = 0,
    expect: Visibility | str | Sequence[Visibility | str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> AuditReport:
    """Who really sees whom in ``target``?

    While it is audited the module is in eval mode; afterwards its mode, weights, buffers and all random states are what
    they were.

    Args:
        target: a module or a function; transformers models and torch's own layers are recognized.
        probe: how the target is called. Left out, it is ``target.probe()`` where there is one, else found by the
            target's kind (:func:`probe_for`): any ``forward(tokens) -> [B, T, V]``
            will do, and is taken for causal.
        checks: names in ``CHECKS``; all by default.
        length: tokens of the long sequences; shorter where the target cannot take so many.
        budget: seconds, which decide how many tokens of long sequences are changed; checks that have not begun when it
            is spent are ``not_run``, and the audit is not finished.
        seed: of the random tokens.
        expect: the rules in place of those that the target declares: one for all layers or one for each, such as
            ``"causal & window(64)"``.
        progress: is called with the name of each check before it runs.

    Raises:
        ArgumentError: there is no such check, or it is not known how to call the target.
    """
    chosen = _chosen(checks)
    if length < 2:
        raise ArgumentError(f"length is {length}, but nothing can be hidden from fewer than 2 tokens; give 2 or more")
    if budget is not None and not 0 < budget < math.inf:
        raise ArgumentError(f"budget is {budget}, but a number of seconds above 0 is needed; leave it out for no bound")
    for module in (target, getattr(probe, "module", None)):
        if isinstance(module, nn.Module) and any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            raise ArgumentError("the target has weights on the meta device, which hold nothing; build it on a real one")
    start = time.perf_counter()
    with ExitStack() as stack:
        for module in _closed_over(target):  # before the first call, as is the copy
            stack.enter_context(preserve_state(module))
        given = target if probe is None else getattr(probe, "module", None)
        untouched = shallow_weight_copy(given)
        probe = probe_for(target) if probe is None else probe
        if getattr(probe, "module", None) is not given:
            untouched = shallow_weight_copy(getattr(probe, "module", None))
        _refuse_incomplete(probe)
        if expect is not None:
            probe = _with_rules(probe, expect)
        stack.enter_context(preserve_state(probe.module))
        context = AuditContext(probe, length=length, seed=seed, budget=budget)
        context.untouched = untouched
        findings, not_run = _run_checks(chosen, context, progress)
        flows, views = _pictures(context)
    seconds, called = time.perf_counter() - start, _how_it_was_called(probe)
    return AuditReport(probe.name, findings, seconds, context.taken, flows, views, not_run, called)


def _run_checks(
    checks: Sequence[Check], context: AuditContext, progress: Callable[[str], None] | None
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """What the checks find, and the names of those for which the budget did not last."""
    findings: list[Finding] = []
    not_run: list[str] = []
    for check in checks:
        if progress is not None:
            progress(check.name)
        if context.spent:
            not_run.append(check.name)
            message = f"not run: the budget of {context.budget:g} s was spent"
            findings.append(Finding(check.name, "not_applicable", message))
        else:
            findings += _findings(check, context)
            findings += _findings_on_variants(check, context)
    return tuple(findings), tuple(not_run)


def _with_rules(probe: Probe, expect: Visibility | str | Sequence[Visibility | str]) -> Probe:
    """A probe that declares other rules."""
    given = expect.split(";") if isinstance(expect, str) else [expect] if hasattr(expect, "mask") else expect
    if not isinstance(given, list | tuple) or not given:
        raise ArgumentError(
            f"expect is {expect!r}, but a rule or a list of rules is needed, such as 'causal & window(64)'"
        )
    rules = tuple(parse(rule) if isinstance(rule, str) else cast(Visibility, rule) for rule in given)
    layers = len(probe.rules)
    if len(rules) not in (1, layers):
        count = "1" if layers == 1 else f"1 or {layers}"
        raise ArgumentError(f"expect lists {len(rules)} rules, but {probe.name} has {layers} layers; give {count}")
    probe = copy.copy(probe)
    probe.rules, probe.rules_declared = rules * (layers // len(rules)), True
    return probe


def _closed_over(target: object) -> list[nn.Module]:
    """Modules that a function calls: in train mode they would drop and draw while they are audited."""
    if isinstance(target, nn.Module) or not callable(target):
        return []
    if isinstance(target, functools.partial):
        return _closed_over(target.func)
    inside = [getattr(target, "__self__", None), *getattr(target, "__dict__", {}).values()]
    with suppress(TypeError, ValueError):  # no function, or one that is not yet bound
        found = inspect.getclosurevars(target)
        inside += [*found.globals.values(), *found.nonlocals.values()]
    return [value for value in inside if isinstance(value, nn.Module)]


def probe_for(target: object) -> Probe:
    """The target's own (``target.probe()``), or one by its kind.

    Known are transformers models, what takes their arguments, torch's own layers, and anything else that takes tokens
    and returns logits.
    """
    if isinstance(target, type):
        raise ArgumentError(f"{target.__name__} is a class; audit an instance of it: {target.__name__}(…)")
    own = getattr(target, "probe", None)
    if inspect.ismethod(own):
        made: Probe = own()
        return made
    if not callable(target):
        if not _missing(target):
            return cast(Probe, target)
        raise ArgumentError(
            f"{type(target).__name__} cannot be called, so it cannot be audited; give a module, a function or a probe"
            + ("; of a checkpoint's folder, pellucid.load(path)" if isinstance(target, str | Path) else "")
        )
    if inspect.isfunction(target):
        parameters = inspect.signature(target).parameters.values()
        if all(each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters):
            name = target.__name__
            raise ArgumentError(
                f"{name} takes no tokens; it is a factory, perhaps: call it, and audit what it makes: {name}()"
            )
    if is_torch_layer(target):
        return TorchLayersProbe(cast(nn.Module, target))
    return probe_for_hf(target) or (KeywordProbe(target) if keyword_arguments(target) else TokensProbe(target))


def _refuse_incomplete(probe: object) -> None:
    """What is no probe, or has no vocabulary to change tokens in, cannot be audited."""
    missing = _missing(probe)
    if missing:
        raise ArgumentError(
            f"{type(probe).__name__} is no probe: it lacks {', '.join(missing)}; subclass pellucid.probe.Probe"
        )
    size = cast(Probe, probe).vocab_size
    if size < 2:
        raise ArgumentError(
            f"the vocabulary has {size} tokens, but a token can only be changed where there are 2 or more"
        )


def _missing(probe: object) -> list[str]:
    return [name for name in _REQUIRED if not hasattr(probe, name)]


def _chosen(names: Sequence[str] | None) -> list[Check]:
    if names is None:
        return list(CHECKS.values())
    if isinstance(names, str) or not names:
        raise ArgumentError(f"checks is {names!r}, but a list of names is needed: one or more of {', '.join(CHECKS)}")
    for name in names:
        if name not in CHECKS:
            hint = did_you_mean(name, CHECKS, "; ", 0.5)
            raise ArgumentError(f"there is no check {name!r}{hint or ';'} there are {', '.join(CHECKS)}")
    return [CHECKS[name] for name in dict.fromkeys(names)]


def _findings(check: Check, context: AuditContext) -> list[Finding]:
    """What one check finds; a target that raises is a finding too."""
    found: list[Finding] = []
    try:
        reason = _not_applicable(check, context)
        if reason:
            return [Finding(check.name, "not_applicable", reason)]
        if context.not_finite:
            return [Finding(check.name, "error", f"{context.not_finite}, so nothing can be shown")]
        if check.steady and context.unsteady and not context.steady_when_seeded:
            message = f"two equal calls differ by {context.unsteady:.1e}, so nothing can be compared (see determinism)"
            return [Finding(check.name, "not_applicable", message)]
        context.use_seed(check.steady and bool(context.unsteady))
        for finding in check.run(context):
            found.append(finding)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the target is anybody's code)
        if isinstance(error, Exception) and is_refusal(error) and context.step > 1:
            taken = f"multiples of {context.step}" if context.step < context.length else str(context.length)
            message = f"the target takes rows of {taken} tokens, and refuses another: {one_line(error)}"
            found.append(Finding(check.name, "not_applicable", message))
        else:
            found.append(Finding(check.name, "error", _raised(error)))
    return [replace(each, check=check.name) for each in found]


def _raised(error: BaseException) -> str:
    """An error with its place; one of the audit's own is not reported as the target's."""
    frames = traceback.extract_tb(error.__traceback__)
    ours, library = Path(__file__).parent, Path(torch.__file__).parent
    calling = (ours / "engine" / "target_run.py", ours / "probes")
    places = [Path(frame.filename) for frame in frames]
    called = any(
        any(place.is_relative_to(each) for each in calling)
        or not (place.is_relative_to(ours) or place.is_relative_to(library))
        for place in places
    )  # fmt: skip
    place = f"{places[-1].name}:{frames[-1].lineno} in {frames[-1].name}"
    message = f"{type(error).__name__}: {one_line(error)} ({place})"
    return message if called else f"the audit itself failed, which says nothing about the target: {message}"


def _findings_on_variants(check: Check, context: AuditContext) -> list[Finding]:
    """The same check on variants of the target, each under its name.

    A target that takes a mask which its rules do not declare has to obey it. Weights that are exactly 0, as output
    projections and gates are at first, hide the paths behind them, so a copy in which they are small is tested too.
    """
    variants: dict[str, Probe] = getattr(context.probe, "restricted", dict)() if check.name == "future" else {}
    if check.name in _OF_FLOW:
        randomized = context.once("zero weights randomized", lambda: _with_zero_weights_randomized(context.probe))
        variants = {**variants, **randomized}
    found: list[Finding] = []
    for case, probe in variants.items():
        if not context.spent:
            found += _prefixed(case, _findings(check, context.variant(case, probe)))
    for mode in context.probe.call_modes if check.name in _BY_MODE else ():
        with context.probe.call_mode(mode):
            if not context.spent:
                found += _prefixed(mode, _findings(check, context.variant(mode, context.probe)))
    return found


def _prefixed(case: str, findings: list[Finding]) -> list[Finding]:
    """The findings of a variant of the target, under its name."""
    return [replace(each, case=f"{case}, {each.case}".removesuffix(", ")) for each in findings]


def _with_zero_weights_randomized(probe: Probe) -> dict[str, Probe]:
    """A copy in which weights that are 0 throughout are small random numbers; none where there are no such weights."""
    module = probe.module
    if module is None:
        return {}
    generator = torch.Generator().manual_seed(1)
    try:
        zeros = [
            name for name, weight in module.named_parameters()
            if weight.requires_grad and "bias" not in name.rpartition(".")[2]
            and weight.numel() and not bool((weight.abs() > _AS_GOOD_AS_ZERO).any())
        ]  # fmt: skip
        if not zeros:
            return {}
        copied = copy.deepcopy(module)
        weights = dict(copied.named_parameters())
        with torch.no_grad():
            for name in zeros:
                weights[name].copy_(0.02 * torch.randn(weights[name].shape, generator=generator))
        return {f"with {join_some(zeros, 1)} no longer 0": probe.with_module(copied)}
    except Exception:  # noqa: BLE001 (anybody's code: then there is no such copy)
        return {}


def _not_applicable(check: Check, context: AuditContext) -> str:
    probe = context.probe
    missing = sorted(check.needs - probe.capabilities)
    if missing:
        refused = getattr(probe, "refused", {})
        reason = next((f": it raises {refused[name]}" for name in missing if refused.get(name)), "")
        return f"{probe.name} does not support {', '.join(missing)}{reason}"
    if context.length < check.length:
        return f"the check needs {check.length} tokens in a row, but {probe.name} takes {context.length}"
    return ""


def _pictures(context: AuditContext) -> tuple[tuple[Flow, ...], tuple[TokenView, ...]]:
    measured = context.measured("flow")
    if not isinstance(measured, InfluenceMatrix):
        return (), ()
    views: tuple[TokenView, ...] = ()
    with suppress(Exception):  # the target is anybody's code, and a picture is no verdict
        views = (measured.view(context),)
    return (measured.record(context.probe.name),), views


def _how_it_was_called(probe: Probe) -> str:
    """The probe's class, its capabilities, and how to choose another."""
    capabilities = ", ".join(sorted(probe.capabilities)) or "tokens alone"
    if getattr(probe, "hidden_states", False):
        capabilities += ", its hidden states compared, for it returns no logits"
    called = f"called by {type(probe).__name__} ({capabilities})"
    if isinstance(probe, TokensProbe):
        notes = f"; {probe.notes}" if probe.notes else ""
        called += f"{notes}; for what is missing there, padding or a cache say, write a probe: audit(probe=…)"
    return called
