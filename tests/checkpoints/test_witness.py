"""The witness says what the weights mean: the same everywhere, and something else for every other forward."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.folders import resign
from helpers.tiny import KINDS, tiny_config, tiny_model
from pellucid.batch import Batch
from pellucid.checkpoints import WitnessError, load, reference_forward, save, verify, witness
from pellucid.checkpoints.contract import CONTRACT, WitnessProbe, read_contract
from pellucid.checkpoints.load_report import stored_tensors
from pellucid.checkpoints.probe_set import FARTHEST, probes_of, splitmix64
from pellucid.errors import CheckpointError
from pellucid.models import build
from pellucid.nn import cache as caches
from pellucid.nn.attend import AttentionOptions
from pellucid.nn.positions import Rotary

# ---------------------------------------------------------------- the probes


@pytest.mark.parametrize("kind", KINDS)
def test_the_probes_follow_from_the_config_alone(kind: str) -> None:
    config = tiny_config(kind)
    asked = probes_of(config)
    more = ["strong"] if kind == "no-positions-softcap" else []
    assert list(asked) == ["plain", "padded", "packed", "continued", *more, "far", "training"]
    assert asked == probes_of(type(config).from_mapping(config.model_dump()))
    for probe in asked.values():
        batch = probe.batch
        longest = config.position.max_position_embeddings if config.position.kind == "learned" else FARTHEST + 1
        assert int(batch.positions.max()) < longest
        assert 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < config.vocab_size
        assert all(bool(batch.segments[row, slot]) for row, slots in enumerate(probe.at) for slot in slots)


def test_the_probes_are_what_their_names_say() -> None:
    asked = probes_of(tiny_config("mqa-window"))
    padded, packed, far = (asked[name].batch for name in ("padded", "packed", "far"))
    assert (padded.segments != 0).sum(1).tolist() == [7, 4, 1]
    assert padded.segments[:, -1].tolist() == [1, 1, 1]
    assert packed.segments.max() == 4
    assert packed.layout is not None
    assert packed.layout.kind == "packed"
    assert {2, 3, 4, 6, FARTHEST} <= set(far.positions[0].tolist())  # both sides of window(3)
    assert far.shape[1] < 40
    pieces = list(asked["continued"].pieces())
    assert [piece.shape[1] for piece in pieces] == list(asked["continued"].chunks)
    assert pieces[0].positions.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert pieces[2].positions.tolist() == [[0, 1], [0, 1]]
    assert asked["training"] == asked["plain"].model_copy(update={"training": True})


@pytest.mark.parametrize("vocab_size", [50, 32_000])
def test_tokens_come_from_all_over_the_vocabulary(vocab_size: int) -> None:
    tokens = np.concatenate([np.ravel(p.batch.tokens) for p in probes_of(tiny_config(vocab_size=vocab_size)).values()])
    assert len(set((tokens * 5 // vocab_size).tolist())) == 5


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_short_position_table_is_never_left(tmp_path: Path, length: int) -> None:
    config = tiny_config(
        "learned-dense-ln", position={"kind": "learned", "max_position_embeddings": length}, hidden_size=16
    )
    assert all(int(probe.batch.positions.max()) < length for probe in probes_of(config).values())
    assert len(probes_of(config)["continued"].chunks) == (3 if length == 5 else 1)
    save(tmp_path / "a", build(config))
    assert verify(tmp_path / "a").passed


def test_the_first_chunk_holds_what_a_rule_does_not_let_a_cache_cut() -> None:
    assert probes_of(tiny_config(rule="causal | prefix(9)"))["continued"].chunks[0] == 12
    assert probes_of(tiny_config(rule="full"))["continued"].chunks == (8,)
    assert probes_of(tiny_config(rule="causal | prefix(5000)"))["continued"].chunks == (8,)
    grouped = probes_of(tiny_config(rule="causal | same_group"))
    assert grouped["plain"].batch.groups.tolist() == [[1, 1, 0, 0, 2, 2, 0, 0]]
    assert grouped["continued"].batch.groups.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0, 0]]
    assert grouped["continued"].chunks[0] == 5


def test_many_bounds_stay_few_tokens() -> None:
    rules = [f"causal & window({number * 1000})" for number in range(1, 60)]
    far = probes_of(tiny_config("no-positions-softcap", num_hidden_layers=None, layers=rules))["far"]
    assert far.batch.shape[1] < 200
    assert len(far.at[0]) <= 64


def test_spread_is_the_published_generator() -> None:
    """Steele, Lea & Flood 2014; the first outputs of splitmix64 from seed 0."""
    assert [hex(x) for x in splitmix64(np.arange(2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"positions": [[0, 1]]}, "positions has shape .* every field has one entry a slot"),
        ({"tokens": [[1], [2, 3]]}, "expected sequence of length 1"),
        ({"labels": [[1, 2, 3]]}, "a batch has tokens, positions, segments, and may have groups, types and source"),
        ({"positions": None}, "positions: rows of whole numbers are wanted"),
        ({"tokens": [[1.0, 2.0, 3.0]]}, "valid integer"),
        ({"at": [[3]]}, "none that is not there"),
        ({"at": [[0], [0]]}, "none that is not there"),
        ({"chunks": [1, 1]}, "chunks must sum"),
        ({"tokens": [[1] * 1101]}, "at most 1100"),
        (
            {"source": {"tokens": [[1], [2]], "positions": [[0], [0]], "segments": [[1], [1]]}},
            "source has 2 rows, but tokens has 1",
        ),
        ({"gains": [1.0, 2.0]}, "gains has one number a row"),
        ({"types": [[0, 1]]}, "types has shape .* every field has one entry a slot"),
        ({"tokens": [[-1, 0, 0]]}, "greater than or equal to 0"),
    ],
)
def test_a_probe_that_is_none_is_refused(change: dict[str, Any], words: str) -> None:
    batch = {"tokens": [[1, 2, 3]], "positions": [[0, 1, 2]], "segments": [[1, 1, 1]]}
    good = {"batch": batch, "at": [[2]]}
    assert WitnessProbe.from_mapping(good).batch.shape == (1, 3)
    own = {name: value for name, value in change.items() if name in WitnessProbe.model_fields}
    inner = {name: value for name, value in change.items() if name not in own}
    with pytest.raises(ValueError, match=words):
        WitnessProbe.from_mapping(good | own | {"batch": batch | inner})


# ---------------------------------------------------------------- what it must not depend on


HALF = [(kind, torch.bfloat16) for kind in ("rope-gated-rms", "post-norm-2017")]


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), *HALF], ids=str)
def test_a_saved_model_verifies_in_every_dtype(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    save(tmp_path / "a", tiny_model(kind, dtype=dtype, seed=2, hidden_size=16))
    found = verify(tmp_path / "a")
    assert found.passed
    assert max(d.size / d.allowed for d in found.differences if d.allowed) < 0.2
    assert load(tmp_path / "a", check="witness", dtype=torch.float16).model.lm_head.weight.dtype == torch.float16


def test_the_exact_forward_is_the_model_in_float64() -> None:
    config = tiny_config("sinks-qk-norm-untied")
    model = build(config, seed=1)
    stored, tied = stored_tensors(model)
    batch = Batch.packed([[3, 4, 5], [6, 7, 8, 9]])
    found = reference_forward.reference_model(config, stored.__getitem__, tied)(batch).logits
    assert torch.allclose(found, model.double()(batch).logits, atol=1e-12)


@pytest.mark.parametrize("kind", ["rope-gated-rms", "learned-dense-ln", "sinks-qk-norm-untied"])
def test_a_large_model_is_asked_part_by_part(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(kind)
    stored, tied = stored_tensors(build(config, seed=1))
    whole = witness.witness_of(config, stored.__getitem__, tied)
    monkeypatch.setattr(reference_forward, "SMALL", 0)
    assert witness.witness_of(config, stored.__getitem__, tied) == whole
    model = reference_forward.reference_model(config, stored.__getitem__, tied)
    model(Batch.from_rows([[1, 2, 3]]))
    kept = {name for name, weight in model.named_parameters() if not weight.is_meta}
    assert kept <= {"lm_head.weight", "lm_head.bias", "embed_tokens.weight"}


def test_numbers_are_float32(tmp_path: Path) -> None:
    save(tmp_path / "a", tiny_model(dtype=torch.float64))
    kept = read_contract(tmp_path / "a" / CONTRACT).witness
    numbers = [x for answer in kept.probes.values() for row in answer.logits for x in row]
    assert all(str(np.float32(x)) == str(x) for x in numbers)
    assert len(numbers) > 100
    assert (tmp_path / "a" / CONTRACT).stat().st_size < 64 * 1024


def test_saving_leaves_the_model_and_the_random_state_alone(tmp_path: Path) -> None:
    """A run that saves more often is the same run."""
    model = tiny_model(dropout={"residual": 0.1, "attention": 0.1})
    model.train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before, weights = torch.get_rng_state(), [w.clone() for w in model.parameters()]
    save(tmp_path / "a", model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, model.parameters(), weights))
    assert not any(module._forward_hooks for module in model.modules())


# ---------------------------------------------------------------- what it must see


def test_a_weight_that_was_changed_is_seen_though_every_digest_fits(tmp_path: Path) -> None:
    model = tiny_model(seed=1, dtype=torch.float32)
    save(tmp_path / "a", model)
    with torch.no_grad():
        model.layers[1].ffn.down_proj.weight[0, 0] += 1e-3
    save(tmp_path / "b", model)
    (tmp_path / "b" / "model.safetensors").rename(tmp_path / "a" / "model.safetensors")
    resign(tmp_path / "a", lambda data: None)
    load(tmp_path / "a", check="digests")
    with pytest.raises(WitnessError) as caught:
        load(tmp_path / "a", check="witness")
    (first,) = caught.value.differences
    assert str(caught.value) == (
        f"{tmp_path / 'a'} does not have the outputs it had when it was saved: probe 'plain' differs first, "
        f"its logits by {first.size:.3g}, allowed {first.allowed:.3g}; its weights or its contract were changed"
    )


def _slots_for_positions(cache: Any, chunk: Any) -> Any:
    placed = _CONTINUED(cache, chunk)
    moved = torch.where(placed.real, placed.positions + 1, 0)
    return replace(placed, positions=moved)


_CONTINUED, _ANGLES = caches.ContiguousCache._continued, Rotary.angles


def _shifted(batch: Batch) -> Batch:
    return batch.with_labels(torch.where(batch.segments != 0, batch.tokens, -100))


def _late(coordinates: Any) -> torch.Tensor:
    return (coordinates.positions[..., None] / 100).floor() * 1e-6


TWINS = {
    "a cache that loses count": ("continued", "logits", caches.ContiguousCache, "_continued", _slots_for_positions),
    "labels that are not shifted": ("plain", "count of targets", reference_forward, "causal", _shifted),
    "angles that drift": ("far", "logits", Rotary, "angles", lambda r, c: _ANGLES(r, c) * (1 + _late(c))),
}


@pytest.mark.parametrize("fault", TWINS)
def test_a_fault_in_the_code_is_seen_by_the_probe_that_is_there_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Law 7: weights and contract are right, the forward pass is not."""
    probe, what, owner, name, faulty = TWINS[fault]
    save(tmp_path / "a", tiny_model(seed=1))
    monkeypatch.setattr(owner, name, faulty)
    found = verify(tmp_path / "a")
    assert not found.passed
    *passed, first = found.differences
    assert all(d.passed for d in passed)
    assert (first.probe, first.what) == (probe, what)


@pytest.mark.parametrize("site", ["embedding", "attention", "residual", "ffn"])
def test_dropout_is_portable_and_seen_at_each_site(site: str) -> None:
    """Only ``training`` sees it; the dice are the same on every machine, and the rate is the one asked for."""
    stored, tied = stored_tensors(build(tiny_config(), seed=1))
    quiet, loud = (
        witness.witness_of(tiny_config(dropout=sites), stored.__getitem__, tied).probes for sites in ({}, {site: 0.5})
    )
    assert {name for name in quiet if quiet[name] != loud[name]} == {"training"}
    with reference_forward.DeterministicDropout():
        dropped = torch.nn.functional.dropout(torch.ones(200, 50), 0.3, training=True)
        again = torch.dropout(torch.ones(200, 50), 0.3, True)
        idle = torch.nn.functional.dropout(torch.ones(5), 0.3, training=False)
    assert abs(float((dropped == 0).float().mean()) - 0.3) < 0.02
    assert float(dropped.max()) == pytest.approx(1 / 0.7)
    assert not torch.equal(dropped, again)
    assert torch.equal(idle, torch.ones(5))


# ---------------------------------------------------------------- what saving refuses


def test_a_model_that_does_something_else_than_its_config_says_is_not_saved(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    model.layers[0].attention.options = AttentionOptions(scale=5.0)
    with pytest.raises(CheckpointError, match=r"differs from what its config describes by .* on the probe 'plain'"):
        save(tmp_path / "a", model)
    assert not (tmp_path / "a").exists()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.layers[1].ffn.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(CheckpointError, match="gives NaN or infinity on the probe 'plain'"):
        save(tmp_path / "a", model)


def test_another_kind_of_model_is_not_saved(tmp_path: Path) -> None:
    """A class of its own cannot come back from a folder."""

    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = tiny_model()
            self.config = inner.config
            for name, child in inner.named_children():
                self.add_module(name, child)

    with pytest.raises(CheckpointError, match="a Other cannot be saved"):
        save(tmp_path / "a", Other())


def test_the_report_of_a_verification_is_plain_data(tmp_path: Path) -> None:
    save(tmp_path / "a", tiny_model(hidden_size=16))
    found = verify(tmp_path / "a")
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["passed"] is True
    assert data["level"] == "witness"
    assert [probe["probe"] for probe in data["probes"]][::2][:3] == ["plain", "padded", "packed"]
    assert data["unwitnessed"].keys() >= {"model.initializer_range", "model.residual_init", "digests"}
    assert len(found.to_table().rows) == len(data["probes"])
    quick = verify(tmp_path / "a", "headers")
    assert quick.passed
    assert quick.differences == ()
    assert build(tiny_config(hidden_size=16), device="meta").config == load(tmp_path / "a").contract.model
