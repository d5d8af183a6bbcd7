"""Try the mutants: ``python tests/mutants/run.py [--sample N] [--only TEXT]``, one line each, survivors at the end."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.equivalent import EQUIVALENT
from mutants.killers import killer
from mutants.mutate import FILES, Mutant, mutants


def chosen(sample: int | None, only: str = "") -> list[Mutant]:
    """All mutants, or a random sample that is always the same."""
    every = [mutant for file in FILES for mutant in mutants(file) if only in mutant.name]
    return every if sample is None else random.Random(0).sample(every, min(sample, len(every)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    survivors = []
    for mutant in chosen(asked.sample, asked.only):
        start = time.perf_counter()
        by = "equivalent" if mutant.name in EQUIVALENT else killer(mutant) or "nobody"
        counts[by] += 1
        if by == "nobody":
            survivors.append(mutant)
        print(f"{by:10} {time.perf_counter() - start:5.1f} s  {mutant.name}", flush=True)
    print(dict(counts))
    for mutant in survivors:
        print(f"alive: {mutant.name} (line {mutant.line})")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
