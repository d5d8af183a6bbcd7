"""``pellucid audit``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import common

if TYPE_CHECKING:
    from pellucid.audits import AuditReport
    from pellucid.probe import Probe

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A checkpoint folder, a Hugging Face folder, or module:attribute (a model, a class, a factory).",
        show_default=False,
    ),
]
Checks = Annotated[
    str | None,
    typer.Option(help="Only these checks, such as future,cache. Default: all.", show_default=False),
]
Expect = Annotated[
    str | None,
    typer.Option(
        help="The rule to hold it to, such as 'causal & window(4)'; one a layer with ';' between. "
        "Default: what the target declares.",
        show_default=False,
    ),
]
Length = Annotated[int, typer.Option(help="How many tokens the long sequences have.", min=2)]
Budget = Annotated[
    float | None,
    typer.Option(help="About how many seconds to spend; what is left over is told as not asked.", show_default=False),
]
Seed = Annotated[int, typer.Option(help="Which random tokens are used.")]
Strict = Annotated[bool, typer.Option("--strict", help="Fail on what is fragile or was not asked too.")]
JUnit = Annotated[Path | None, typer.Option(help="Write a JUnit XML file.", show_default=False)]
Html = Annotated[Path | None, typer.Option(help="Write one page to look at.", show_default=False)]


def audit(
    target: Target,
    checks: Checks = None,
    expect: Expect = None,
    length: Length = 24,
    budget: Budget = None,
    seed: Seed = 0,
    strict: Strict = False,
    junit: JUnit = None,
    html: Html = None,
    as_json: common.Json = False,
) -> None:
    """Prove that information flows only where it should, in any model.

    Exits with 1 when something leaks or raises, when nothing could be shown, or by --strict when something is fragile
    or the --budget was spent before every check was asked. Without --strict such an audit is told as unfinished, not
    as passed, and exits with 0.

    \b
    Example:
      pellucid audit my-model --checks future,padding,cache
      pellucid audit mypackage.models:make_model --html audit.html
      pellucid audit transformers:GPT2LMHeadModel --budget 30
    """
    from pellucid.audits import audit as ask
    from pellucid.audits.junit import write_junit

    with common.stdout_to_stderr():
        found, probe = _found(target)
        probe = _held_to(found, probe, expect)
    with common.Progress(as_json) as progress, common.stdout_to_stderr():
        report = ask(
            found, probe, common.names(checks), length=length, budget=budget, seed=seed, progress=progress.step
        )
    passed = report.passed_strictly if strict else report.passed
    if junit is not None:
        write_junit(junit, report, strict=strict)
    if html is not None:
        from pellucid.cli.page import audit_page

        audit_page(html, report, passed)
    _tell(report, passed, as_json, length)


def _found(target: str) -> tuple[object, Probe | None]:
    """The target, and how it is called where that is not its own business."""
    from pellucid.audits.probes.hf_load import from_folder, is_hf_folder
    from pellucid.audits.targets import from_text
    from pellucid.checkpoints.pointers import meant
    from pellucid.checkpoints.store import CONTRACT

    path = meant(target) if os.path.exists(target) else Path(target)
    if (path / CONTRACT).is_file() or (path.is_dir() and not is_hf_folder(path)):
        from pellucid.checkpoints import load

        checkpoint = load(target)
        probe = checkpoint.probe()
        probe.name = target
        return checkpoint.model, probe
    if path.is_dir():
        return from_folder(path), None
    return from_text(target), None


def _held_to(found: object, probe: Probe | None, expect: str | None) -> Probe | None:
    """The probe with other rules than the target's own."""
    if expect is None:
        return probe
    from pellucid.audits.run import probe_for
    from pellucid.errors import ArgumentError
    from pellucid.visibility import parse

    probe = probe_for(found) if probe is None else probe
    rules = tuple(parse(text) for text in expect.split(";"))
    layers = len(probe.rules)
    if len(rules) not in (1, layers):
        count = "1" if layers == 1 else f"1 or {layers}"
        raise ArgumentError(f"--expect lists {len(rules)} rules, but {probe.name} has {layers} layers; give {count}")
    probe.rules, probe.declared = rules * (layers // len(rules)), True
    return probe


def _tell(report: AuditReport, passed: bool, as_json: bool, length: int) -> None:
    from pellucid.reports import show

    if as_json:
        told: dict[str, Any] = {**report.to_dict(), "passed": passed}
        common.print_json(told)
    else:
        show(report.table(), sys.stdout)
        verdict = "failed" if not passed else "passed" if report.finished else "unfinished: nothing leaked so far"
        typer.echo(f"{verdict} ({'; '.join(_circumstances(report, length))})")
    raise typer.Exit(0 if passed else 1)


def _circumstances(report: AuditReport, length: int) -> list[str]:
    """What a verdict has to be read with."""
    told = [f"{report.seconds:.1f} s"]
    if report.length is not None:
        shorter = f": it does not take {length}" if report.length < length else ""
        told.insert(0, f"sequences of up to {report.length} tokens{shorter}")
    if report.unasked:
        names = ", ".join(report.unasked)
        told.append(f"{len(report.unasked)} of {len(report.verdicts)} checks not asked, the budget was spent: {names}")
    return [*told, report.called]
