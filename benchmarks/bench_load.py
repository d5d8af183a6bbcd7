"""How long a checkpoint takes to load: by headers against transformers' lazy load, by digests against SHA-256.

Claims: loading 110 M parameters at level ``headers`` is as fast as ``transformers``' own loading of a model of the
same shape, and ``digests`` runs at the speed of the hash (it also loads, so its ratio is a little above 1). Each peer
is a process of its own that stays alive; rounds alternate between them, files are in the page cache, and the ratio of
medians comes with a bootstrap 95 % interval.

    python benchmarks/bench_load.py [--rounds 9] [--threads 2]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SHAPE = {"vocab_size": 32_000, "hidden_size": 768, "layers": 12, "heads": 12, "intermediate_size": 2048}


def make_ours(folder: Path) -> None:
    from pellucid import ModelConfig, build, save

    config = ModelConfig(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["hidden_size"],
        num_hidden_layers=SHAPE["layers"],
        attention={"num_attention_heads": SHAPE["heads"]},
        ffn={"kind": "gated", "intermediate_size": SHAPE["intermediate_size"]},
    )
    save(folder / "ours", build(config))


def make_theirs(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["hidden_size"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        intermediate_size=SHAPE["intermediate_size"],
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "theirs")


def loaders(peer: str, folder: Path) -> Callable[[], object]:
    """What one round of ``peer`` does."""
    if peer == "theirs":
        from transformers import LlamaForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        return lambda: LlamaForCausalLM.from_pretrained(folder / "theirs")
    if peer == "hash":
        return lambda: _hash(folder / "ours" / "model.safetensors")
    from pellucid import load

    return lambda: load(folder / "ours", check=peer)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def work(peer: str, folder: Path, threads: int) -> None:
    """Answer each line on standard input with the seconds of one round."""
    import torch

    torch.set_num_threads(threads)
    load = loaders(peer, folder)
    load()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        load()
        print(time.perf_counter() - start, flush=True)


def measure(peers: list[str], folder: Path, rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of every round of every peer, alternating."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    script = [sys.executable, __file__, "--folder", str(folder), "--threads", str(threads), "--peer"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = {peer: subprocess.Popen([*script, peer], env=environment, **pipes) for peer in peers}
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    try:
        for worker in workers.values():
            assert worker.stdout is not None
            if worker.stdout.readline() != "ready\n":
                raise SystemExit("a worker could not start")
        for number in range(rounds):
            for peer in peers if number % 2 else reversed(peers):
                worker = workers[peer]
                assert worker.stdin is not None
                assert worker.stdout is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
                seconds[peer].append(float(worker.stdout.readline()))
    finally:
        for worker in workers.values():
            worker.communicate()
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Ratio of medians and its bootstrap 95 % interval, rounds resampled together."""
    dice = random.Random(0)
    draws = []
    for _ in range(4000):
        chosen = dice.choices(range(len(ours)), k=len(ours))
        draws.append(statistics.median(ours[i] for i in chosen) / statistics.median(theirs[i] for i in chosen))
    draws.sort()
    return statistics.median(ours) / statistics.median(theirs), draws[100], draws[-101]


def report(name: str, ours: list[float], theirs: list[float], against: str) -> dict[str, object]:
    middle, low, high = ratio(ours, theirs)
    print(f"{name}: {statistics.median(ours):.4f} s, {against} {statistics.median(theirs):.4f} s, "
          f"ratio {middle:.2f} (95 % {low:.2f} to {high:.2f})")  # fmt: skip
    return {"name": name, "seconds": ours, "against": against, "their_seconds": theirs, "ratio": [middle, low, high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        return work(options.peer, options.folder, options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_ours(folder)
        peers = ["headers", "digests", "hash"]
        try:
            make_theirs(folder)
            peers.append("theirs")
        except ImportError:
            print("transformers is not installed; nothing to compare headers with")
        seconds = measure(peers, folder, options.rounds, options.threads)
        size = (folder / "ours" / "model.safetensors").stat().st_size
    found = []
    if "theirs" in peers:
        found.append(report("headers", seconds["headers"], seconds["theirs"], "transformers"))
    found.append(report("digests", seconds["digests"], seconds["hash"], "SHA-256 of the file"))
    for peer in ("digests", "hash"):
        print(f"{peer}: {size / statistics.median(seconds[peer]) / 1e6:.0f} MB/s")
    print(json.dumps({"bytes": size, "rounds": options.rounds, "threads": options.threads, "results": found}))
    return None


if __name__ == "__main__":
    main()
