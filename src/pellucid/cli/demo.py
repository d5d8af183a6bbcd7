"""``pellucid demo``: the whole way once, on data that every machine with Python has."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pellucid.cli import common
from pellucid.cli.html_report import NAME, write_or_warn

if TYPE_CHECKING:
    from pellucid.audits import AuditReport
    from pellucid.data import Document
    from pellucid.reports.page import Section
    from pellucid.training import TrainConfig, TrainResult

PROMPTS = (
    "import os\nimport sys\n\ndef main(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item",
    "    def test_",
    "for i in range(",
)
NEW_TOKENS = 40

MinutesOption = Annotated[
    float | None, typer.Option(min=0.01, help="How long to train. Default: 4.65.", show_default=False)
]
Out = Annotated[Path, typer.Option(help="The run folder; an older demo in it is moved aside.")]


def demo(minutes: MinutesOption = None, out: Out = Path("runs/demo"), as_json: common.Json = False) -> None:
    """Train on this machine's Python library, measure, audit, complete code.

    Writes summary.json and report.html, a page to look at, into the run folder. Exits with 1 when an audit finds a
    leak.

    \b
    Example:
      pellucid demo --minutes 60 --out runs/long-demo
    """
    from pellucid.training import train
    from pellucid.training.loggers import console_listener

    started = time.monotonic()
    _move_aside(out)
    config = _config(minutes)
    _say("training on the Python source of this machine")
    with console_listener() as listener:
        result = train(config, out, on_event=listener)
    if result.interrupted:
        typer.echo(f"stopped; resume with: pellucid train {out} --resume", err=True)
        raise typer.Exit(128 + signal.Signals[result.signal])
    summary, report = _summary(config, result, started)
    _finish(out, summary, report, as_json)
    raise typer.Exit(0 if report.passed else 1)


def _config(minutes: float | None) -> TrainConfig:
    from pellucid.configfile import apply_overrides, read_mapping
    from pellucid.training import TrainConfig

    mapping = read_mapping(Path(str(files("pellucid.cli") / "demo.yaml")))
    minutes = mapping["max_minutes"] if minutes is None else minutes
    overrides = [f"max_minutes={minutes}", *size_for_this_machine(minutes).overrides()]
    return TrainConfig.from_mapping(apply_overrides(mapping, overrides))


def _summary(config: TrainConfig, result: TrainResult, started: float) -> tuple[dict[str, Any], AuditReport]:
    """The summary of a finished run, measured on the checkpoint that was saved."""
    from pellucid.audits import audit
    from pellucid.checkpoints import load
    from pellucid.data import open_corpus
    from pellucid.generation import generate

    checkpoint = load(result.checkpoint)
    heldout = open_corpus(config.data.source, heldout_fraction=config.data.heldout_fraction)
    _say("auditing the model")
    probe = checkpoint.probe()
    probe.name = str(result.checkpoint)
    report = audit(checkpoint.model, probe)
    _say("completing code")
    completions = generate(checkpoint, list(PROMPTS), max_new_tokens=NEW_TOKENS)
    assert result.validation is not None
    summary = {
        "tokens_trained": result.tokens,
        "train_tokens_per_second": round(result.tokens_per_second, 1),
        "heldout_bits_per_byte": result.validation.bits_per_byte,
        "gzip_bits_per_byte": _compressed(heldout.documents("heldout"), lambda data: gzip.compress(data, 9)),
        "xz_bits_per_byte": _compressed(heldout.documents("heldout"), _xz),
        "heldout_files": result.validation.documents,
        "heldout_bytes": result.validation.bytes,
        "audits": {name: status not in ("leak", "error") for name, status in report.verdicts.items()},
        "completions": [
            {"prompt": prompt, "text": completion.text} for prompt, completion in zip(PROMPTS, completions, strict=True)
        ],
        "parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
        "checkpoint": str(result.checkpoint),
        "seconds": round(time.monotonic() - started, 1),
    }
    return summary, report


def _finish(out: Path, summary: dict[str, Any], report: AuditReport, as_json: bool) -> None:
    from pellucid.checkpoints.files import write_text
    from pellucid.reports import show

    write_text(out / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    write_or_warn(out / NAME, out, report, _sections(summary))
    if as_json:
        common.print_json(summary)
        return
    for completion in summary["completions"]:
        typer.echo(common.printable(f"\n{completion['prompt']}\u27e8{completion['text']}\u27e9"))
    typer.echo("")
    show(report.table(), sys.stdout)
    typer.echo(
        f"\nheld-out bits per byte: {summary['heldout_bits_per_byte']:.3f}"
        f"   (gzip {summary['gzip_bits_per_byte']:.3f}, xz {summary['xz_bits_per_byte']:.3f})"
        f"\n{out / 'summary.json'} holds all of it; pellucid chat {summary['checkpoint']} talks to the model"
    )


def _sections(summary: dict[str, Any]) -> list[Section]:
    """The sections of a demo's page, besides those of any run."""
    from pellucid.records import Table

    names = {"heldout_bits_per_byte": "this model", "xz_bits_per_byte": "xz", "gzip_bits_per_byte": "gzip"}
    against = tuple((name, float(summary[key])) for key, name in names.items())
    completed = tuple((completion["prompt"], completion["text"]) for completion in summary["completions"])
    return [
        ("Held-out text", [Table("", ("bits per byte, file by file", ""), against)]),
        ("Completions", [Table("", ("prompt", "the model's continuation"), completed)]),
    ]


def _compressed(documents: Iterable[Document], compress: Callable[[bytes], bytes]) -> float:
    """Bits per byte of a compressor, file by file."""
    texts = [document.text.encode("utf-8") for document in documents]
    return 8 * sum(len(compress(text)) for text in texts) / sum(map(len, texts))


def _xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)


def _move_aside(out: Path) -> None:
    """An older demo keeps its files, under a name of its own."""
    if not (out / "config.yaml").is_file():  # not a run: the new run will refuse whatever else is there
        return
    number = next(n for n in range(1, 10**6) if not out.with_name(f"{out.name}.{n}").exists())
    aside = out.with_name(f"{out.name}.{number}")
    out.rename(aside)
    _say(f"the older demo is now in {aside}")


def _say(text: str) -> None:
    typer.echo(text, err=True)


# ---- how large a model the demo can train in its minutes on this machine
#
# A model that is too large sees too little text, one that is too small has no room for it. On this data a model of N
# parameters wants about N/2 tokens at least, which cost 6 · N · N/2 operations, forward and backward (Kaplan et al.
# 2020 §2.1).


class Size(NamedTuple):
    """A model of the demo's kind."""

    hidden: int
    layers: int
    heads: int
    inner: int
    batch: int

    @property
    def parameters(self) -> int:
        """Matrices of the blocks and the tied table of 4096 tokens."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.inner
        return self.layers * block + 4096 * self.hidden

    def overrides(self) -> list[str]:
        """Settings of ``demo.yaml`` that make this size."""
        rules = ["causal & window(8)", *["causal"] * (self.layers - 1)]
        return [
            f"model.hidden_size={self.hidden}",
            f"model.layers={rules}",
            f"model.attention.num_attention_heads={self.heads}",
            f"model.ffn.intermediate_size={self.inner}",
            f"batch_size={self.batch}",
        ]


SIZES = (Size(128, 3, 2, 384, 2), Size(192, 4, 3, 512, 2), Size(256, 6, 4, 688, 4), Size(384, 8, 6, 1024, 8))

_USED = 0.5  # of the speed of a bare matrix product, what a training step of a small model reaches


def choose_size(minutes: float, operations_per_second: float) -> Size:
    """The largest size that can see half a token for each of its parameters, or else the smallest."""
    operations = operations_per_second * _USED * 60 * minutes
    affordable = math.sqrt(operations / 3)
    fitting = [size for size in SIZES if size.parameters <= affordable]
    return fitting[-1] if fitting else SIZES[0]


def size_for_this_machine(minutes: float) -> Size:
    """The size that follows from how fast this machine multiplies matrices."""
    from pellucid.training.environment import fastest_precision, operations_per_second

    return choose_size(minutes, operations_per_second(fastest_precision()))
