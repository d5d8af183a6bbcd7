"""What goes into a page: an audit's verdicts and flows; a run's curves, verdicts, sample text and circumstances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pellucid.cli import common

if TYPE_CHECKING:
    from pellucid.audits import AuditReport
    from pellucid.records import Cell, Curve, Curves, Table
    from pellucid.reports.page import Section
    from pellucid.training import TrainResult

NAME = "report.html"
"""The page of a run, in its folder."""


def audit_page(path: str | Path, report: AuditReport, passed: bool | None = None) -> None:
    """Write the page of an audit; ``passed`` is the outcome, by default the report's own."""
    from pellucid.reports import write_page

    views: list[Section] = [("Token by token", report.views)] if report.views else []
    subtitle = _outcome(report, report.passed if passed is None else passed)
    write_page(path, f"Audit of {report.target}", [*_verdicts(report), *views], subtitle=subtitle)


def run_page(
    path: str | Path,
    run_folder: str | Path,
    report: AuditReport | None = None,
    extra: Sequence[Section] = (),
    *,
    sample: bool = True,
) -> None:
    """Write the page of a training run: ``extra``, curves, the verdicts of ``report``, a sample text, circumstances.

    The ``sample`` is held-out text, shown with what the last checkpoint attends to and what moves it.
    """
    from pellucid.reports import write_page
    from pellucid.training.run_summary import read_run

    run = read_run(run_folder)
    sections: list[Section] = [("The run", [_facts(run)]), *extra, ("Curves", curves(run.run / "metrics.jsonl"))]
    if report is not None:
        sections += _verdicts(report)
    if sample:
        sections += _sample(run.run)
    sections.append(("Circumstances", _circumstances(run)))
    subtitle = (
        _outcome(report, report.passed)
        if report is not None
        else f"{run.state}, {run.steps:,} steps, {run.tokens:,} tokens"
    )
    write_page(path, f"Training run {run.run.resolve().name}", sections, subtitle=subtitle)


def refresh_run_page(result: TrainResult) -> None:
    """Write the page of a run that has just ended; what goes wrong is one line and no failure of the run."""
    path = result.run / NAME
    if not result.interrupted and _is_newer(path, result.run / "metrics.jsonl"):
        return  # nothing was trained since, and the page may hold more than this one would
    write_or_warn(path, result.run, sample=not result.interrupted)


def write_or_warn(path: Path, run_folder: Path, *arguments: Any, **options: Any) -> None:
    """:func:`run_page`, of which a failure is one line on standard error."""
    try:
        run_page(path, run_folder, *arguments, **options)
    except Exception as error:  # noqa: BLE001 (a page is worth no run)
        message = " ".join(str(error).split()) or type(error).__name__
        typer.echo(common.printable(f"warning: no page at {path}: {message[:300]}"), err=True)
    else:
        typer.echo(f"{path} shows the run", err=True)


def _is_newer(path: Path, than: Path) -> bool:
    try:
        return path.stat().st_mtime >= than.stat().st_mtime
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------ an audit


def _outcome(report: AuditReport, passed: bool) -> str:
    if passed:
        decided = sum(status in ("pass", "fragile") for status in report.verdicts.values())
        return f"The audit passed: {decided} checks in {report.seconds:.1f} s, and none found a leak."
    for bad in (("leak", "error"), ("fragile",)):
        failed = [name for name, status in report.verdicts.items() if status in bad]
        if failed:
            return f"The audit failed: {', '.join(failed)}."
    return "The audit showed nothing: no check could be run."


def _verdicts(report: AuditReport) -> list[Section]:
    """The verdict of each check, every case of every check, and the flows that were measured."""
    from pellucid.records import Table

    cases = Table(
        "Every case",
        ("check", "verdict", "case", "where", "what was seen", "size", "decided"),
        tuple(
            (f.check, f.status, f.case, str(f.where) if f.where else "", f.message, f.size, f.decided)
            for f in report.findings
        ),
    )
    sections: list[Section] = [("Verdicts", [report.table(), cases])]
    if report.flows:
        sections.append(("Who sees whom", report.flows))
    return sections


# ------------------------------------------------------------------------------------------------ a run


def _facts(run: Any) -> Table:
    from pellucid.records import Table

    by_bytes = run.measure == "bits per byte"
    what, of = ("text", " (nats a token)") if by_bytes else ("documents", "")
    facts: dict[str, Cell] = {
        "state": run.state if run.problem is None else f"{run.state}: {run.problem}",
        "steps": run.steps,
        "tokens trained on" if by_bytes else "targets trained on": run.tokens,
        "parameters": run.parameters,
        f"training loss of the last step{of}": run.loss,
        f"{run.measure} of all held-out {what}": run.final,
        f"best {run.measure} on the way": run.best,
        **_figures(run),
        "tokens per second": None if run.tokens_per_second is None else round(run.tokens_per_second),
        "begun": run.began,
        "precision": run.precision,
    }
    return Table("", ("", "value"), tuple((name, value) for name, value in facts.items() if value is not None))


def _figures(run: Any) -> dict[str, Cell]:
    """The metrics of the last evaluation, and their baselines."""
    shown: dict[str, Cell] = {}
    for name, metric in run.metrics.items():
        numbers = metric if isinstance(metric, dict) else {}
        value, baseline = _real(numbers.get("value")), _real(numbers.get("baseline"))
        shown[str(name)[:80]] = f"{value:.4f}" if math.isnan(baseline) else f"{value:.4f} (baseline {baseline:.4f})"
    return shown


def curves(metrics: Path) -> list[Curves]:
    """The series in a ``metrics.jsonl``; a line that lacks a number is a gap."""
    from pellucid.records import Curve, Curves
    from pellucid.training.loggers import MetricsLog

    lines = list(MetricsLog(metrics).records())
    steps = [line for line in lines if line["kind"] == "step"]
    heldout = [line for line in lines if line["kind"] == "validation" and not line.get("final")]
    final = [line for line in lines if line["kind"] == "validation" and line.get("final")]
    speed = tuple(_real(line.get("num_targets")) / (_real(line.get("seconds")) or math.nan) for line in steps)
    loss = _curve("training", steps, "loss")
    bits = any("bits_per_byte" in line for line in (*heldout, *final)) or not (heldout or final)
    drawn = [
        Curves("Loss", (loss, *_both(heldout, final, "loss")), y_label="nats a token" if bits else ""),
        *([Curves("Bits per byte", _both(heldout, final, "bits_per_byte"))] if bits else _measures(heldout, final)),
        Curves("Learning rate", (_curve("rate", steps, "learning_rate"),)),
        Curves("Gradient norm, before clipping", (_curve("norm", steps, "grad_norm"),), log=True),
        Curves("Speed", (Curve("tokens per second", loss.x, speed),)),
        *_routing(steps),
    ]
    filled = [replace(record, curves=tuple(one for one in record.curves if one.x)) for record in drawn]
    return [record for record in filled if any(len(one.x) > 1 for one in record.curves)]


Lines = Sequence[dict[str, Any]]


def _curve(name: str, lines: Lines, *keys: str) -> Curve:
    """The values under nested ``keys``, by step."""
    from pellucid.records import Curve

    def value(line: Any) -> float:
        for key in keys:
            line = line.get(key) if isinstance(line, dict) else None
        return _real(line)

    return Curve(name, tuple(_real(line["step"]) for line in lines), tuple(map(value, lines)))


def _both(heldout: Lines, final: Lines, *keys: str) -> tuple[Curve, Curve]:
    return _curve("held out, sample", heldout, *keys), _curve("all held out", final, *keys)


def _measures(heldout: Lines, final: Lines) -> list[Curves]:
    """The metrics of an objective without bits per byte, except the first: the loss, which has its curve already."""
    from pellucid.records import Curves

    heldout, final = ([line for line in lines if isinstance(line.get("metrics"), dict)] for lines in (heldout, final))
    names = dict.fromkeys(name for line in (*heldout, *final) for name in list(line["metrics"])[1:])

    def having(lines: Lines, name: str) -> Lines:
        return [line for line in lines if isinstance(line["metrics"].get(name), dict)]

    return [
        Curves(
            str(name)[:80].capitalize(),
            (
                *_both(having(heldout, name), having(final, name), "metrics", name, "value"),
                _curve("baseline", having([*heldout, *final], name), "metrics", name, "baseline"),
            ),
        )
        for name in names
    ]


def _routing(steps: Lines) -> list[Curves]:
    """How evenly experts were used; empty where there are none."""
    from pellucid.records import Curves

    routed = [line for line in steps if isinstance(line.get("routing"), dict)]
    names = {"most": "of the busiest expert", "mean": "if all had as many", "dropped": "dropped"}
    shares = tuple(_curve(name, routed, "routing", key) for key, name in names.items())
    balance = _curve("mean over layers", routed, "routing", "balance_loss")
    return [Curves("Share of tokens", shares), Curves("Balance loss", (balance,))] if routed else []


def _real(value: object) -> float:
    """A number from somebody's file; NaN for anything else."""
    from pellucid.training.run_summary import real

    return math.nan if (found := real(value)) is None else found


def _sample(run: Path) -> list[Section]:
    """Held-out text through the last checkpoint, and who sees whom in it."""
    from pellucid.checkpoints import load
    from pellucid.cli.html_samples import can_be_shown, heldout_text, token_view
    from pellucid.records import Flow
    from pellucid.training.config import TrainConfig
    from pellucid.training.objectives import CausalLMConfig
    from pellucid.training.run_folder import RunFolder

    last = RunFolder(run).read_pointer("last")
    if last is None:
        return []
    checkpoint = load(last)
    if not can_be_shown(checkpoint.model):
        return []
    config = TrainConfig.from_file(run / "config.yaml")
    if not isinstance(config.objective, CausalLMConfig):
        return []  # the view shows what a prediction of the next token was moved by
    view = token_view(checkpoint, heldout_text(config))
    flow = Flow("All its tokens at once", view.may_see, view.moved, view.tokens, view.tokens, view.note)
    return [("A sample text", [view]), ("Who sees whom in the sample text", [flow])]


def _circumstances(run: Any) -> list[Table]:
    from pellucid.configfile.base_config import flatten
    from pellucid.records import Table
    from pellucid.training.environment import read_environment

    environment = read_environment(run.run)
    environment.pop("sessions", None)

    def rows(mapping: dict[str, Any]) -> tuple[tuple[Cell, ...], ...]:
        flat = flatten(mapping).items()
        return tuple((key, value if isinstance(value, int | float) else str(value)[:1000]) for key, value in flat)

    parts = (("Configuration", run.config), ("Environment", environment))
    return [Table(title, ("key", "value"), rows(mapping)) for title, mapping in parts if mapping]
