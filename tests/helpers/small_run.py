"""A run of a second, and what a test may want to know of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pellucid.checkpoints.files import canonical_digest, digest
from pellucid.training.config import TrainConfig
from pellucid.training.results import Event, Stepped, Warned

STEP = ("step", "tokens", "num_targets", "loss", "learning_rate", "grad_norm", "epoch")
VALIDATION = ("step", "bits_per_byte", "best", "final")


def small_words(folder: Path) -> dict[str, Any]:
    """The words of a config, over texts that are written into ``folder``."""
    folder.mkdir(exist_ok=True)
    for n in range(12):
        (folder / f"{n}.txt").write_text(f"line {n} of the text, to be or not to be {n * n}\n" * (3 + n % 5))
    return {
        "model": {
            "vocab_size": 270,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "attention": {"num_attention_heads": 2},
            "ffn": {"kind": "dense", "intermediate_size": 16},
        },
        "data": {"source": str(folder / "*.txt"), "heldout_fraction": 0.3, "max_length": 16},
        "max_steps": 6,
        "batch_size": 2,
        "eval_steps": 2,
        "evaluation": {"num_documents": 2},
        "save_steps": 2,
        "save_total_limit": 4,
        "num_threads": 1,
    }


def small_config(words: dict[str, Any], **changes: Any) -> TrainConfig:
    return TrainConfig.from_mapping(words | changes)


def logged(run: Path) -> list[list[Any]]:
    """What two equal runs log alike."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [[line[name] for name in (STEP if line["kind"] == "step" else VALIDATION)] for line in lines]


def assert_same(run: Path, straight: Path) -> None:
    """Log, pointers, weights, optimizer and generators are those of the undisturbed run."""
    assert logged(run) == logged(straight)
    for name in ("last", "best"):
        assert (run / name).read_text() == (straight / name).read_text()
        step = (run / name).read_text().strip()
        for file in ("model.safetensors", "training/state.safetensors"):
            a, b = (load_file(folder / "checkpoints" / step / file) for folder in (run, straight))
            # not Python's own generator: checking annotations at run time draws from it
            keys = [key for key in a if not key.startswith("random/python")]
            assert a.keys() == b.keys()
            assert [key for key in keys if not torch.equal(a[key], b[key])] == []


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resigned(training: Path, **changes: Any) -> None:
    """Change ``state.json`` and make every digest in it fit."""
    said = json.loads((training / "state.json").read_text()) | changes
    del said["sha256"]
    said["tensors_sha256"] = digest(training / "state.safetensors")
    (training / "state.json").write_text(json.dumps({**said, "sha256": canonical_digest(said)}))


def warned(events: list[Event]) -> list[str]:
    found = [event.message for event in events if isinstance(event, Warned)]
    assert not any("\n" in message for message in found)
    return found


class StopAt:
    """Sends this process a signal when a step is done, and notes what is told."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT) -> None:
        self.step, self.number, self.events = step, number, list[Event]()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Stepped) and event.step == self.step:
            os.kill(os.getpid(), self.number)
