"""Small jobs, one for each objective, on data that is made up and easy: the words of a config, its data written."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANIMALS, SKY, PLANTS = ("cat", "dog", "bird", "fish"), ("sun", "moon", "star"), ("tree",)
WORDS = (*ANIMALS, *SKY, *PLANTS)

LAYERS: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "attention": {"num_attention_heads": 2},
    "ffn": {"kind": "gated", "intermediate_size": 48},
}
RUN: dict[str, Any] = {
    "budget": {"kind": "steps", "steps": 40},
    "batch_size": 8,
    "optimizer": {"kind": "adamw", "rate": 5e-3},
    "schedule": {"warmup_steps": 4},
    "validation": {"documents": 12, "written": 16},
    "threads": 1,
}


def sentences(count: int = 160) -> list[str]:
    dice = random.Random(0)
    return [" ".join(dice.choice(WORDS) for _ in range(5)) for _ in range(count)]


def records(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "examples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(folder: Path) -> dict[str, Any]:
    for n in range(30):
        (folder / f"{n}.txt").write_text(" ".join([WORDS[n % 8]] * (20 + n % 5)))
    return {"source": str(folder / "*.txt"), "heldout_share": 0.3, "length": 32}


def examples(folder: Path, make: Callable[[str], dict[str, Any]], length: int = 32) -> dict[str, Any]:
    return {"source": records(folder, [make(s) for s in sentences()]), "heldout_share": 0.2, "length": length}


def kind_of(word: str) -> str:
    return "animal" if word in ANIMALS else "sky" if word in SKY else "plant"


def _encoder(**head: Any) -> dict[str, Any]:
    return {**LAYERS, "family": "encoder", "head": head}


def _masked_lm(folder: Path) -> dict[str, Any]:
    return {"model": {**LAYERS, "family": "encoder"}, "objective": {"kind": "masked_lm"}, "data": texts(folder)}


def _prefix_lm(folder: Path) -> dict[str, Any]:
    model = {**LAYERS, "rule": "causal | prefix()"}
    return {"model": model, "objective": {"kind": "prefix_lm"}, "data": texts(folder)}


def _prompted(folder: Path) -> dict[str, Any]:
    data = examples(folder, lambda s: {"prompt": s, "completion": " " + s.split()[0]})
    objective = {"kind": "prefix_lm", "prompt": "prompt", "completion": "completion"}
    return {"model": {**LAYERS, "rule": "causal | prefix()"}, "objective": objective, "data": data}


def _span_corruption(folder: Path) -> dict[str, Any]:
    model = {**LAYERS, "family": "encoder_decoder", "position": {"kind": "relative_bias"}}
    return {"model": model, "objective": {"kind": "span_corruption"}, "data": texts(folder)}


def _sequence_to_sequence(folder: Path) -> dict[str, Any]:
    data = examples(folder, lambda s: {"source": s, "target": s.split()[0]})
    return {"model": {**LAYERS, "family": "encoder_decoder"}, "data": data}


def _classification(folder: Path) -> dict[str, Any]:
    model = _encoder(kind="sequence_classification", num_labels=2)
    return {"model": model, "data": examples(folder, lambda s: {"text": s, "label": "yes" if "cat" in s else "no"})}


def _regression(folder: Path) -> dict[str, Any]:
    data = examples(folder, lambda s: {"text": s, "score": s.count("cat") - 0.5 * s.count("sun")})
    return {"model": _encoder(kind="regression", pooling="mean"), "data": data}


def _token_labelling(folder: Path) -> dict[str, Any]:
    data = examples(folder, lambda s: {"words": s.split(), "tags": [kind_of(word) for word in s.split()]})
    return {"model": _encoder(kind="token_classification", num_labels=3), "data": data}


def _span(folder: Path) -> dict[str, Any]:
    def answered(sentence: str) -> dict[str, Any]:
        start = (sentence + " tree").index("tree")
        return {"question": "tree?", "text": sentence + " tree", "start": start, "end": start + 4}

    return {"model": {**_encoder(kind="span"), "type_vocab_size": 2}, "data": examples(folder, answered, 48)}


def _contrastive(folder: Path) -> dict[str, Any]:
    data = examples(folder, lambda s: {"first": s, "second": " ".join(reversed(s.split()))}, 64)
    return {"model": _encoder(kind="sentence_embedding"), "data": data}


JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "masked_lm": _masked_lm,
    "prefix_lm": _prefix_lm,
    "prompted": _prompted,
    "span_corruption": _span_corruption,
    "sequence_to_sequence": _sequence_to_sequence,
    "classification": _classification,
    "regression": _regression,
    "token_labelling": _token_labelling,
    "span": _span,
    "contrastive": _contrastive,
}


def job(name: str, folder: Path) -> dict[str, Any]:
    """The words of a run that learns ``name``, over data that is written into ``folder``."""
    folder.mkdir(exist_ok=True)
    return RUN | JOBS[name](folder)
