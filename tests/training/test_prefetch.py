"""Micro-batches off the CPU: assembled ahead, in the same order, never counted before they are given."""

import threading
from typing import Any

import pytest
import torch

from pellucid.batch import Batch
from pellucid.data.loader import Loader, Prefetcher

DOCUMENTS = [[1, n, n + 1, 2] for n in range(5, 25)]


def loader() -> Loader:
    return Loader(DOCUMENTS, batch_size=3, length=6, seed=1)


def on(device: str, monkeypatch: pytest.MonkeyPatch, stream: Loader) -> Prefetcher:
    """A prefetcher for a device that is not there: what it pins and moves is noted, and stays where it is."""

    def pin_memory(self: Batch) -> Batch:
        moved.append("pinned")
        return self

    def to(self: Batch, device: torch.device, **settings: Any) -> Batch:
        moved.append(str(device))
        return self

    moved: list[str] = []
    monkeypatch.setattr(Batch, "pin_memory", pin_memory)
    monkeypatch.setattr(Batch, "to", to)
    found = Prefetcher(stream, device)
    found.moved = moved  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_the_batches_are_those_of_the_loader_in_its_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, stream = loader(), loader()
    batches = on(device, monkeypatch, stream)
    for number in range(20):  # over the end of an epoch
        assert torch.equal(batches.next().tokens, next(plain).tokens)
        assert stream.state_dict() == plain.state_dict()
        assert stream.batches == number + 1
    batches.close()
    assert batches.moved.count(device) == 20  # type: ignore[attr-defined]
    assert ("pinned" in batches.moved) == (device == "cuda")  # type: ignore[attr-defined]


def test_a_stream_that_was_moved_gives_the_batch_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = loader()
    batches, state = on("cuda", monkeypatch, stream), stream.state_dict()
    first = batches.next()
    batches.next()
    stream.load_state_dict(state)
    assert torch.equal(batches.next().tokens, first.tokens)
    batches.close()


def test_the_next_is_assembled_beside_the_work_and_what_fails_there_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, threads = loader(), []
    original = stream.batch

    def batch(number: int) -> Batch:
        threads.append(threading.current_thread() is threading.main_thread())
        if number == 2:
            raise ValueError("torn")
        return original(number)

    monkeypatch.setattr(stream, "batch", batch)
    batches = on("cuda", monkeypatch, stream)
    batches.next()
    batches.next()
    with pytest.raises(ValueError, match="torn"):
        batches.next()
    assert stream.batches == 2
    batches.close()
    assert threads == [True, False, False]


@pytest.mark.gpu
def test_pinned_batches_arrive_equal() -> None:
    plain, stream = loader(), loader()
    batches = Prefetcher(stream, "cuda")
    for _ in range(9):
        assert torch.equal(batches.next().tokens.cpu(), next(plain).tokens)
    batches.close()
