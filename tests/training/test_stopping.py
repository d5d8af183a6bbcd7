"""A signal ends a run with everything that belongs to its step; before there is a step nothing stays."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from helpers.small_run import StopAt, assert_same, files, logged, small_config, small_words
from pellucid.checkpoints.loading import load
from pellucid.training import loop, run_folder, setup
from pellucid.training.environment import InterruptedBySignal
from pellucid.training.loop import train
from pellucid.training.results import Event, Interrupted, Saved, Stepped, Validated

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
LONGER = {"max_steps": 12, "eval_steps": 4, "evaluation": {"num_documents": 2}, "save_steps": 6}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_words(tmp_path_factory.mktemp("stopping") / "texts")


@pytest.fixture(scope="module")
def straight(words: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 steps, validated at 4, 8 and 12, saved at 6 and 12."""
    return train(small_config(words, **LONGER), tmp_path_factory.mktemp("straight") / "run").run


@pytest.mark.parametrize(("step", "number"), [(4, signal.SIGINT), (8, signal.SIGTERM), (12, signal.SIGINT)])
def test_a_stopped_step_is_validated_and_saved(
    tmp_path: Path, words: dict[str, Any], straight: Path, step: int, number: signal.Signals
) -> None:
    """Once the validation was lost, and could be lost for good."""
    listener, wanted = StopAt(step, number), small_config(words, **LONGER)
    result = train(wanted, tmp_path / "run", on_event=listener)
    assert (result.interrupted, result.signal, result.steps) == (True, number.name, step)
    told = listener.events[listener.events.index(Interrupted(number.name)) :]
    assert [type(event) for event in told] == [Interrupted, Validated, Saved]
    assert logged(tmp_path / "run") == [line for line in logged(straight) if line[0] <= step and line[-1] is not True]
    train(wanted, tmp_path / "run")
    assert_same(tmp_path / "run", straight)
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == sorted(os.listdir(straight / "checkpoints"))


def test_a_signal_in_the_middle_of_a_validation_lets_it_end(
    tmp_path: Path, words: dict[str, Any], straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop.bits_per_byte

    def stopped_within(model: Any, tokenizer: Any, documents: Any, **settings: Any) -> Any:
        def given() -> Any:
            for number, document in enumerate(documents):
                if number == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                yield document

        return original(model, tokenizer, given(), **settings)

    wanted = small_config(words, **LONGER)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "bits_per_byte", stopped_within)
        assert train(wanted, tmp_path / "run").steps == 4
    events: list[Event] = []
    with monkeypatch.context() as patch:  # and in the one at the end, which is made anew
        patch.setattr(loop.MetricsLog, "final", lambda *_: None)
        train(wanted, tmp_path / "run")
        patch.setattr(loop, "bits_per_byte", stopped_within)
        last = train(wanted, tmp_path / "run")
        assert (last.interrupted, last.validation) == (True, None)
    train(wanted, tmp_path / "run", on_event=events.append)
    assert not any(isinstance(event, Stepped) for event in events)
    assert_same(tmp_path / "run", straight)


@BOTH
def test_a_second_signal_stops_at_once(tmp_path: Path, words: dict[str, Any], number: signal.Signals) -> None:
    def twice(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 3:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(InterruptedBySignal) as caught:
        train(small_config(words), tmp_path / "run", on_event=twice)
    assert caught.value.signal == number
    assert signal.getsignal(number) is before
    assert (tmp_path / "run" / "last").read_text() == "step-00000002\n"


# ---- the best is kept


def test_the_best_validation_leaves_a_checkpoint(tmp_path: Path, words: dict[str, Any]) -> None:
    """Nothing else is saved on the way, and fewer are kept than validations were the best."""
    result = train(
        small_config(words, eval_steps=1, evaluation={"num_documents": 2}, save_steps=0, save_total_limit=1),
        tmp_path / "run",
    )
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    on_the_way = [line for line in lines if line["kind"] == "validation" and not line["final"]]
    best = min(on_the_way, key=lambda line: line["bits_per_byte"])["step"]
    assert [line["step"] for line in on_the_way if line["best"]][-1] == best
    assert (result.run / "best").read_text() == f"step-{best:08d}\n"
    assert set(os.listdir(result.run / "checkpoints")) == {f"step-{best:08d}", "step-00000006"}
    assert load(result.run / "checkpoints" / f"step-{best:08d}", check="digests").report.complete


def test_a_best_that_is_not_beaten_stays(
    tmp_path: Path, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validations get worse from step 2 on; what is stopped and goes on keeps the same one."""
    original, found = loop.Trainer.bits_per_byte, {1: 5.0, 2: 4.0, 3: 6.0, 4: float("nan"), 5: 4.0, 6: 7.0}

    def told(self: Any, documents: Any) -> Any:
        real = original(self, documents)
        return real._replace(nats=found[self.state.step] * real.bytes * 0.6931471805599453)

    monkeypatch.setattr(loop.Trainer, "bits_per_byte", told)
    wanted = small_config(words, eval_steps=1, evaluation={"num_documents": 2}, save_steps=0, save_total_limit=1)
    for name, listener in (("straight", None), ("stopped", StopAt(4))):
        train(wanted, tmp_path / name, on_event=listener)
        train(wanted, tmp_path / name)
        assert (tmp_path / name / "best").read_text() == "step-00000002\n"
        assert set(os.listdir(tmp_path / name / "checkpoints")) == {"step-00000002", "step-00000006"}


# ---- before the first step


@BOTH
@pytest.mark.parametrize("owner", [setup.Loader, run_folder.Lock, loop])
def test_a_signal_in_preparation_leaves_nothing_behind(
    tmp_path: Path, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch, owner: Any, number: signal.Signals
) -> None:
    """While data is read, before the folder is written, and when all is ready."""
    name = {setup.Loader: "from_corpus", run_folder.Lock: "__init__", loop: "write_environment"}[owner]
    original = getattr(owner, name)

    def signalled(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        for _ in range(3):
            os.kill(os.getpid(), number)
        return result

    before = signal.getsignal(number)
    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        for run in ("new/run", "empty"):
            with pytest.raises(InterruptedBySignal) as caught:
                train(small_config(words), tmp_path / run)
            assert caught.value.signal == number
    assert signal.getsignal(number) is before
    assert os.listdir(tmp_path) == ["empty"]
    assert os.listdir(tmp_path / "empty") == []
    assert train(small_config(words, max_steps=1), tmp_path / "new/run").steps == 1


def test_a_signal_before_a_run_goes_on_changes_nothing(
    tmp_path: Path, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small_config(words), tmp_path / "run", on_event=StopAt(3))
    before, original = files(tmp_path / "run"), setup.restore_checkpoint

    def signalled(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(setup, "restore_checkpoint", signalled)
    with pytest.raises(InterruptedBySignal):
        train(small_config(words, save_total_limit=1), tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == before
