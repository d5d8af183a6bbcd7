"""How long a training checkpoint takes: ``RunFolder.save`` between the first and the last step, against ``torch.save``.

Claim: a checkpoint that a run writes on the way (weights, optimizer, generators, tokenizer, contract, with the SHA-256
of each file) takes at most twice as long as ``torch.save`` of the same state with the same push to the disk. Both write
into the same folder, in alternating rounds; what was written is removed outside the time that is measured. The ratio of
medians comes with a bootstrap 95 % interval, and the time with a witness stands beside it.

    python benchmarks/bench_save.py [--rounds 9] [--threads 2] [--hidden-size 512] [--layers 8]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pellucid import ModelConfig, Tokenizer, build
from pellucid.training import state
from pellucid.training.config import AdamWConfig
from pellucid.training.optim import make_optimizers
from pellucid.training.run_folder import RunFolder


def timed(work: Callable[[], Path]) -> float:
    os.sync()
    started = time.perf_counter()
    path = work()
    seconds = time.perf_counter() - started
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seconds


def interval(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """The ratio of medians, and its bootstrap 95 % interval."""
    draw = random.Random(0)

    def ratio(a: list[float], b: list[float]) -> float:
        return statistics.median(a) / statistics.median(b)

    found = sorted(ratio(draw.choices(ours, k=len(ours)), draw.choices(theirs, k=len(theirs))) for _ in range(2000))
    return ratio(ours, theirs), found[50], found[1949]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("--rounds", 9), ("--threads", 2), ("--hidden-size", 512), ("--layers", 8)):
        parser.add_argument(name, type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    config = ModelConfig(
        vocab_size=8192,
        hidden_size=given.hidden_size,
        num_hidden_layers=given.layers,
        attention={"num_attention_heads": 8},
        ffn={"kind": "gated", "intermediate_size": 3 * given.hidden_size},
    )
    model = build(config, seed=0).train()
    tokenizer = Tokenizer.train(["to be, or not to be, that is the question\n"] * 8, vocab_size=300)
    optimizers = make_optimizers(model, AdamWConfig())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers.step()
    optimizers.zero_grad()
    with tempfile.TemporaryDirectory() as place:
        folder, steps = RunFolder(Path(place) / "run"), iter(range(1, 10**6))
        folder.checkpoints.mkdir(parents=True)

        def ours(prove: str) -> Path:
            return folder.save(model, tokenizer, state.TrainerState(step=next(steps)), optimizers, prove=prove)

        def theirs() -> Path:
            path = Path(place) / "theirs.pt"
            whole = {"model": model.state_dict(), "optimizer": optimizers.state_tensors()}
            with open(path, "wb") as file:
                torch.save(whole | {"random": state.random_state()}, file)
                file.flush()
                os.fsync(file.fileno())
            return path

        times: dict[str, list[float]] = {"digests": [], "torch.save": [], "witness": []}
        for number in range(given.rounds + 1):
            seconds = {
                "digests": timed(lambda: ours("digests")),
                "torch.save": timed(theirs),
                "witness": timed(lambda: ours("witness")),
            }
            if number:  # the first round warms up
                for name, value in seconds.items():
                    times[name].append(value)
    ratio, low, high = interval(times["digests"], times["torch.save"])
    found = {f"{name} ms": round(1000 * statistics.median(values), 1) for name, values in times.items()}
    size = 12 * sum(parameter.numel() for parameter in model.parameters())
    print(
        json.dumps(
            {"MB": round(size / 1e6), **found, "ratio": round(ratio, 2), "95 %": [round(low, 2), round(high, 2)]}
        )
    )


if __name__ == "__main__":
    main()
