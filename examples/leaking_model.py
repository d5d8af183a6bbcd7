"""The leak that looks like success: a mask off by one trains faster, and to a lower loss.

Two models are trained side by side on the same text, from the same weights, in the same order. They differ in one
character of their rules: one is causal, the other looks one token ahead, and so reads the answer it is graded on.
Its curve is the better one. Only the audit tells which of the two has learned anything; ``leaking_model.html`` shows
both curves, and who really sees whom.

    python examples/leaking_model.py [--steps 300] [--out leaking_model.html]
"""

from __future__ import annotations

import argparse
import inspect
import math
from pathlib import Path

import torch

import pellucid as pl
from pellucid.data import objectives
from pellucid.records import Curve, Curves
from pellucid.reports import write_page
from pellucid.visibility import causal

LENGTH, ROWS = 64, 8


def make(rule: str) -> torch.nn.Module:
    """Two layers under one rule; the weights are the same for every rule."""
    config = pl.ModelConfig(
        vocab_size=256,
        hidden_size=48,
        num_hidden_layers=2,
        rule=rule,
        attention={"num_attention_heads": 4},
        ffn={"kind": "gated", "intermediate_size": 96},
    )
    return pl.build(config, seed=0)


def batches(steps: int) -> list[pl.Batch]:
    """Pieces of the source of a module of Python's own, byte by byte, drawn in an order that is always the same."""
    text = inspect.getsource(argparse).encode("ascii", "replace")
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - LENGTH, (steps, ROWS), generator=generator).tolist()
    return [objectives.causal(pl.Batch.from_rows([list(text[at : at + LENGTH]) for at in row])) for row in starts]


def train(model: torch.nn.Module, steps: int) -> list[float]:
    """Bits per byte of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    model.train()
    for batch in batches(steps):
        loss = model(batch, want="loss").loss
        mean = loss.total / loss.count
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(mean.item() / math.log(2))
    model.eval()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("leaking_model.html"))
    args = parser.parse_args()
    curves, sections = [], []
    for name, rule in (("honest", "causal"), ("leaking", "lookahead(1)")):
        model = make(rule)
        losses = train(model, args.steps)
        curves.append(Curve(name, tuple(range(1, args.steps + 1)), tuple(losses)))
        probe = model.probe()
        probe.rules = (causal(),) * len(probe.rules)  # what both are meant to be
        report = pl.audit(probe=probe, checks=["future"])
        last = losses[-max(1, args.steps // 10) :]
        print(f"{name}: {sum(last) / len(last):.2f} bits per byte at the end; audit: {report.verdicts['future']}")
        if not report.passed:
            print(f"  {report.findings[0].where}: {report.findings[0].message}")
        sections.append((f"The {name} model", [report.table(), *report.flows]))
    picture = Curves("Training loss", tuple(curves), y_label="bits per byte", caption="The lower curve is the cheat.")
    write_page(args.out, "The leak that looks like success", [("Which one would you ship?", [picture]), *sections])
    print(f"{args.out} shows both")


if __name__ == "__main__":
    main()
