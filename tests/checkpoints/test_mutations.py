"""Mutate and re-sign: a contract that says anything else about the forward pass is found out by its witness."""

import copy
import json
import shutil
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.folders import describe, resign
from helpers.tiny import KINDS, tiny_config
from pellucid.checkpoints import MismatchError, WitnessError, load, save, verify
from pellucid.checkpoints.contract import Contract, TextContract, blank_model, outline
from pellucid.checkpoints.probes import FARTHEST
from pellucid.checkpoints.spoken import TextWitness
from pellucid.checkpoints.store import CONTRACT
from pellucid.checkpoints.witness import UNSEEN, UNWITNESSED, Witness
from pellucid.configfile import Config
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, ConfigError
from pellucid.models import ModelConfig, build

BASES = ["rope-gated-rms", "learned-dense-ln", "post-norm-2017", "sinks-qk-norm-untied", "no-positions-softcap"]
RULES = ["causal & window(2)", "causal & (window(2) | sinks(2))", "causal & chunk(3)", "lookahead(1)", "everything"]
SAMPLES = {"max_positions": 32, "intermediate_size": 40, "bias": False}
"""Values for what a part that is switched to needs and the old one does not say."""


# ---------------------------------------------------------------- every field, and other values for it


def members(annotation: Any) -> list[Any]:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return [m for part in get_args(annotation) for m in members(part)]
    return [annotation]


def is_part(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Config)


def all_fields(part: type[Config], before: str = "") -> set[str]:
    """Dotted names of every field of ``part`` and, through all unions, of the parts inside it."""
    found = set()
    for name, field in part.model_fields.items():
        found.add(before + name)
        for member in filter(is_part, members(field.annotation)):
            kind = getattr(member.model_fields.get("kind"), "default", None)
            found |= all_fields(member, f"{before}{name}{'' if kind is None else f'[{kind}]'}.")
    return found


def others(annotation: Any, value: Any) -> list[Any]:
    """Other values that a field might have."""
    kinds = members(annotation)
    literals = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if literals:
        return [choice for choice in literals if choice != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value // 2, value + 1]
    if isinstance(value, float):
        return [value * 2, value / 2] if value else [0.25]
    return [0.3] if value is None and float in kinds else []


def switched(annotation: Any, value: dict[str, Any]) -> list[dict[str, Any]]:
    """The other members of a union of parts, each with what ``value`` says or a sample."""
    found = []
    for member in filter(is_part, members(annotation)):
        kind = member.model_fields["kind"].default if "kind" in member.model_fields else None
        if kind is not None and kind != value["kind"]:
            said = {name: value.get(name, SAMPLES.get(name)) for name in member.model_fields}
            found.append({name: v for name, v in said.items() if v is not None} | {"kind": kind})
    return found


def mutations(part: type[Config], value: dict[str, Any], before: str = "") -> list[tuple[str, tuple[str, ...], Any]]:
    """(field, path in the data, other value) for all fields that ``value`` has."""
    found: list[tuple[str, tuple[str, ...], Any]] = []
    for name, field in part.model_fields.items():
        here, path = value[name], (name,)
        if isinstance(here, dict):
            (member,) = [
                m for m in filter(is_part, members(field.annotation))
                if "kind" not in here or m.model_fields["kind"].default == here["kind"]
            ]  # fmt: skip
            label = f"{before}{name}" + (f"[{here['kind']}]" if "kind" in here else "")
            found += [(inner, (name, *rest), v) for inner, rest, v in mutations(member, here, f"{label}.")]
            for other in switched(field.annotation, here):
                found += [(before + name, path, other), (f"{label}.kind", path, other)]
        elif name == "layers":
            changed = [[*here[:index], rule, *here[index + 1 :]] for index in range(len(here)) for rule in RULES]
            found += [(before + name, path, layers) for layers in [*changed, here[:-1]]]
        else:
            found += [(before + name, path, other) for other in others(field.annotation, here)]
    return found


def mutated(config: ModelConfig, path: tuple[str, ...], value: Any) -> ModelConfig | None:
    data = copy.deepcopy(config.model_dump(mode="json"))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    try:
        changed = ModelConfig.from_mapping(data)
    except ConfigError:
        return None
    return None if changed == config else changed


# ---------------------------------------------------------------- the property


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ModelConfig, Path]]:
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp("folders") / kind
        save(folder, build(tiny_config(kind, hidden_size=16), seed=1))
        made[kind] = tiny_config(kind, hidden_size=16), folder
    return made


def judged(config: ModelConfig, folder: Path, changed: ModelConfig) -> str:
    """How ``verify`` answers ``changed``, re-signed in every way that needs no other weights: it must see it."""
    before = (folder / CONTRACT).read_text()
    try:
        resign(folder, lambda data: data.update(model=changed.model_dump(mode="json")))
        if outline(blank_model(changed)) == outline(blank_model(config)):
            found = verify(folder)
            return "passed" if found.passed else "witness" if "gave when it was saved" in found.problem else "refused"
        assert "contradicts itself" in verify(folder, "headers").problem or len(changed.layers) > 9
        resign(folder, lambda data: describe(data, changed))
        assert not verify(folder, "headers").passed
        return "tensors"
    finally:
        (folder / CONTRACT).write_text(before)


def unwitnessed(field: str) -> bool:
    return f"model.{field.replace('[grouped]', '')}" in UNWITNESSED


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_field_that_changes_the_forward_is_found_out(folders: dict[str, Any], every: bool) -> None:
    """L11, L19, L53, B106: also fields that do not exist yet: one without effect must be listed with a reason.

    One other value of each field, or ``every`` one in every base.
    """
    seen: dict[str, list[str]] = {}
    for kind in BASES:
        config, folder = folders[kind]
        for field, path, value in mutations(ModelConfig, config.model_dump(mode="json")):
            known = seen.setdefault(field, [])
            enough = not every and (len(known) == 2 or "witness" in known)
            if not enough and (changed := mutated(config, path, value)):
                answer = judged(config, folder, changed)
                known.append(answer)
                assert (answer == "passed") == unwitnessed(field), (kind, field, value, answer)
    alone = {"family", "attention[grouped].kind"}  # one value, so that nothing else can be said
    parts = {"attention", "dropout"}  # one kind: their fields say it all
    assert set(seen) == all_fields(ModelConfig) - alone - parts
    by_witness = {field for field, answers in seen.items() if "witness" in answers}
    assert by_witness >= {
        "layers", "position", "position[rope].theta", "position[rope].pairing", "position[sinusoidal].base",
        "position[sinusoidal].layout", "norm", "norm[rms_norm].eps", "norm[layer_norm].eps", "attention[grouped].scale",
        "ffn[dense].activation", "ffn[gated].activation", "final_logit_softcapping", "dropout.embedding",
        "dropout.attention", "dropout.residual", "dropout.ffn",
    }  # fmt: skip


def test_the_list_of_fields_without_effect_names_real_fields() -> None:
    plain = {field.replace("[grouped]", "") for field in all_fields(Contract)}
    assert set(UNWITNESSED) <= plain
    assert all(reason for reason in (UNWITNESSED | UNSEEN).values())


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 4, 2), (2, 1, 8), (1, 1, 16)])
def test_other_heads_over_the_same_matrices_are_found_out(tmp_path: Path, heads: int, kv_heads: int, size: int) -> None:
    """L53: cutting the same projections into other heads changes no shape."""
    kv = 2 if (heads, kv_heads) != (1, 1) else 4
    config = tiny_config(hidden_size=16, attention={"num_attention_heads": 4, "num_key_value_heads": kv})
    save(tmp_path / "a", build(config, seed=1))
    words = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size}
    changed = config.model_copy(update={"attention": config.attention.model_dump() | words})
    assert outline(blank_model(changed)) == outline(blank_model(config))
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
        ("causal | blocks", "causal | prefix"),
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
MANY = [f"causal & window({number * 1000 + 41 * number**2})" for number in range(1, 60)]
OTHER = [*MANY[:2], "causal & window(3370)", *MANY[3:]]
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


def _with(words: dict[str, Any]) -> ModelConfig:
    heads = {"num_attention_heads": 4} | {name: words[name] for name in ("head_dim", "scale") if name in words}
    others = {name: value for name, value in words.items() if name not in heads}
    return tiny_config(hidden_size=16, attention=heads, **others)


def test_the_changes_that_are_not_seen_are_those_that_are_listed() -> None:
    text = {"tokens and chats that are not asked", "what a file holds besides"}  # see test_text_witness
    assert set(ALIKE) - {"the same, in the middle of many"} | text == set(UNSEEN)


def test_a_model_that_is_asked_other_probes_is_refused(tmp_path: Path) -> None:
    """A rule that reads groups has no cache; a contract that drops the groups would have to be asked of one."""
    config = tiny_config(hidden_size=16, rule="causal | blocks")
    save(tmp_path / "a", build(config, seed=1))
    assert judged(config, tmp_path / "a", tiny_config(hidden_size=16)) == "refused"


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_several_changes_at_once_are_found_out(data: st.DataObject, folders: dict[str, Any]) -> None:
    config, folder = folders[data.draw(st.sampled_from(sorted(KINDS)))]
    changed = config
    for _ in range(data.draw(st.integers(1, 4))):
        options = mutations(ModelConfig, changed.model_dump(mode="json"))
        field, path, value = data.draw(st.sampled_from(options))
        if not unwitnessed(field):
            changed = mutated(changed, path, value) or changed
    if changed != config:
        assert judged(config, folder, changed) != "passed"


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
    "model": lambda c: c["model"]["position"].update(theta=500.0),
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
    asked |= {f"witness.text.{name}" for name in TextWitness.model_fields}
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
    "another count of labels": lambda p: p["packed"].update(counted=10),
    "no loss": lambda p: p["packed"].update(loss=None, counted=None),
    "another token": lambda p: p["padded"]["asked"]["tokens"][0].__setitem__(0, 3),
    "another position": lambda p: p["far"]["asked"]["positions"][0].__setitem__(5, 7),
    "another document": lambda p: p["packed"]["asked"]["segments"][0].__setitem__(4, 2),
    "other slots": lambda p: p["plain"]["asked"].update(at=[[0, 3, 6]]),
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
    data["model"]["position"]["theta"] = 500.0
    (spoken / CONTRACT).write_text(json.dumps(data))
    with pytest.raises(MismatchError, match="says something else than when it was written"):
        load(spoken)
