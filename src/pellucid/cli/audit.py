"""``pellucid audit``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
        help="The rule to check against, such as 'causal & window(4)'; one a layer with ';' between. "
        "Default: what the target declares.",
        show_default=False,
    ),
]
Length = Annotated[int, typer.Option(help="How many tokens the long sequences have.", min=2)]
Budget = Annotated[
    float | None,
    typer.Option(help="About how many seconds to spend; checks that were not run are listed.", show_default=False),
]
Seed = Annotated[int, typer.Option(help="Seed of the random tokens.")]
Strict = Annotated[bool, typer.Option("--strict", help="Also fail on fragile findings and checks not run.")]
JUnit = Annotated[Path | None, typer.Option(help="Write a JUnit XML file.", show_default=False)]
WriteProbe = Annotated[
    Path | None,
    typer.Option(
        help="Write the beginning of a probe for TARGET to this .py file, from its signature, and stop.",
        show_default=False,
    ),
]
Html = Annotated[Path | None, typer.Option(help="Write an HTML report.", show_default=False)]


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
    write_probe: WriteProbe = None,
    as_json: common.Json = False,
) -> None:
    """Check that information flows only where it should, in any model.

    Exits with 1 if something leaks or raises, if nothing could be checked, or with --strict if something is fragile or
    the --budget ran out before every check was run. Without --strict such an audit is reported as unfinished, not as
    passed, and exits with 0.

    \b
    Example:
      pellucid audit my-model --checks future,padding,cache
      pellucid audit mypackage.models:make_model --html audit.html
      pellucid audit transformers:GPT2LMHeadModel --budget 30
      pellucid audit mypackage.models:make_model --write-probe probe.py
    """
    from pellucid.audits import audit as run_audit
    from pellucid.audits.junit import write_junit

    with common.stdout_to_stderr():
        model, probe = _load_target(target)
    if write_probe is not None:
        _write_probe(write_probe, model, target)
        return
    with common.Progress(as_json) as progress, common.stdout_to_stderr():
        report = run_audit(
            model,
            probe,
            common.names(checks),
            length=length,
            budget=budget,
            seed=seed,
            expect=None if expect is None else expect.split(";"),
            progress=progress.step,
        )
    passed = report.passed_strictly if strict else report.passed
    if junit is not None:
        write_junit(junit, report, strict=strict)
    if html is not None:
        from pellucid.cli.html_report import audit_page

        audit_page(html, report, passed)
    _print_report(report, passed, as_json, length)


def _load_target(target: str) -> tuple[object, Probe | None]:
    """The model that ``target`` names, and its probe where the audit should not choose one."""
    from pellucid.audits.probes.hf_load import from_folder, is_hf_folder
    from pellucid.audits.resolve_target import from_text
    from pellucid.checkpoints.contract import CONTRACT
    from pellucid.checkpoints.files import resolve_checkpoint_path

    path = resolve_checkpoint_path(target) if os.path.exists(target) else Path(target)
    if (path / CONTRACT).is_file() or (path.is_dir() and not is_hf_folder(path)):
        from pellucid.checkpoints import load

        checkpoint = load(target)
        probe = checkpoint.probe()
        probe.name = target
        return checkpoint.model, probe
    if path.is_dir():
        return from_folder(path), None
    return from_text(target), None


def _write_probe(path: Path, model: object, target: str) -> None:
    from pellucid.audits.probes.template import probe_template
    from pellucid.audits.resolve_target import find
    from pellucid.errors import ArgumentError
    from pellucid.files import replace_file

    _, colon, attribute = target.partition(":")
    if not colon:
        raise ArgumentError(f"--write-probe needs module:attribute, not {target!r}; folders are audited as they are")
    if path.suffix != ".py" or not path.stem.isidentifier() or path.exists():
        raise ArgumentError(f"--write-probe takes a new .py file whose name can be imported, not {str(path)!r}")
    call = attribute if model is find(target) else f"{attribute}()"
    replace_file(path, probe_template(model, target, call).encode())
    typer.echo(f"wrote {path}: check each line, then pellucid audit {path.stem}:make_probe")


def _print_report(report: AuditReport, passed: bool, as_json: bool, length: int) -> None:
    from pellucid.reports import show

    if as_json:
        common.print_json({**report.to_dict(), "passed": passed})
    else:
        show(report.table(), sys.stdout)
        verdict = "failed" if not passed else "passed" if report.finished else "unfinished: nothing leaked so far"
        typer.echo(f"{verdict} ({'; '.join(_circumstances(report, length))})")
    raise typer.Exit(0 if passed else 1)


def _circumstances(report: AuditReport, length: int) -> list[str]:
    """What a verdict depends on: lengths, time, checks that were not run, how the target is called."""
    parts = [f"{report.seconds:.1f} s"]
    if report.length is not None:
        shorter = ", the longest it accepts" if report.length < length else ""
        parts.insert(0, f"sequences of up to {report.length} tokens{shorter}")
    if report.not_run:
        names = ", ".join(report.not_run)
        parts.append(f"{len(report.not_run)} of {len(report.verdicts)} checks not run, the budget was spent: {names}")
    return [*parts, report.called]
