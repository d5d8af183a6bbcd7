"""Which objective a model learns, what does not fit, and that runs of other objectives leave and go on as others do."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.small_jobs import LAYERS, RUN, examples, job
from helpers.small_run import StopAt, assert_same, warned
from pellucid.checkpoints.loading import read_label_names
from pellucid.configfile import to_yaml
from pellucid.data.tokenizer import Tokenizer
from pellucid.data.vocabulary import MASK, sentinels
from pellucid.errors import CheckpointError, ConfigError
from pellucid.training import train
from pellucid.training.config import TrainConfig
from pellucid.training.loggers import MetricsLog, describe
from pellucid.training.objectives import MaskedLMConfig, Seq2SeqConfig
from pellucid.training.results import Event, Stepped, Validated
from pellucid.training.run_folder import RunFolder
from pellucid.training.run_summary import read_run
from pellucid.training.setup import prepare

ENCODER = {**LAYERS, "family": "encoder"}
PAIR = {**LAYERS, "family": "encoder_decoder"}
FILE = {"data": {"source": "x.jsonl"}}


def head(kind: str, **words: Any) -> dict[str, Any]:
    return {**ENCODER, "head": {"kind": kind, **words}}


def config(**changes: Any) -> TrainConfig:
    return TrainConfig.from_mapping({"model": LAYERS, **RUN, **changes})


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (LAYERS, "causal_lm"),
        (ENCODER, "masked_lm"),
        (PAIR, "seq2seq"),
        (head("sequence_classification", num_labels=2), "classification"),
        (head("regression"), "regression"),
        (head("token_classification", num_labels=2), "token_classification"),
        (head("span"), "question_answering"),
        (head("sentence_embedding"), "contrastive"),
    ],
)
def test_the_usual_objective_follows_from_family_and_head(model: dict[str, Any], kind: str, tmp_path: Path) -> None:
    found = config(model=model, **FILE)
    assert found.objective.kind == kind
    (tmp_path / "config.yaml").write_text(to_yaml(found))
    assert TrainConfig.from_file(tmp_path / "config.yaml") == found


def test_words_of_an_objective() -> None:
    masked = config(model=ENCODER, objective={"kind": "masked_lm", "mlm_probability": 0.3, "whole_word_mask": True})
    assert masked.objective == MaskedLMConfig(mlm_probability=0.3, whole_word_mask=True)
    pairs = config(model=PAIR, objective={"kind": "seq2seq", "source": "body"}, **FILE)
    assert pairs.objective == Seq2SeqConfig(source="body")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"objective": {"kind": "masked_lm"}},
            r"objective is 'masked_lm', but model\.family is 'decoder' with head 'language_model', which learns "
            "causal_lm or prefix_lm",
        ),
        ({"objective": {"kind": "causal_lm"}, "model": ENCODER}, "'causal_lm', but .* 'encoder' .* learns masked_lm"),
        (
            {"objective": {"kind": "regression"}, "model": head("span"), **FILE},
            "'regression', but .* head 'span', which learns question_answering",
        ),
        (
            {"objective": {"kind": "prefix_lm"}},
            r"no rule in model\.layers is by prefix\(\) \(the first is causal\(\)\); take 'causal \| prefix\(\)'",
        ),
        (
            {"objective": {"kind": "prefix_lm"}, "model": {**LAYERS, "rule": "prefix() | lookahead(1)"}},
            "lets a token see the next one",
        ),
        ({"model": {**LAYERS, "rule": "causal | prefix()"}}, "lets a token see the next one"),
        ({"model": {**PAIR, "rule": "full"}, **FILE}, "lets a token see the next one"),
        ({"model": PAIR}, "'seq2seq' learns from examples, but data.source is 'python-source'"),
        (
            {"model": head("token_classification", num_labels=3), **FILE}
            | {"objective": {"kind": "token_classification", "label_names": ["a", "b"]}},
            r"objective\.label_names has 2 names, but model\.head\.num_labels is 3",
        ),
        (
            {"model": head("sequence_classification", num_labels=2), **FILE}
            | {"objective": {"kind": "classification", "label_names": ["a", "a"]}},
            "names 'a' twice",
        ),
        (
            {
                "model": ENCODER,
                "objective": {"kind": "masked_lm", "keep_original_prob": 0.6, "random_replace_prob": 0.6},
            },
            "keep_original_prob is 0.6 and random_replace_prob 0.6",
        ),
        (
            {"model": {**LAYERS, "rule": "causal | prefix()"}, "objective": {"kind": "prefix_lm", "prompt": "q"}},
            "prompt is 'q' and completion None",
        ),
        (
            {"model": head("span"), "label_smoothing_factor": 0.1, **FILE},
            "label_smoothing_factor is 0.1, but objective 'question_answering'",
        ),
        ({"load_balancing": {}}, "load_balancing is for experts, but model.ffn is gated"),
        ({"data": {"max_source_length": 9}}, r"data\.max_source_length is 9, but model\.family is 'decoder'"),
        ({"data": {"tokenizer_kind": "wordpiece"}}, "wordpiece.* loses white space"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def prepared(words: dict[str, Any], folder: Path, **changes: Any) -> Any:
    return prepare(TrainConfig.from_mapping(words | changes), RunFolder(folder), None, pytest.fail)


def test_classes_in_the_data_must_be_those_of_the_head(tmp_path: Path) -> None:
    words = job("classification", tmp_path / "data")
    words["model"] = words["model"] | {"head": {"kind": "sequence_classification", "num_labels": 3}}
    with pytest.raises(
        ConfigError, match=r"the examples have 2 classes \('no', 'yes'\), but model.head.num_labels is 3"
    ):
        prepared(words, tmp_path)


def test_a_tokenizer_without_the_special_tokens_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "tokenizer.json")
    Tokenizer.train(["cat dog"], vocab_size=270, special_tokens=sentinels(1)).save(path)
    for name, match in (
        ("masked_lm", r"<\|mask\|>, which the tokenizer lacks"),
        ("span_corruption", r"needs 2 sent.* has 1"),
    ):
        words = job(name, tmp_path / name)
        with pytest.raises(ConfigError, match=match):
            prepared(words | {"data": words["data"] | {"tokenizer": path}}, tmp_path)


def test_the_tokenizer_gets_what_the_objective_needs(tmp_path: Path) -> None:
    assert MASK in prepared(job("masked_lm", tmp_path / "masked"), tmp_path).tokenizer.special_ids
    assert len(prepared(job("span_corruption", tmp_path / "spans"), tmp_path).tokenizer.sentinel_ids) == 2
    words = job("masked_lm", tmp_path / "pieces")
    words["data"] = words["data"] | {"tokenizer_kind": "wordpiece", "vocab_size": 60}
    words["objective"] = {"kind": "masked_lm", "whole_word_mask": True}
    parts = prepared(words, tmp_path)
    assert parts.tokenizer.vocab_size <= 60
    assert parts.loader.objective.word_starts is not None


def test_labels_are_smoothed_in_training_alone(tmp_path: Path) -> None:
    words = job("classification", tmp_path / "data")
    plain, smoothed = (prepared(words, tmp_path, label_smoothing_factor=part) for part in (0.0, 0.5))
    batch = plain.loader.batch(0)
    assert smoothed.evaluator.evaluate(smoothed.model, final=True) == plain.evaluator.evaluate(plain.model, final=True)
    losses = [float(parts.model.train()(batch, want="loss").loss.total.detach()) for parts in (plain, smoothed)]
    assert losses[0] != losses[1]


def test_examples_that_are_cut_are_told(tmp_path: Path) -> None:
    told: list[str] = []
    words = job("classification", tmp_path / "data")
    words["data"] = words["data"] | {"max_length": 4}
    prepare(TrainConfig.from_mapping(words), RunFolder(tmp_path), None, told.append)
    (train,) = [message for message in told if "(train)" in message]
    cut, of = (int(word) for word in train.split() if word.isdigit() and word != "4")
    assert 0 < cut == of
    assert train.endswith(" examples (train) are cut to the 4 tokens of data.max_length")


# ---- whole runs


SHORT = {"max_steps": 6, "save_steps": 2, "save_total_limit": 4, "batch_size": 2}
EXPERTS = {
    "kind": "moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "expert": {"kind": "gated", "intermediate_size": 16},
    "router": {"kind": "sigmoid"},
}


def short(name: str, folder: Path) -> dict[str, Any]:
    words = (
        job(name, folder) | SHORT | {"eval_steps": 2, "evaluation": {"num_documents": 4, "num_generated_samples": 2}}
    )
    words["model"] = words["model"] | {"hidden_size": 8, "dropout": {"residual": 0.1}}
    if name == "masked_lm":
        words["model"] = words["model"] | {"ffn": EXPERTS}
        words |= {
            "load_balancing": {"router_aux_loss_coef": 0.1, "router_bias_update_rate": 0.01},
            "gradient_accumulation_steps": 2,
        }
    return words


@pytest.mark.parametrize("name", ["masked_lm", "classification"])
def test_a_run_goes_on_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the dice of the objective, dropout, and the choice biases of sigmoid routers."""
    monkeypatch.setattr("helpers.small_run.VALIDATION", ("step", "nats", "tokens", "metrics", "best", "final"))
    wanted = TrainConfig.from_mapping(short(name, tmp_path / "data"))
    events: list[Event] = []
    straight = train(wanted, tmp_path / "straight", on_event=events.append)
    stopped = train(wanted, tmp_path / "run", on_event=StopAt(3))
    assert (stopped.steps, stopped.validation) == (3, None)
    result = train(wanted, tmp_path / "run")
    assert_same(tmp_path / "run", tmp_path / "straight")
    assert result.validation == straight.validation
    assert train(wanted, tmp_path / "run").validation == straight.validation  # finished: read back from the log
    steps = [event for event in events if isinstance(event, Stepped)]
    assert all((event.routing is not None) == (name == "masked_lm") for event in steps)
    assert all("tokens/s" not in describe(event) for event in steps if name == "classification")


def test_what_a_classifier_leaves(tmp_path: Path) -> None:
    """Names of the classes beside the weights, the loss and a figure with its baseline in log, result and summary."""
    wanted, events = TrainConfig.from_mapping(short("classification", tmp_path / "data")), list[Event]()
    result = train(wanted, tmp_path / "run", on_event=events.append)
    assert warned(events) == []
    assert read_label_names(result.checkpoint, 2) == ("no", "yes")
    assert json.loads((result.checkpoint / "pellucid.json").read_text())["digests"].keys() >= {"classes.json"}
    last = list(MetricsLog(tmp_path / "run" / "metrics.jsonl").records())[-1]
    assert "bits_per_byte" not in last
    assert last["item"] == "document"
    assert last["metrics"]["accuracy"]["baseline"] == result.to_dict()["heldout_metrics"]["accuracy"]["baseline"]
    assert 0 < last["metrics"]["accuracy"]["baseline"] < 1
    said = [describe(event) for event in events if isinstance(event, Validated)]
    assert "accuracy" in said[-1]
    assert "(baseline " in said[-1]
    assert "bits/byte" not in str(result)
    summary = read_run(tmp_path / "run")
    assert (summary.state, summary.measure, summary.final) == ("finished", "loss", result.validation.loss)
    best = min(e.result.loss for e in events if isinstance(e, Validated) and not e.final)
    assert summary.best == best


@pytest.mark.parametrize("text", ["{}", "[1]", '["a", "a"]', '["a"]', "[", "\ud800"])
def test_names_of_classes_are_read_with_distrust(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes.json").write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=r"classes\.json"):
        read_label_names(tmp_path, 2)
    (tmp_path / "classes.json").unlink()
    assert read_label_names(tmp_path, 2) == ()


def test_heldout_examples_of_their_own(tmp_path: Path) -> None:
    words = job("classification", tmp_path / "data")
    (tmp_path / "kept").mkdir()
    kept = examples(tmp_path / "kept", lambda s: {"text": s, "label": "no"})["source"]
    words["data"] = words["data"] | {"heldout_source": kept}
    parts = prepared(words, tmp_path)
    assert parts.evaluator is not None
    assert len(parts.loader.store) == 160
    assert parts.evaluator.evaluate(parts.model, final=True).documents == 160
