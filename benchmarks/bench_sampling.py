"""How long sampling takes: temperature with top-k and top-p at a vocabulary of 151,936, one row and sixteen.

    python benchmarks/bench_sampling.py            median milliseconds of nine rounds, with the spread

The claims: one row takes at most 3 ms a token, and a batch of 16 at most 1 ms a row. The exit code is 1 where the
median says otherwise.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from pellucid.generation import GenerationConfig
from pellucid.generation.sampling import Sampler

VOCAB_SIZE = 151_936
ROUNDS, STEPS = 9, 10
REQUESTS = {
    "temperature, top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "temperature, top-p 0.95": {"top_p": 0.95},
    "temperature alone": {},
    "temperature, top-k 50, top-p 0.95, repetition penalty": {"top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1},
}


def milliseconds(rows: int, **fields: float) -> list[float]:
    """What a token of all rows takes, round by round."""
    torch.manual_seed(0)
    logits_BV = torch.randn(rows, VOCAB_SIZE) * 3
    params = [GenerationConfig(temperature=0.8, seed=row, **fields) for row in range(rows)]
    sampler = Sampler(params, [[1, 2, 3]] * rows, VOCAB_SIZE, torch.device("cpu"))
    sampler(logits_BV)
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(STEPS):
            sampler(logits_BV).tolist()
        found.append((time.perf_counter() - begin) * 1000 / STEPS)
    return found


def main() -> int:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, vocabulary {VOCAB_SIZE}")
    kept = True
    for rows, limit in ((1, 3.0), (16, 1.0)):
        for name, fields in REQUESTS.items():
            found = [value / rows for value in milliseconds(rows, **fields)]
            median = statistics.median(found)
            print(f"{rows:3} rows  {name:55} {median:6.2f} ms a row ({min(found):.2f} to {max(found):.2f})")
            if {"top_k", "top_p"} == fields.keys():
                kept = kept and median <= limit
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
