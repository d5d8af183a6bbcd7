"""What goes into a page: an audit's verdicts and flows; a run's curves, verdicts, sample text and circumstances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    """Write the page of an audit; ``passed`` says how it was taken where that is not the report's own word."""
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
        return  # nothing was trained since, and the page may tell more than this one would
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
    return "The audit showed nothing: no check could be asked."


def _verdicts(report: AuditReport) -> list[Section]:
    """What each check said, every case of every check, and the flows that were measured."""
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
        "tokens learnt from" if by_bytes else "predictions learnt from": run.tokens,
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
    """What the last validation found besides, and what a guess reaches."""
    shown: dict[str, Cell] = {}
    for name, metric in run.metrics.items():
        numbers = metric if isinstance(metric, dict) else {}
        value, guess = _real(numbers.get("value")), _real(numbers.get("baseline"))
        shown[str(name)[:80]] = f"{value:.4f}" if math.isnan(guess) else f"{value:.4f} (baseline {guess:.4f})"
    return shown


def curves(metrics: Path) -> list[Curves]:
    """The series in a ``metrics.jsonl``; a line that lacks a number is a gap."""
    from pellucid.records import Curve, Curves
    from pellucid.training.loggers import MetricsLog

    lines = list(MetricsLog(metrics).records())
    steps = [line for line in lines if line["kind"] == "step"]
    heldout = [line for line in lines if line["kind"] == "validation" and not line.get("final")]
    final = [line for line in lines if line["kind"] == "validation" and line.get("final")]

    def curve(name: str, lines: list[dict[str, Any]], key: str) -> Curve:
        return Curve(name, tuple(_real(line["step"]) for line in lines), tuple(_real(line.get(key)) for line in lines))

    def both(key: str) -> tuple[Curve, Curve]:
        return curve("held out, sample", heldout, key), curve("all held out", final, key)

    speed = tuple(_real(line.get("num_targets")) / (_real(line.get("seconds")) or float("nan")) for line in steps)
    loss = curve("training", steps, "loss")
    bits = any("bits_per_byte" in line for line in (*heldout, *final)) or not (heldout or final)
    drawn = [
        Curves("Loss", (loss, *both("loss")), y_label="nats a token" if bits else ""),
        *_measures(heldout, final, both),
        Curves("Learning rate", (curve("rate", steps, "learning_rate"),)),
        Curves("Gradient norm, before clipping", (curve("norm", steps, "grad_norm"),), log=True),
        Curves("Speed", (Curve("tokens per second", loss.x, speed),)),
        *_routing(steps),
    ]
    filled = [replace(record, curves=tuple(one for one in record.curves if one.x)) for record in drawn]
    return [record for record in filled if any(len(one.x) > 1 for one in record.curves)]


def _measures(
    heldout: list[dict[str, Any]], final: list[dict[str, Any]], both: Callable[[str], tuple[Curve, Curve]]
) -> list[Curves]:
    """Bits per byte, or the metrics of another objective; the first is the loss, which has its curve already."""
    from pellucid.records import Curve, Curves

    shown = [line["metrics"] for line in (*heldout, *final) if isinstance(line.get("metrics"), dict)]
    if not shown:
        return [Curves("Bits per byte", both("bits_per_byte"))]

    def curve(name: str, figure: str, lines: list[dict[str, Any]], key: str) -> Curve:
        found = [(line["step"], line["metrics"].get(figure)) for line in lines if isinstance(line.get("metrics"), dict)]
        points = [(_real(step), _real(metric.get(key))) for step, metric in found if isinstance(metric, dict)]
        return Curve(name, tuple(x for x, _ in points), tuple(y for _, y in points))

    return [
        Curves(
            str(name)[:80].capitalize(),
            (
                curve("held out, sample", name, heldout, "value"),
                curve("all held out", name, final, "value"),
                curve("baseline", name, [*heldout, *final], "baseline"),
            ),
        )
        for name in dict.fromkeys(key for metrics in shown for key in list(metrics)[1:])
    ]


def _routing(steps: list[dict[str, Any]]) -> list[Curves]:
    """How evenly experts were used; nothing where there are none."""
    from pellucid.records import Curve, Curves

    routed = [line for line in steps if isinstance(line.get("routing"), dict)]
    if not routed:
        return []
    x = tuple(_real(line["step"]) for line in routed)

    def curve(name: str, key: str) -> Curve:
        return Curve(name, x, tuple(_real(line["routing"].get(key)) for line in routed))

    shares = (curve("of the busiest expert", "most"), curve("if all had as many", "mean"), curve("dropped", "dropped"))
    return [Curves("Share of tokens", shares), Curves("Balance loss", (curve("mean over layers", "balance_loss"),))]


def _real(value: object) -> float:
    """A number from somebody's file; NaN for anything else."""
    from pellucid.training.run_summary import real

    return math.nan if (found := real(value)) is None else found


def _sample(run: Path) -> list[Section]:
    """Held-out text through the last checkpoint, and who sees whom in it."""
    from pellucid.checkpoints import load
    from pellucid.cli.sample import can_be_shown, heldout_text, token_view
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
    from pellucid.configfile.config import flatten
    from pellucid.records import Table
    from pellucid.training.environment import read_environment

    environment = read_environment(run.run)
    environment.pop("sessions", None)

    def rows(mapping: dict[str, Any]) -> tuple[tuple[Cell, ...], ...]:
        flat = flatten(mapping).items()
        return tuple((key, value if isinstance(value, int | float) else str(value)[:1000]) for key, value in flat)

    parts = (("Configuration", run.config), ("Environment", environment))
    return [Table(title, ("key", "value"), rows(mapping)) for title, mapping in parts if mapping]
