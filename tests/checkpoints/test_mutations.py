"""Mutate and re-sign: a contract that says anything else about the forward pass is found out by its witness."""

import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.folders import describe, resign
from helpers.kinds import EVERY_KIND, model_of, stirred
from helpers.tiny import tiny_config
from helpers.words import EVERY_WORD, Change, alike, changed, changes, parts_in
from pellucid.checkpoints import MismatchError, WitnessError, load, save, verify
from pellucid.checkpoints.contract import CONTRACT, Contract, TextContract, Witness
from pellucid.checkpoints.load_report import config_outline, outline, stored_tensors
from pellucid.checkpoints.probe_set import FARTHEST
from pellucid.checkpoints.tokenizer_fingerprint import TokenizerFingerprint
from pellucid.checkpoints.verify import UNSEEN, UNWITNESSED
from pellucid.checkpoints.witness import check_witness, witness_of
from pellucid.configfile import Config
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError
from pellucid.models import Model, ModelConfig, build

# ---------------------------------------------------------------- the property


class Held(NamedTuple):
    """A model's tensors and what a folder would keep about them."""

    config: ModelConfig
    stored: dict[str, Any]
    tied: dict[str, str]
    shapes: dict[str, str]
    witness: Witness


@cache
def held(kind: str) -> Held:
    return held_of(model_of(kind))


def held_of(model: Model) -> Held:
    assert isinstance(model.config, ModelConfig)
    stored, tied = stored_tensors(model)
    witness = witness_of(model.config, stored.__getitem__, tied)
    return Held(model.config, stored, tied, outline(model), witness)


def asked(before: Held, other: ModelConfig) -> str:
    """How a contract that says ``other`` over the same tensors is answered: by a probe's name where one differs."""
    if config_outline(other, torch.float32) != before.shapes:
        return "tensors"
    try:
        check_witness("it", before.witness, other, before.stored.__getitem__, before.tied)
    except WitnessError as error:
        return error.differences[-1].probe
    except MismatchError:
        return "refused"
    return "passed"


def judged(config: ModelConfig, folder: Path, other: ModelConfig) -> str:
    """The same of a folder, re-signed in every way that needs no other weights."""
    before = (folder / CONTRACT).read_text()
    try:
        resign(folder, lambda data: data.update(model=other.model_dump(mode="json")))
        if config_outline(other, torch.float32) == config_outline(config, torch.float32):
            found = verify(folder)
            return "passed" if found.passed else "witness" if "had when it was saved" in found.problem else "refused"
        assert "contradicts itself" in verify(folder, "headers").problem or len(other.layers) > 9
        resign(folder, lambda data: describe(data, other))
        assert not verify(folder, "headers").passed
        return "tensors"
    finally:
        (folder / CONTRACT).write_text(before)


ALONE = {"TransformerConfig.dropout", "ModelConfig.dropout"}
"""Parts of one kind that cannot be left out: their fields say it all."""


def unwitnessed(change: Change) -> bool:
    return ".".join(["model", *map(str, change.path)]) in UNWITNESSED


def sweep(kinds: list[str], enough: Callable[[list[str]], bool]) -> dict[str, list[str]]:
    """The answers to other values of every word, and that none passes which is not said to."""
    answers: dict[str, list[str]] = defaultdict(list)
    for kind in kinds:
        before = held(kind)
        for change in changes(ModelConfig, before.config.model_dump(mode="json")):
            if enough(answers[change.word]) or not (other := changed(before.config, change)):
                continue
            answer = asked(before, other)
            answers[change.word].append(answer)
            allowed = unwitnessed(change) or alike(before.config, change)
            assert (answer == "passed") == bool(allowed), (kind, change, answer)
    return {word: found for word, found in answers.items() if found}


def test_every_word_that_changes_the_forward_is_found_out() -> None:
    """L11, L19, L53, B106: also words that do not exist yet: one without effect must be listed with a reason.

    Some other values of each, until one is found out by what a probe gives.
    """
    found = sweep(list(EVERY_KIND), lambda known: len(known) > 1 or any(k not in STRUCTURE for k in known))
    assert set(found) == EVERY_WORD - ALONE
    for probe, words in FELT_BY.items():
        assert {word for word in words if probe in found[word]} == words, probe


STRUCTURE = {"tensors", "refused", "passed"}
FELT_BY = {
    "training": {
        "DropoutConfig.embedding", "DropoutConfig.attention", "DropoutConfig.residual", "DropoutConfig.ffn",
        "SequenceClassificationHeadConfig.dropout",
        "TokenClassificationHeadConfig.dropout", "RegressionHeadConfig.dropout",
    },
    "packed": {"SentenceEmbeddingHeadConfig.temperature"},
    "strong": {"ClampedGatedFFNConfig.limit"},
    "stream": {"ModelConfig.residual_dtype", "TransformerConfig.residual_dtype"},
    "lengths": {"DynamicNTKScalingConfig.original_max_position_embeddings", "LongRopeScalingConfig.long_factor"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_other_value_is_found_out(kind: str) -> None:
    assert sweep([kind], lambda known: False)


def is_field(part: type[Config], path: list[str]) -> bool:
    """Whether ``path`` leads to a field of ``part`` or of the parts inside it."""
    field, *rest = path
    if field not in part.model_fields or not rest:
        return field in part.model_fields
    return any(is_field(inner, rest) for inner in parts_in(part.model_fields[field].annotation))


def test_the_list_of_fields_without_effect_names_real_fields() -> None:
    assert all(is_field(Contract, name.split(".")) for name in UNWITNESSED)
    assert all(reason for reason in (UNWITNESSED | UNSEEN).values())
    assert not is_field(Contract, ["model", "cross_attention", "qk_norm", "after"])


# ---------------------------------------------------------------- lessons, in folders

PLACEMENTS = ["pre", "post", "deep", "sandwich", "reordered", "parallel", "parallel_two"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_checkpoint_of_one_placement_is_refused_as_any_other(placement: str) -> None:
    """L11, where names and shapes tell nothing: norms without weights."""
    bare = {"norm": {"kind": "bare_rms_norm"}, "hidden_size": 16}
    before = held_of(build(tiny_config(norm_placement=placement, **bare), seed=1))
    for other in set(PLACEMENTS) - {placement}:
        found = asked(before, tiny_config(norm_placement=other, **bare))
        same = {placement, other} == {"parallel", "parallel_two"}  # one norm, whose two copies have no weights
        assert found == ("passed" if same else "plain"), other


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(["pre", "post", "sandwich", "parallel"], 2)))
def test_a_checkpoint_of_one_placement_cannot_be_loaded_as_another(tmp_path: Path, before: str, after: str) -> None:
    """L11, where norms have weights."""
    config = tiny_config(norm_placement=before, hidden_size=16)
    save(tmp_path / "a", build(config, seed=1))
    assert judged(config, tmp_path / "a", tiny_config(norm_placement=after, hidden_size=16)) == "tensors"


LESSONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "pre as parallel of two norms": ({}, {"norm_placement": "parallel_two"}, "witness"),
    "post as deep": ({"norm_placement": "post"}, {"norm_placement": "deep"}, "witness"),
    "the offset of a norm": ({}, {"norm": {"kind": "rms_norm", "offset": 1}}, "witness"),
    "the type of the stream": ({}, {"residual_dtype": "float32"}, "witness"),
    "a scaling of positions": (
        {"position": {"kind": "rope", "scaling": {"kind": "linear", "factor": 2.0}}},
        {"position": {"kind": "rope", "scaling": {"kind": "linear", "factor": 4.0}}},
        "witness",
    ),
    "a scaling that was none": (
        {},
        {
            "position": {
                "kind": "rope",
                "scaling": {"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
            }
        },
        "witness",
    ),
    "who sees what is ahead": ({}, {"family": "encoder", "head": {"kind": "language_model"}}, "refused"),
    "which token speaks for a document": (
        {"head": {"kind": "regression", "pooling": "last"}},
        {"head": {"kind": "regression", "pooling": "mean"}},
        "witness",
    ),
    "what a head says": (
        {"head": {"kind": "token_classification", "num_labels": 2}},
        {"head": {"kind": "span"}},
        "tensors",
    ),
}


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_a_lesson_names_is_in_the_contract_and_held_to(tmp_path: Path, lesson: str) -> None:
    """L19, L53, L54."""
    before, after, answer = LESSONS[lesson]
    config = tiny_config(hidden_size=16, **before)
    save(tmp_path / "a", stirred(build(config, seed=1)))
    assert judged(config, tmp_path / "a", tiny_config(hidden_size=16, **after)) == answer


@pytest.mark.parametrize(("heads", "num_kv_heads", "size"), [(8, 4, 2), (2, 1, 8), (1, 1, 16)])
def test_other_heads_over_the_same_matrices_are_found_out(
    tmp_path: Path, heads: int, num_kv_heads: int, size: int
) -> None:
    """L53: cutting the same projections into other heads changes no shape."""
    kv = 2 if (heads, num_kv_heads) != (1, 1) else 4
    config = tiny_config(hidden_size=16, attention={"num_attention_heads": 4, "num_key_value_heads": kv})
    save(tmp_path / "a", build(config, seed=1))
    words = {"num_attention_heads": heads, "num_key_value_heads": num_kv_heads, "head_dim": size}
    changed = config.model_copy(update={"attention": config.attention.model_dump() | words})
    assert config_outline(changed, torch.float32) == config_outline(config, torch.float32)
    assert judged(config, tmp_path / "a", changed) == "witness"


@pytest.mark.parametrize(
    ("rule", "other"),
    [
        ("causal", "causal & window(1000000)"),
        ("causal & window(131072)", "causal & window(131073)"),
        ("causal & chunk(50000)", "causal & chunk(50001)"),
        ("causal & (window(3000) | sinks(4))", "causal & (window(3000) | sinks(5))"),
        ("causal | prefix(700)", "causal | prefix(701)"),
        ("lookahead(5000)", "lookahead(5001)"),
        ("causal | same_group", "causal | prefix"),
    ],
)
def test_a_bound_is_met_exactly_however_far_it_is(tmp_path: Path, rule: str, other: str) -> None:
    """A slot is not a position: few tokens reach past any window."""
    config = tiny_config(hidden_size=16, rule=rule)
    save(tmp_path / "a", build(config, seed=1))
    assert judged(config, tmp_path / "a", tiny_config(hidden_size=16, rule=other)) == "witness"


def test_a_window_wider_than_any_probe_has_other_probes(tmp_path: Path) -> None:
    """No answer tells it from none at all, but its own probes would reach further."""
    save(tmp_path / "a", build(tiny_config(hidden_size=16), seed=1))
    assert judged(tiny_config(hidden_size=16), tmp_path / "a", tiny_config(hidden_size=16, rule=WIDE)) == "refused"


WIDE = f"causal & window({FARTHEST + 1})"
MANY = [f"causal & window({number * 1000 + 41 * number**2})" for number in range(1, 36)]
OTHER = [*MANY[:22], "causal & window(44690)", *MANY[23:]]
ALIKE = {
    "a number changed by very little": ({"dropout": {"residual": 0.1}}, {"dropout": {"residual": 0.10000001}}),
    "a value that changes no output": ({"head_dim": 8}, {"head_dim": 8, "scale": 8**-0.5}),
    "bounds of rules beyond 2^38, or a few of more than 32": ({}, {"rule": f"causal & window({(1 << 38) + 1})"}),
    "the same, in the middle of many": (
        {"num_hidden_layers": None, "layers": MANY, "position": {"kind": "none"}},
        {
            "num_hidden_layers": None,
            "layers": OTHER,
            "position": {"kind": "none"},
        },
    ),
}


@pytest.mark.parametrize("change", ALIKE)
def test_what_is_said_not_to_be_seen_is_not_seen(tmp_path: Path, change: str) -> None:
    """The list of what passes is a promise too: it says no more than is so."""
    before, after = (_with(words) for words in ALIKE[change])
    save(tmp_path / "a", build(before, seed=1))
    assert before != after
    assert judged(before, tmp_path / "a", after) == "passed"


CLIPPED = {"num_attention_heads": 4}
FEW = {"kind": "moe", "num_experts": 2, "num_experts_per_tok": 1, "expert": {"kind": "gated", "intermediate_size": 8}}
BEYOND = {
    "capacities beyond 1024, or of several layers": tuple(
        {"ffn": FEW | {"expert_capacity": most}} for most in (1025, 1026)
    ),
    "limits that nothing reaches": tuple({"attention": CLIPPED | {"clip_qkv": most}} for most in (1e7, 2e7)),
}


@pytest.mark.parametrize("change", BEYOND)
def test_what_lies_beyond_every_probe_is_not_seen(tmp_path: Path, change: str) -> None:
    before, after = (tiny_config(hidden_size=16, **words) for words in BEYOND[change])
    save(tmp_path / "a", build(before, seed=1))
    assert judged(before, tmp_path / "a", after) == "passed"


@pytest.mark.parametrize("capacity", [0, 1, 5, 60])
def test_a_capacity_is_met_exactly(tmp_path: Path, capacity: int) -> None:
    config = tiny_config(hidden_size=16, ffn=FEW | {"expert_capacity": capacity})
    save(tmp_path / "a", build(config, seed=1))
    for other in {capacity + 1, max(capacity - 1, 0)} - {capacity}:
        assert (
            judged(config, tmp_path / "a", tiny_config(hidden_size=16, ffn=FEW | {"expert_capacity": other}))
            == "witness"
        )


def _with(words: dict[str, Any]) -> ModelConfig:
    heads = {"num_attention_heads": 4} | {name: words[name] for name in ("head_dim", "scale") if name in words}
    others = {name: value for name, value in words.items() if name not in heads}
    return tiny_config(hidden_size=16, attention=heads, **others)


def test_the_changes_that_are_not_seen_are_those_that_are_listed() -> None:
    text = {"tokens and chats that are not in the witness", "formatting of the files"}  # see test_text_witness
    assert set(ALIKE) - {"the same, in the middle of many"} | text | set(BEYOND) == set(UNSEEN)


def test_a_model_that_is_asked_other_probes_is_refused(tmp_path: Path) -> None:
    """Blocks of tokens are not cut by a cache; a contract that drops them would have to be asked of more."""
    config = tiny_config(hidden_size=16, rule="causal | same_group")
    save(tmp_path / "a", build(config, seed=1))
    assert judged(config, tmp_path / "a", tiny_config(hidden_size=16)) == "witness"


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_several_changes_at_once_are_found_out(data: st.DataObject) -> None:
    before = held(data.draw(st.sampled_from(sorted(EVERY_KIND))))
    other = before.config
    for _ in range(data.draw(st.integers(1, 4))):
        options = list(changes(ModelConfig, other.model_dump(mode="json")))
        change = data.draw(st.sampled_from(options))
        if not unwitnessed(change) and not alike(other, change):
            other = changed(other, change) or other
    if other != before.config:
        assert asked(before, other) != "passed"


# ---------------------------------------------------------------- the contract around the model's config


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken") / "a"
    tokenizer = Tokenizer.train(["to be or not to be"] * 3, vocab_size=264)
    save(folder, build(tiny_config(vocab_size=264, hidden_size=16), seed=1), tokenizer=tokenizer)
    assert verify(folder).passed
    return folder


@pytest.fixture
def spoken(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "spoken"))


CONTRACT_CHANGES = {
    "schema_version": lambda c: c.update(schema_version=1),
    "model": lambda c: c["model"]["position"].update(rope_theta=500.0),
    "positions_after_cache": lambda c: c.update(positions_after_cache="restart"),
    "text": lambda c: c.update(text=None),
    "text.vocab_size": lambda c: c["text"].update(vocab_size=263),
    "text.bos_id": lambda c: c["text"].update(bos_id=1),
    "text.eos_id": lambda c: c["text"].update(eos_id=None),
    "text.pad_id": lambda c: c["text"].update(pad_id=0),
    "text.adds_bos": lambda c: c["text"].update(adds_bos="encode"),
    "tied": lambda c: c["tied"].clear(),
    "tensors": lambda c: c["tensors"].update({"norm.weight": "bfloat16[16]"}),
    "digests": lambda c: c["digests"].pop("tokenizer.json"),
    "witness": lambda c: c["witness"].update(probes={}),
    "witness.stream": lambda c: c["witness"].update(stream=["bfloat16", "float32"]),
    "witness.probes": lambda c: c["witness"]["probes"].pop("far"),
    "witness.text": lambda c: c["witness"].update(text=None),
    "witness.text.tokens": lambda c: c["witness"]["text"].update(tokens="0" * 64),
    "witness.text.sample": lambda c: c["witness"]["text"]["sample"].__setitem__(0, "The quick"),
    "witness.text.ids": lambda c: c["witness"]["text"]["ids"][2].__setitem__(0, 7),
    "witness.text.decoded": lambda c: c["witness"]["text"]["decoded"].__setitem__(6, "cafe"),
}


@pytest.mark.parametrize("field", CONTRACT_CHANGES)
def test_every_other_field_of_the_contract_is_held_to(spoken: Path, field: str) -> None:
    resign(spoken, CONTRACT_CHANGES[field])
    with pytest.raises(CheckpointError):
        load(spoken, check="witness")


@pytest.mark.parametrize("field", ["text", "text.bos_id", "digests of a template"])
def test_what_belongs_to_text_is_verified_without_hashing(spoken: Path, field: str) -> None:
    more = {"digests of a template": lambda c: c["digests"].update({"chat_template.jinja": "0" * 64})}
    resign(spoken, (CONTRACT_CHANGES | more)[field])
    assert not verify(spoken, "headers").passed


def test_no_field_of_the_contract_is_forgotten() -> None:
    inner = {f"text.{name}" for name in TextContract.model_fields}
    asked = {f"witness.{name}" for name in Witness.model_fields}
    asked |= {f"witness.text.{name}" for name in TokenizerFingerprint.model_fields}
    elsewhere = {"witness.tolerance", "witness.text.chats"}  # below, and in test_text_witness
    assert set(CONTRACT_CHANGES) >= (set(Contract.model_fields) | inner | asked) - elsewhere


def test_a_smaller_tolerance_than_was_written_passes_as_is_said(spoken: Path) -> None:
    """And so do digests of what was changed, where it means the same: the two fields that are listed."""
    resign(spoken, lambda data: data["witness"].update(tolerance=9e-7))
    (spoken / "tokenizer.json").write_text(json.dumps(json.loads((spoken / "tokenizer.json").read_text()), indent=1))
    assert not verify(spoken, "headers").passed
    resign(spoken, lambda data: None)
    assert verify(spoken).passed


WITNESS_CHANGES = {
    "another output": lambda p: p["plain"]["logits"][0].__setitem__(2, 0.5),
    "another loss": lambda p: p["packed"].update(loss=1.0),
    "another count of labels": lambda p: p["packed"].update(num_targets=11),
    "no loss": lambda p: p["packed"].update(loss=None, num_targets=None),
    "another token": lambda p: p["padded"]["probe"]["batch"]["tokens"][0].__setitem__(0, 3),
    "another position": lambda p: p["far"]["probe"]["batch"]["positions"][0].__setitem__(5, 7),
    "another document": lambda p: p["packed"]["probe"]["batch"]["segments"][0].__setitem__(4, 2),
    "other slots": lambda p: p["plain"]["probe"].update(at=[[0, 3, 6]]),
}


@pytest.mark.parametrize("change", WITNESS_CHANGES)
def test_a_witness_that_was_changed_does_not_bear_out_the_weights(spoken: Path, change: str) -> None:
    resign(spoken, lambda data: WITNESS_CHANGES[change](data["witness"]["probes"]))
    with pytest.raises(WitnessError):
        load(spoken, check="witness")


def test_a_witness_cannot_allow_more_than_it_should(spoken: Path) -> None:
    resign(spoken, lambda data: data["witness"].update(tolerance=0.5))
    with pytest.raises(CheckpointError, match=r"witness\.tolerance is 0\.5, but must be at most 1e-06"):
        load(spoken)


def test_without_new_digests_a_change_is_seen_before_any_tensor_is_read(spoken: Path) -> None:
    """L19: a RoPE base does not change by accident."""
    data = json.loads((spoken / CONTRACT).read_text())
    data["model"]["position"]["rope_theta"] = 500.0
    (spoken / CONTRACT).write_text(json.dumps(data))
    with pytest.raises(MismatchError, match="was changed after it was written"):
        load(spoken)
