"""A listener that writes what a run logs for TensorBoard too; needs the extra ``tensorboard``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pellucid.errors import UnsupportedError
from pellucid.training.events import Event, Listener, Stepped, Validated

FOLDER = "tensorboard"


@contextmanager
def tensorboard_listener(run_folder: str | Path) -> Iterator[Listener]:
    """Write scalars into ``tensorboard`` in the run's folder, from the first step on."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UnsupportedError(
            "TensorBoard is not installed, so nothing can be written for it; pip install 'pellucid[tensorboard]', "
            "or leave it out: metrics.jsonl holds the same numbers"
        ) from error
    listener = _Scalars(Path(run_folder) / FOLDER, SummaryWriter)
    try:
        yield listener
    finally:
        listener.close()


def _found(event: Validated) -> dict[str, float]:
    """Bits per byte, or the loss and what stands beside it."""
    if event.bits_per_byte is not None:
        return {"bits_per_byte": event.bits_per_byte}
    metrics = () if event.found is None else event.found.metrics
    return {"loss": event.loss, **{metric.name.replace(" ", "_"): metric.value for metric in metrics[1:]}}


class _Scalars:
    def __init__(self, folder: Path, writer: Any) -> None:
        self._folder, self._writer_class = folder, writer
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        match event:
            case Stepped():
                numbers = {"loss": event.loss, "learning_rate": event.learning_rate, "gradient_norm": event.grad_norm}
                numbers |= {"epoch": event.epoch, "tokens": event.tokens}
                numbers["tokens_per_second"] = event.num_targets / event.seconds if event.seconds else 0.0
                if event.routing is not None:
                    numbers |= {f"routing_{name}": value for name, value in event.routing._asdict().items()}
                self._write("train", event.step, numbers)
            case Validated():
                kind = "heldout" if event.final else "heldout_sample"
                self._write(kind, event.step, _found(event))

    def _write(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        if self._writer is None:  # what a run that goes on had written of later steps is hidden
            self._writer = self._writer_class(str(self._folder), purge_step=step)
        for name, number in numbers.items():
            self._writer.add_scalar(f"{kind}/{name}", number, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
