"""Folders of every family, head and part: saved, read back to the bit, verified, and read part by part."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.folders import resign
from helpers.kinds import EVERY_KIND, config_of, model_of
from pellucid.checkpoints import MismatchError, load, reference_forward, save, verify, witness
from pellucid.checkpoints.contract import CONTRACT, WitnessProbe
from pellucid.checkpoints.load_report import stored_tensors
from pellucid.checkpoints.probe_set import probes_of
from pellucid.errors import CheckpointError
from pellucid.models import Decoder, Encoder, EncoderDecoder, Model
from pellucid.nn.attend import AttentionOptions
from pellucid.nn.moe import SigmoidRouter

SPREAD = [
    "decoder: sandwich, capped, limits of every kind", "decoder: latent with yarn, experts in groups",
    "decoder: one layer twice, factorised", "decoder: a prefix by groups", "encoder: masked lm, factorised",
    "encoder: classifier", "encoder: embedding", "both: two widths, two vocabularies",
    "both: deep, layers shared on both sides",
]  # fmt: skip
ROUTED = "decoder: latent with yarn, experts in groups"
ROUTER = "layers.1.ffn.router"


def answer_of(model: Model, probe: WitnessProbe) -> torch.Tensor:
    return model(probe.batch).logits


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in EVERY_KIND if kind not in SPREAD]


@pytest.mark.parametrize("kind", [*SPREAD, *SLOW])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, kind: str) -> None:
    model = model_of(kind)
    save(tmp_path / "a", model)
    found = load(tmp_path / "a")
    assert type(found.model) is type(model)
    assert found.model.config == model.config
    assert found.report.complete
    was, now = model.state_dict(), found.model.state_dict()
    assert list(was) == list(now)
    assert all(was[name].dtype == now[name].dtype and torch.equal(was[name], now[name]) for name in was)
    plain = probes_of(config_of(kind))["plain"]  # of equal bits at other addresses, sums may be rounded otherwise
    assert torch.allclose(answer_of(found.model, plain), answer_of(model, plain), atol=1e-6)
    assert verify(tmp_path / "a").passed


@pytest.mark.parametrize("kind", [*SPREAD, *SLOW])
def test_every_kind_verifies_in_a_narrow_type(tmp_path: Path, kind: str) -> None:
    save(tmp_path / "a", model_of(kind, dtype=torch.bfloat16))
    found = verify(tmp_path / "a")
    assert found.passed
    assert max(d.size / d.allowed for d in found.differences if d.allowed) < 0.2


@pytest.mark.parametrize("kind", SPREAD)
def test_every_kind_is_asked_part_by_part(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind)
    stored, tied = stored_tensors(model)
    whole = witness.witness_of(model.config, stored.__getitem__, tied)
    monkeypatch.setattr(reference_forward, "SMALL", 0)
    assert witness.witness_of(model.config, stored.__getitem__, tied) == whole
    asked = reference_forward.reference_model(model.config, stored.__getitem__, tied)
    asked(probes_of(model.config)["plain"].batch)
    head = {f"{asked.head_name}.{name}" for name, _ in asked.head.named_parameters()}
    kept = {name for name, weight in asked.named_parameters() if not weight.is_meta}
    assert kept <= head | {"embed_tokens.weight"}
    assert any(weight.is_meta for weight in asked.parameters())


def test_each_kind_is_asked_what_it_needs() -> None:
    asked = {kind: list(probes_of(config_of(kind))) for kind in EVERY_KIND}
    assert not any("continued" in names for kind, names in asked.items() if kind.startswith("encoder"))
    assert all("continued" in names for kind, names in asked.items() if not kind.startswith("encoder"))
    has = {
        extra: {kind for kind, names in asked.items() if extra in names} for extra in ("lengths", "crowded", "strong")
    }
    assert "decoder: longrope, one factor" in has["lengths"]
    assert "decoder: latent, queries of one step, crowded experts" in has["crowded"]
    assert "decoder: experts with clamped gates" in has["strong"]
    assert "both: two widths, two vocabularies" in has["lengths"] & has["crowded"] & has["strong"]


def test_an_encoder_decoder_is_given_its_sources() -> None:
    asked = probes_of(config_of("both: two widths, two vocabularies"))
    padded, packed, far = (asked[name].batch for name in ("padded", "packed", "far"))
    assert all(batch.source is not None for batch in (padded, packed, far))
    assert (padded.source.segments != 0).sum(1).tolist() == [3, 6, 2]
    assert set(packed.segments[0].tolist()) == set(packed.source.segments[0].tolist()) == {0, 1, 2, 3, 4}
    assert int(far.source.positions.max()) == 199  # as far as its encoder goes
    assert {19, 20} <= set(far.source.positions[0].tolist())  # both sides of its scaling's first length
    assert packed.source.types.max() == 2
    assert far.source.types is None
    first, *later = asked["continued"].pieces()
    assert first.source is not None
    assert later
    assert all(piece.source is None for piece in later)


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [("encoder: classifier", 4), ("decoder: a classifier by its last token", 4), ("encoder: embedding", 4)],
)
def test_heads_about_documents_answer_once_a_document(kind: str, outputs: int) -> None:
    packed = probes_of(config_of(kind))["packed"]
    assert packed.at is None
    assert packed.num_outputs == outputs == len(answer_of(model_of(kind), packed))


# ---------------------------------------------------------------- what is shared, what stays wide


def test_three_tables_are_one_and_a_layer_can_be_two(tmp_path: Path) -> None:
    model = model_of("both: 2017")
    save(tmp_path / "a", model)
    found = load(tmp_path / "a")
    assert found.contract.tied == {
        "lm_head.weight": "embed_tokens.weight",
        "encoder.embed_tokens.weight": "embed_tokens.weight",
    }
    assert found.model.lm_head.weight is found.model.embed_tokens.weight is found.model.encoder.embed_tokens.weight
    save(tmp_path / "b", model_of("both: deep, layers shared on both sides"))
    shared = load(tmp_path / "b").model
    assert shared.layers[0] is shared.layers[1]
    assert shared.encoder.layers[0] is shared.encoder.layers[1]
    names = set(stored_tensors(shared)[0])
    assert not any("layers.1." in name for name in names)
    assert (tmp_path / "b" / "model.safetensors").stat().st_size < 8 * sum(p.numel() for p in shared.parameters())


def test_many_layers_of_one_have_fewer_tensors_than_layers(tmp_path: Path) -> None:
    layers = ["causal", *({"rule": "causal", "same_as": 0} for _ in range(19))]
    model = model_of("decoder: one layer twice, factorised", layers=layers)
    save(tmp_path / "a", model)
    found = load(tmp_path / "a")
    assert len(found.contract.tensors) < 20 == len(found.model.layers)


def test_routers_stay_wide_in_a_narrow_model(tmp_path: Path) -> None:
    model = model_of(ROUTED, dtype=torch.bfloat16)
    save(tmp_path / "a", model)
    wide = {f"{ROUTER}.weight", f"{ROUTER}.expert_bias"}
    listed = json.loads((tmp_path / "a" / CONTRACT).read_text())["tensors"]
    assert {name for name, spec in listed.items() if spec.startswith("float32")} == wide
    assert {spec.partition("[")[0] for name, spec in listed.items() if name not in wide} == {"bfloat16"}
    router = load(tmp_path / "a").model.layers[1].ffn.router
    assert isinstance(router, SigmoidRouter)
    assert router.weight.dtype == router.expert_bias.dtype == torch.float32
    assert torch.equal(router.expert_bias, model.layers[1].ffn.router.expert_bias)
    assert router.expert_bias.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_keeps_routers_wide_and_says_so(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path / "a", model_of(ROUTED))
    found = load(tmp_path / "a", dtype=dtype)
    routers = {f"{ROUTER}.weight", f"{ROUTER}.expert_bias"}
    wide = dtype if dtype == torch.float64 else torch.float32
    types = {name: tensor.dtype for name, tensor in found.model.state_dict().items()}
    assert {types.pop(name) for name in routers} == {wide}
    assert set(types.values()) == {dtype}
    assert set(found.report.names("loaded")) == (set() if wide == dtype else routers)
    save(tmp_path / "b", found.model)


def test_nothing_else_may_be_of_another_type(tmp_path: Path) -> None:
    narrow = model_of(ROUTED, dtype=torch.bfloat16)
    router = narrow.layers[1].ffn.router
    router.weight = torch.nn.Parameter(router.weight.bfloat16())
    with pytest.raises(
        CheckpointError, match=r"has bfloat16\[.*\] as 'layers.1.ffn.router.weight', but its config describes float32"
    ):
        save(tmp_path / "a", narrow)
    other = model_of(ROUTED, dtype=torch.bfloat16)
    other.norm.float()
    words = r"has float32\[16\] as 'norm.weight', but its config describes bfloat16\[16\]; convert it"
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path / "a", other)
    save(tmp_path / "a", model_of(ROUTED, dtype=torch.bfloat16))
    for name, spec in ((f"{ROUTER}.weight", "bfloat16[8, 16]"), ("norm.weight", "float32[16]")):
        good = (tmp_path / "a" / CONTRACT).read_text()
        resign(tmp_path / "a", lambda data, name=name, spec=spec: data["tensors"].update({name: spec}))
        with pytest.raises(MismatchError):
            load(tmp_path / "a")
        (tmp_path / "a" / CONTRACT).write_text(good)


# ---------------------------------------------------------------- what saving refuses


CHANGED: dict[str, tuple[str, Any]] = {
    "another pooling": ("encoder: regression", lambda m: setattr(m.regressor, "pooling", "last")),
    "a memory read backwards": (
        "both: t5",
        lambda m: setattr(m.layers[0].cross_attention, "options", AttentionOptions(scale=9.0)),
    ),
    "an encoder that sees less": (
        "both: t5",
        lambda m: setattr(m.encoder.layers[1].attention, "options", AttentionOptions(scale=9.0)),
    ),
    "another capacity": (
        "decoder: latent, queries of one step, crowded experts",
        lambda m: [setattr(block.ffn, "expert_capacity", 0) for block in m.layers],
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_model_that_does_something_else_is_not_saved(tmp_path: Path, change: str) -> None:
    kind, spoil = CHANGED[change]
    model = model_of(kind)
    spoil(model)
    with pytest.raises(CheckpointError, match="differs from what its config describes"):
        save(tmp_path / "a", model)


def test_a_model_of_another_family_is_not_saved(tmp_path: Path) -> None:
    model = model_of("encoder: two-way biases")
    decoder = model_of("decoder: a decoder that sees everything")
    assert (type(model), type(decoder)) == (Encoder, Decoder)
    model.__class__ = Decoder
    with pytest.raises(CheckpointError, match="a Decoder cannot be saved: load returns a Encoder"):
        save(tmp_path / "a", model)
    assert issubclass(EncoderDecoder, Decoder)
