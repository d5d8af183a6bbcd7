"""A run from text to checkpoint: what it leaves, what it refuses, and that it goes on exactly."""

import json
import os
import resource
import shutil
import signal
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pellucid.checkpoints.contract import CONTRACT
from pellucid.checkpoints.loading import TOKENIZER, load
from pellucid.checkpoints.verify import verify
from pellucid.checkpoints.weights import WEIGHTS
from pellucid.configfile import to_yaml
from pellucid.data.corpus import open_corpus
from pellucid.errors import CheckpointError, ConfigError, DataError, InputError, RunError, StorageError, TrainingError
from pellucid.models.model import Decoder
from pellucid.training import loop, setup
from pellucid.training import run_folder as run_folder_module
from pellucid.training.config import TrainConfig
from pellucid.training.evaluation import bits_per_byte
from pellucid.training.loop import train
from pellucid.training.results import Event, Interrupted, Prepared, Saved, Stepped, TrainResult, Validated
from pellucid.training.step import StepContext, TrainStepResult, lr_multiplier, train_step

WORDS = [
    "to",
    "be",
    "or",
    "not",
    "to",
    "be",
    "that",
    "is",
    "the",
    "question",
    "whether",
    "tis",
    "nobler",
    "in",
    "the",
    "mind",
    "to",
    "suffer",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for n in range(24):
        words = [WORDS[(n * 7 + k * k) % len(WORDS)] for k in range(10 + 3 * n)]
        (folder / f"{n}.txt").write_text(" ".join(words) + "\n")
    return folder


@pytest.fixture
def words(texts: Path) -> dict[str, Any]:
    return {
        "model": {
            "vocab_size": 280,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "attention": {"num_attention_heads": 2},
            "ffn": {"kind": "gated", "intermediate_size": 24},
            "dropout": {"residual": 0.1},
        },
        "data": {"source": str(texts / "*.txt"), "heldout_fraction": 0.25, "max_length": 16},
        "max_steps": 6,
        "lr_scheduler": {"warmup_steps": 2},
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_steps": 2,
        "evaluation": {"num_documents": 3},
        "save_steps": 2,
        "num_threads": 1,
    }


def config(words: dict[str, Any], **changes: Any) -> TrainConfig:
    return TrainConfig.from_mapping(words | changes)


def logged(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def same_state(a: Path, b: Path) -> bool:
    """Weights, optimizer and generators. Not Python's own: checking annotations at run time draws from it."""
    for name in (WEIGHTS, "training/state.safetensors"):
        x, y = load_file(a / name), load_file(b / name)
        keys = [key for key in x if not key.startswith("random/python")]
        if x.keys() != y.keys() or not all(torch.equal(x[key], y[key]) for key in keys):
            return False
    return True


# ---- what a run leaves


def test_a_run_from_text_to_checkpoint(tmp_path: Path, words: dict[str, Any]) -> None:
    events: list[Event] = []
    wanted = config(words, save_total_limit=1)
    result = train(wanted, tmp_path / "run", on_event=events.append)
    run = result.run
    assert sorted(os.listdir(run)) == [
        "best",
        "checkpoints",
        "config.yaml",
        "environment.json",
        "last",
        "metrics.jsonl",
    ]
    assert TrainConfig.from_file(run / "config.yaml") == wanted
    assert result.checkpoint == run / "checkpoints" / "step-00000006"
    assert (run / "last").read_text() == "step-00000006\n"
    best = min(logged(run, "validation")[:-1], key=lambda v: v["bits_per_byte"])["step"]
    assert (run / "best").read_text() == f"step-{best:08d}\n"
    assert set(os.listdir(run / "checkpoints")) == {"step-00000006", f"step-{best:08d}"}

    steps = logged(run)
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    assert result.tokens == steps[-1]["tokens"] == sum(s["num_targets"] for s in steps)
    peak = wanted.optimizer.learning_rate
    assert [s["learning_rate"] for s in steps] == [peak * lr_multiplier(wanted, n, 0.0) for n in range(6)]
    assert [type(e) for e in events if not isinstance(e, Stepped)] == [
        Prepared, Validated, Saved, Validated, Saved, Validated, Saved, Validated,
    ]  # fmt: skip

    environment = json.loads((run / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["threads"] == 1
    assert len(environment["data"]["train"]) == 64


def test_the_last_validation_is_over_all_held_out_documents(tmp_path: Path, words: dict[str, Any], texts: Path) -> None:
    result = train(config(words), tmp_path / "run")
    checkpoint = load(result.checkpoint, check="digests")
    heldout = list(open_corpus(str(texts / "*.txt"), heldout_fraction=0.25).documents("heldout"))
    found = bits_per_byte(checkpoint.model, checkpoint.tokenizer, heldout, length=16, stride=8)
    assert result.validation == found
    assert found.documents == len(heldout)
    assert found.bytes == sum((texts / d.name).stat().st_size for d in heldout)
    *before, last = logged(result.run, "validation")
    assert last["bits_per_byte"] == found.bits_per_byte
    assert (last["final"], last["documents"]) == (True, len(heldout))
    assert all(v["documents"] == 3 and not v["final"] for v in before)


def test_the_same_config_gives_the_same_run(tmp_path: Path, words: dict[str, Any]) -> None:
    a, b = (train(config(words), tmp_path / name) for name in "ab")
    assert same_state(a.checkpoint, b.checkpoint)
    c = train(config(words, seed=1), tmp_path / "c")
    assert not same_state(a.checkpoint, c.checkpoint)


def test_it_learns(tmp_path: Path, words: dict[str, Any]) -> None:
    changes = {
        "max_steps": 40,
        "optimizer": {"kind": "adamw", "learning_rate": 0.03},
        "eval_steps": 0,
        "evaluation": {},
        "save_steps": 0,
    }
    result = train(config(words, precision="bfloat16", gradient_checkpointing=True, **changes), tmp_path / "run")
    losses = [s["loss"] for s in logged(result.run)]
    assert losses[0] > 5
    assert losses[-1] < 3
    assert result.validation is not None
    assert result.validation.bits_per_byte < 4
    assert os.listdir(result.run / "checkpoints") == ["step-00000040"]


def test_a_budget_of_minutes_ends_on_time_at_the_floor(
    tmp_path: Path, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which every look takes a fifth of a second."""
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=count(0.0, 0.2).__next__))
    scheduler = {"warmup_ratio": 0.1, "type": "linear"}
    wanted = config(
        words, max_steps=None, max_minutes=1, lr_scheduler=scheduler, eval_steps=0, evaluation={}, save_steps=0
    )
    result = train(wanted, tmp_path / "run")
    steps = logged(result.run)
    assert 20 < len(steps) < 120
    assert 0.95 < steps[-1]["progress"] <= 1.0
    rates = [s["learning_rate"] / wanted.optimizer.learning_rate for s in steps]
    assert rates[0] >= 0.01
    assert max(rates) > 0.95
    assert 0 <= rates[-1] < 0.1
    assert result.steps == len(steps)


def test_held_out_documents_of_their_own(tmp_path: Path, words: dict[str, Any], texts: Path) -> None:
    apart = tmp_path / "apart.txt"
    apart.write_text("to be that is the mind")
    data = {"source": str(texts / "*.txt"), "heldout_source": str(apart), "max_length": 16}
    events: list[Event] = []
    result = train(config(words, data=data), tmp_path / "run", on_event=events.append)
    assert isinstance(events[0], Prepared)
    assert events[0].documents == 24
    assert result.validation is not None
    assert (result.validation.documents, result.validation.bytes) == (1, 22)


def test_a_tokenizer_can_be_given(tmp_path: Path, words: dict[str, Any]) -> None:
    first = train(config(words), tmp_path / "a")
    data = words["data"] | {"tokenizer": str(first.checkpoint / TOKENIZER)}
    second = train(config(words, data=data), tmp_path / "b")
    assert same_state(first.checkpoint, second.checkpoint)


# ---- stopping and going on


class StopAfter:
    """Sends this process a signal when a step is done, and notes the rest."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT) -> None:
        self.step, self.number, self.events = step, number, list[Event]()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Stepped) and event.step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, words: dict[str, Any], number: signal.Signals) -> None:
    listener = StopAfter(3, number)
    result = train(config(words), tmp_path / "run", on_event=listener)
    assert (result.interrupted, result.steps, result.validation) == (True, 3, None)
    assert result.checkpoint.name == "step-00000003"
    assert load(result.checkpoint, check="digests").report.complete
    assert [type(e) for e in listener.events[-2:]] == [Interrupted, Saved]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stop", [2, 3])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    tmp_path: Path, words: dict[str, Any], optimizer: str, stop: int
) -> None:
    """Weights, optimizer, random generators, data order and log are as if undisturbed, dropout included."""
    wanted = config(words, optimizer={"kind": optimizer})
    straight = train(wanted, tmp_path / "straight")
    train(wanted, tmp_path / "stopped", on_event=StopAfter(stop))
    with open(tmp_path / "stopped" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "step": 5, "lost": true}\n{"kind": "st')  # logged after the last checkpoint
    torch.manual_seed(99)
    resumed = train(wanted, tmp_path / "stopped", resume=True)
    assert same_state(straight.checkpoint, resumed.checkpoint)
    assert resumed.validation == straight.validation
    names = ("step", "tokens", "num_targets", "loss", "learning_rate", "grad_norm", "epoch")
    assert [[s[n] for n in names] for s in logged(resumed.run)] == [[s[n] for n in names] for s in logged(straight.run)]
    validations = [
        [(v["step"], v["bits_per_byte"], v["best"], v["final"]) for v in logged(run, "validation")]
        for run in (resumed.run, straight.run)
    ]
    assert validations[0] == validations[1]
    assert (resumed.run / "best").read_text() == (straight.run / "best").read_text()


def test_a_run_without_a_checkpoint_yet_starts_anew(tmp_path: Path, words: dict[str, Any]) -> None:
    wanted = config(words)
    run = run_folder_module.RunFolder(tmp_path / "run")
    run.begin(wanted)
    run.close()
    (run.checkpoints / ".step-00000002.unfinished-0123456789ab").mkdir()
    resumed = train(wanted, tmp_path / "run", resume=True)
    assert resumed.steps == 6
    assert sorted(os.listdir(run.checkpoints)) == ["step-00000004", "step-00000006"]


def test_only_the_same_run_goes_on(tmp_path: Path, words: dict[str, Any]) -> None:
    train(config(words), tmp_path / "run", on_event=StopAfter(2))
    with pytest.raises(ConfigError, match=r"not that of the run in .*: batch_size: was 2, is 3; resume with the same"):
        train(config(words, batch_size=3), tmp_path / "run", resume=True)
    longer = train(config(words, max_steps=7), tmp_path / "run", resume=True)
    assert longer.steps == 7
    with pytest.raises(RunError, match=r"there is no run in .*nowhere: leave --resume out"):
        train(config(words), tmp_path / "nowhere", resume=True)


def test_what_was_measured_once_is_kept(tmp_path: Path, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another answer in the middle of a run would change its numbers."""
    monkeypatch.setattr(setup, "fastest_precision", lambda device: "bfloat16")
    auto = config(words, precision="auto", optimizer={"kind": "muon", "precision": "auto"})
    train(auto, tmp_path / "run", on_event=StopAfter(2))
    monkeypatch.setattr(setup, "fastest_precision", pytest.fail)
    resumed = train(auto, tmp_path / "run", resume=True)
    kept = TrainConfig.from_file(resumed.run / "config.yaml")
    assert (kept.precision, kept.optimizer.precision) == ("bfloat16", "bfloat16")
    (resumed.run / "config.yaml").write_text(to_yaml(auto))
    with pytest.raises(ConfigError, match="leaves a precision to be measured"):
        train(auto, tmp_path / "run", resume=True)


# ---- what is refused before the first step, with nothing left behind


def refused(tmp_path: Path, wanted: TrainConfig, match: str, kind: type[InputError] = ConfigError) -> None:
    with pytest.raises(kind, match=match) as caught:
        train(wanted, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_is_refused(tmp_path: Path, words: dict[str, Any]) -> None:
    model = words["model"]
    refused(tmp_path, config(words, data={"source": str(tmp_path / "nowhere")}), "nowhere", DataError)
    learned = model | {"position": {"kind": "learned", "max_position_embeddings": 8}}
    refused(tmp_path, config(words, model=learned), r"data\.max_length is 16 but the model has positions for 8")
    data = words["data"] | {"max_length": 8}
    evaluation = {"max_length": 12}
    refused(tmp_path, config(words, model=learned, data=data, evaluation=evaluation), r"evaluation\.max_length is 12")
    small = model | {"vocab_size": 259}
    first = train(config(words), tmp_path / "first")
    given = words["data"] | {"tokenizer": str(first.checkpoint / TOKENIZER)}
    refused(
        tmp_path,
        config(words, model=small, data=given),
        r"tokenizer has 280 tokens but model\.vocab_size is 259",
    )


def test_a_folder_with_something_in_it_is_refused_and_kept(tmp_path: Path, words: dict[str, Any]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="holds something already"):
        train(config(words), tmp_path / "run")
    assert os.listdir(tmp_path / "run") == ["notes.txt"]


def test_an_empty_folder_is_used(tmp_path: Path, words: dict[str, Any]) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(DataError):
        train(config(words, data={"source": str(tmp_path / "nowhere")}), tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    assert train(config(words), tmp_path / "run").steps == 6


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path: Path, words: dict[str, Any]) -> None:
    (tmp_path / "file").touch()
    missing = config(words, data={"source": str(tmp_path / "nowhere")})
    with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}/file/run: "):
        train(missing, tmp_path / "file" / "run")


def test_a_disk_without_room_for_a_checkpoint_is_refused(
    tmp_path: Path, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(run_folder_module.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    refused(tmp_path, config(words), "has 0 MB free but a checkpoint of this run needs", RunError)


# ---- what stops a run


def test_a_disk_that_fills_up_stops_the_run_with_the_last_good_checkpoint_named(
    tmp_path: Path, words: dict[str, Any]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))

    try:
        with pytest.raises(StorageError, match=r"step 4: cannot write .* Last good checkpoint: .*step-00000002"):
            train(config(words), tmp_path / "run", on_event=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-00000002"]
    assert train(config(words), tmp_path / "run", resume=True).steps == 6


def test_a_loss_that_is_not_finite_names_step_documents_and_checkpoint(
    tmp_path: Path, words: dict[str, Any], texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(model: Decoder, *batches: Any, context: StepContext, **settings: Any) -> TrainStepResult:
        if context.step == 4:
            model.norm.weight.data[0] = float("nan")
        return train_step(model, *batches, context=context, **settings)

    monkeypatch.setattr(loop, "train_step", poisoned)
    with pytest.raises(
        TrainingError, match=r"step 4: the loss is nan; .* Last good checkpoint: .*step-00000002"
    ) as caught:
        train(config(words), tmp_path / "run")
    named = str(caught.value).partition("Documents in the batch: ")[2].partition(". Last")[0].split(", ")
    assert named
    assert set(named) <= set(os.listdir(texts))
    assert [s["step"] for s in logged(tmp_path / "run")] == [1, 2, 3]


def test_the_result_is_plain(tmp_path: Path, words: dict[str, Any]) -> None:
    result = train(config(words), tmp_path / "run")
    assert isinstance(result, TrainResult)
    assert result.tokens_per_second > 0
    assert not result.interrupted


# ---- what checkpoints are proved by


def proofs(run: Path) -> dict[str, bool]:
    """Which steps have a witness."""
    contracts = {path.name: json.loads((path / CONTRACT).read_text()) for path in run.glob("checkpoints/*")}
    return {name: contract["witness"] is not None for name, contract in contracts.items()}


def test_the_first_and_the_last_checkpoint_carry_a_witness(tmp_path: Path, words: dict[str, Any]) -> None:
    wanted = config(words, eval_steps=0, evaluation={}, save_total_limit=9)
    run = train(wanted, tmp_path / "run").run
    assert proofs(run) == {"step-00000002": True, "step-00000004": False, "step-00000006": True}
    assert all(verify(path).passed for path in run.glob("checkpoints/*"))


def test_a_run_that_is_stopped_at_a_checkpoint_adds_its_witness(tmp_path: Path, words: dict[str, Any]) -> None:
    """The signal comes when step 4 is saved already."""

    def stop(event: Event) -> None:
        if isinstance(event, Saved) and event.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    wanted = config(words, eval_steps=0, evaluation={}, save_total_limit=9)
    result = train(wanted, tmp_path / "run", on_event=stop)
    assert (result.steps, result.interrupted) == (4, True)
    assert proofs(result.run) == {"step-00000002": True, "step-00000004": True}
    assert verify(result.checkpoint, "witness").passed
    train(wanted, tmp_path / "run")
    assert proofs(result.run) == {"step-00000002": True, "step-00000004": True, "step-00000006": True}
