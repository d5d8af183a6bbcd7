"""transformers models: honest ones are not accused, a fault planted in each kind is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pellucid.audits import CHECKS, audit
from pellucid.audits.probes.hf_detect import probe_for_hf
from pellucid.audits.probes.hf_probe import ALL_ONES, HFCausalProbe, HFMaskedProbe, HFSeq2SeqProbe
from pellucid.audits.probes.hf_rules import rules_of, source_rules_of
from pellucid.batch import Batch
from pellucid.errors import InputError, UnsupportedError

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def _weighted(model: nn.Module) -> nn.Module:
    """Weights so large that attention matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                scale = 1.0 if weight.shape[0] == 61 else 1.3 / weight.shape[-1] ** 0.5
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    return model.eval()


def llama(**more: Any) -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=32, **more)
    return _weighted(transformers.LlamaForCausalLM(config))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return _weighted(transformers.GPT2LMHeadModel(config))


def gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(
        **SMALL, num_key_value_heads=1, head_dim=8, sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return _weighted(transformers.Gemma3ForCausalLM(config))


def bert() -> nn.Module:
    return _weighted(transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, max_position_embeddings=32)))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return _weighted(transformers.T5ForConditionalGeneration(config))


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=61, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
    )  # fmt: skip
    return _weighted(transformers.BartForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("make", "checks"),
    [
        (llama, ["future", "padding"]),
        (gpt2, ["batch", "cache"]),
        (gemma3, ["window"]),
        (bert, ["padding", "loss"]),
        (t5, ["cross"]),
        (bart, ["loss"]),
    ],
)
def test_honest_models_are_not_accused(make: Callable[[], nn.Module], checks: list[str]) -> None:
    model = make()
    report = audit(model, probe_for_hf(model), checks, length=9)
    assert [f for f in report.findings if f.status in ("leak", "error")] == []
    assert set(report.verdicts.values()) <= {"pass", "fragile"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, gpt2, gemma3, bert, t5, bart])
def test_honest_models_pass_every_check(make: Callable[[], nn.Module]) -> None:
    model = make()
    report = audit(model, probe_for_hf(model), [name for name in CHECKS if name != "packing"], length=7)
    assert [f for f in report.findings if f.status in ("leak", "error")] == []
    assert report.verdicts["padding"] == "fragile"  # NaN in a pad spoils what sees it: 0 · NaN


def test_kinds_are_recognised() -> None:
    assert type(probe_for_hf(gpt2())) is HFCausalProbe
    assert type(probe_for_hf(bert())) is HFMaskedProbe
    assert type(probe_for_hf(t5())) is HFSeq2SeqProbe
    assert probe_for_hf(nn.Linear(2, 2)) is None
    assert probe_for_hf("llama") is None
    with pytest.raises(InputError, match="Linear has no config"):
        HFCausalProbe(nn.Linear(2, 2))


def test_what_is_found_by_asking() -> None:
    causal, fills, reads, slots = (probe_for_hf(make()) for make in (llama, bert, t5, bart))
    assert causal is not None
    assert fills is not None
    assert reads is not None
    assert slots is not None
    assert {"packing", "cache", "crop", "reorder", "loss", "kernels", "attention"} <= causal.capabilities
    assert causal.shift_invariant
    assert causal.max_length is None
    assert causal.forbidden_tokens == {1, 2}
    assert "packing" not in fills.capabilities
    assert fills.predicts_from == 0
    assert fills.max_length == 32
    assert "source" in reads.capabilities
    assert reads.sides == ("right", "left", "both")
    assert slots.sides == ("right",)  # its positions are its slots
    with pytest.raises(UnsupportedError, match="several documents"):
        fills.logits(Batch.packed([[3, 4], [5]]))


def test_attention_and_kernels() -> None:
    probe = probe_for_hf(gemma3())
    assert probe is not None
    assert probe.kernels == ("eager", "sdpa")
    before = probe.module.config._attn_implementation
    first, second = probe.attention(Batch.from_rows([[5, 6, 7, 8, 9]]))
    assert first.shape == (1, 2, 5, 5)
    assert bool((first[0, :, 4, :2] == 0).all())
    assert bool((second[0, :, 4] > 0).all())
    assert probe.module.config._attn_implementation == before


def test_an_audited_model_keeps_its_outputs() -> None:
    model = llama(attn_implementation="eager")
    audit(model, probe_for_hf(model), ["trace"], length=7)
    answer = model(torch.tensor([[5, 6, 7]]), output_attentions=True, output_hidden_states=True)
    assert len(answer.attentions) == 2
    assert len(answer.hidden_states) == 3


def test_an_all_ones_mask_ends_the_isolation_of_packs() -> None:
    model = llama()
    report = audit(model, probe_for_hf(model), ["packing"], length=7)
    assert {f.case for f in report.findings if f.status == "leak"} == {ALL_ONES}


def _open(*_: object, inputs_embeds: Tensor, **__: object) -> Tensor:
    length = inputs_embeds.shape[1]
    return torch.ones(inputs_embeds.shape[0], 1, length, length, dtype=torch.bool)


def _leaks(make: Callable[[], nn.Module], check: str) -> list[str]:
    model = make()
    probe = probe_for_hf(model)
    return [f.case for f in audit(model, probe, [check], length=9).findings if f.status == "leak"]


def test_a_decoder_without_its_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", _open)
    assert "tokens" in _leaks(llama, "future")


def test_a_window_that_is_not_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = transformers.models.gemma3.modeling_gemma3
    monkeypatch.setattr(masks, "create_sliding_window_causal_mask", masks.create_causal_mask)
    assert _leaks(gemma3, "window")


def test_a_cache_that_forgets_where_it_is_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.cache_utils.DynamicLayer.get_seq_length", lambda self: 0)
    assert _leaks(gpt2, "cache")


def test_an_encoder_that_sees_pads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.bert.modeling_bert.create_bidirectional_mask", lambda *_, **__: None)
    assert "other ids in right pads" in _leaks(bert, "padding")


def test_a_decoder_that_reads_the_source_s_pads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.bart.modeling_bart.create_bidirectional_mask", lambda *_, **__: None)
    assert "source padded right" in _leaks(bart, "cross")


def test_labels_shifted_twice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    right = model.loss_function
    shifted = lambda logits, labels, **more: right(logits, labels.roll(-1, 1), **more)  # noqa: E731
    monkeypatch.setattr(type(model), "loss_function", property(lambda _: shifted))
    assert any(f.status == "leak" for f in audit(model, probe_for_hf(model), ["loss"], length=7).findings)


@pytest.mark.parametrize(
    ("given", "kind", "want"),
    [
        ({"model_type": "bert", "is_decoder": False}, "causal", ["full()"] * 2),
        ({"model_type": "bert", "is_decoder": True}, "causal", ["causal()"] * 2),
        ({"model_type": "gpt_neox", "is_decoder": False}, "causal", ["causal()"] * 2),
        ({"sliding_window": 4}, "causal", ["causal() & window(4)"] * 2),
        ({"sliding_window": 4, "use_sliding_window": False}, "causal", ["causal()"] * 2),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, "causal",
         ["causal()", "causal() & window(4)"]),
        ({"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}, "causal",
         ["causal() & window(4)", "causal()"]),
        ({"attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention"]}, "causal",
         ["causal() & chunk(5)", "causal()"]),
        ({"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}, "masked",
         ["window(5) & lookahead(4)", "full()"]),
        ({"window_size": 3, "attention_layers": ["global", "local"]}, "causal", ["causal()", "causal() & window(3)"]),
        ({"use_bidirectional_attention": True}, "causal", ["full()"] * 2),
        ({"attention_window": [4, 6]}, "masked", ["window(3) & lookahead(2)", "window(4) & lookahead(3)"]),
    ],
)  # fmt: skip
def test_rules_follow_from_configs(given: dict[str, Any], kind: Any, want: list[str]) -> None:
    said = rules_of(_Config(num_hidden_layers=2, **given), kind)
    assert [rule.describe() for rule in said.rules] == want
    assert said.rules_declared


def test_what_is_not_understood_is_only_assumed() -> None:
    mixed = rules_of(_Config(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]), "causal")
    assert not mixed.rules_declared
    assert [rule.describe() for rule in mixed.rules] == ["causal()"] * 2
    assert not rules_of(_Config(num_hidden_layers=1, state_size=8), "causal").rules_declared
    pair = _Config(encoder_layers=1, decoder_layers=2)
    assert [rule.describe() for rule in rules_of(pair, "seq2seq").rules] == ["causal()"] * 2
    assert [rule.describe() for rule in source_rules_of(pair).rules] == ["full()"]


class _Config:
    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_probe_leaves_what_its_owner_has_set():
    """Building one tries out what a model can do, recomputing activations too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes))
    model.gradient_checkpointing_enable()
    kept = [getattr(part, "gradient_checkpointing", None) for part in model.modules()]
    probe = probe_for_hf(model)
    with probe.checkpointing():
        pass
    assert [getattr(part, "gradient_checkpointing", None) for part in model.modules()] == kept
    assert any(kept)


def test_a_loss_taken_in_float32_is_not_accused_in_float64():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).double()
    assert audit(model, checks=["loss"]).verdicts == {"loss": "pass"}


def test_places_that_count_by_design_are_not_held_to_a_shift():
    config = transformers.HunYuanDenseV1Config(
        **SMALL, num_key_value_heads=1, head_dim=8, max_position_embeddings=32, pad_token_id=0
    )
    model = _weighted(transformers.HunYuanDenseV1ForCausalLM(config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "query_layernorm" in name:
                weight.copy_(torch.linspace(0.5, 1.5, len(weight)))
    found = {finding.case: finding for finding in audit(model, checks=["positions"], length=8).findings}
    assert found["shifted by 1"].status == "not_applicable"
    assert "behind the rotation" in found["shifted by 1"].message
    assert found["other positions"].status == "pass"
