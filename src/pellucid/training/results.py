"""What a validation found: sums over documents, and figures that mean something, each beside what a guess reaches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class MetricValue(NamedTuple):
    """A number, and what is reached without looking: a constant answer, taken from the training data."""

    name: str
    value: float
    baseline: float | None = None

    def __str__(self) -> str:
        beside = "" if self.baseline is None else f" (baseline {self.baseline:.4f})"
        return f"{self.name} {self.value:.4f}{beside}"


class Validation(NamedTuple):
    """Sums over documents, and what follows from them."""

    nats: float
    """The loss of all items together (of a regression: squared errors)."""
    tokens: int
    """The items that were counted: tokens, or documents where one question is asked of each."""
    bytes: int
    """Of the text; 0 where not all of it is predicted, so that bits per byte would mean nothing."""
    documents: int
    item: str = "token"
    metrics: tuple[MetricValue, ...] = ()
    """The first is the loss of an item."""
    baseline: str = ""
    """What the baselines are, in words."""

    @property
    def bits_per_byte(self) -> float:
        """Total bits over total bytes."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def loss(self) -> float:
        """Of one item."""
        return self.nats / self.tokens

    @property
    def measure(self) -> float:
        """What is compared between validations of a run, the lower the better."""
        return self.bits_per_byte if self.bytes else self.loss

    def __str__(self) -> str:
        """In a few words."""
        if self.bytes:
            return f"{self.bits_per_byte:.4f} bits/byte"
        return ", ".join(map(str, self.metrics)) or f"{self.loss:.4f} a {self.item}"

    def said(self) -> dict[str, Any]:
        """What belongs in the log besides the sums; nothing for bits per byte."""
        if self.bytes:
            return {}
        metrics = {metric.name: {"value": metric.value, "baseline": metric.baseline} for metric in self.metrics}
        return {"item": self.item, "metrics": metrics, "baseline": self.baseline}


def read_back(line: dict[str, Any]) -> Validation | None:
    """The validation that a line of the log tells of, checked; None where it does not say."""
    nats, counts = line.get("nats"), [line.get(name) for name in ("tokens", "bytes", "documents")]
    if type(nats) is not float or not all(type(count) is int and count >= 0 for count in counts):
        return None
    tokens, size, documents = (int(str(count)) for count in counts)
    if not tokens or not documents:
        return None
    if size:
        return Validation(nats, tokens, size, documents)
    item, baseline, metrics = line.get("item"), line.get("baseline"), line.get("metrics")
    if not isinstance(item, str) or not isinstance(baseline, str) or not isinstance(metrics, dict):
        return None
    found = [_metric(name, value) for name, value in metrics.items()]
    known = tuple(metric for metric in found if metric is not None)
    return Validation(nats, tokens, 0, documents, item, known, baseline) if len(known) == len(found) else None


def _metric(name: str, said: Any) -> MetricValue | None:
    if not isinstance(said, dict):
        return None
    value, baseline = said.get("value"), said.get("baseline")
    if type(value) is not float or (baseline is not None and type(baseline) is not float):
        return None
    return MetricValue(name, value, baseline)
