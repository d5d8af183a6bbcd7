"""Configs say everything, refuse what they do not know, and come back from their own text."""

import pytest

from helpers.tiny import KINDS, tiny_config
from pellucid.errors import ConfigError
from pellucid.models import ModelConfig


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind):
    config = tiny_config(kind)
    assert ModelConfig(**config.model_dump(mode="json")) == config


def test_short_forms_are_written_out():
    config = tiny_config(num_hidden_layers=3, rule="window(4) & causal", attention={"num_attention_heads": 4})
    assert config.layers == ("window(4) & causal()",) * 3
    assert (config.attention.num_key_value_heads, config.attention.head_dim) == (4, 8)


HEADS = {"num_attention_heads": 4}
LATENT = {"kind": "latent", "num_attention_heads": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
LATENT["v_head_dim"] = 8
PAIR = {"family": "encoder_decoder"}


def moe(**changes):
    return {
        "kind": "moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert": {"kind": "gated", "intermediate_size": 8},
        **changes,
    }


def test_short_forms_of_attention_are_written_out():
    config = tiny_config(attention=HEADS | {"qkv_bias": True, "qk_norm": True}, norm={"kind": "rms_norm", "eps": 1e-3})
    attention = config.attention
    assert (attention.q_bias, attention.k_bias, attention.v_bias, attention.o_bias) == (True, True, True, False)
    assert (attention.qk_norm.kind, attention.qk_norm.over, attention.qk_norm.eps) == ("rms_norm", "head", 1e-3)
    assert tiny_config(attention=HEADS | {"qk_norm": False}).attention.qk_norm is None


def test_layers_may_say_more_than_their_rule():
    layers = ["causal", {"position": {"kind": "none"}}, {"rule": "causal & window(2)", "ffn": moe()}, {"same_as": 0}]
    config = tiny_config(num_hidden_layers=None, layers=layers)
    first, *others = config.layers
    assert first == "causal()"  # what says nothing else stays a rule
    assert [layer.rule for layer in others] == ["causal()", "causal() & window(2)", "causal()"]
    assert [others[0].position.kind, others[1].ffn.kind, others[2].same_as] == ["none", "moe", 0]
    assert tiny_config(num_hidden_layers=None, layers=[{"rule": "causal"}]).layers == ("causal()",)


def test_an_encoder_takes_from_its_decoder_what_it_leaves_open():
    config = tiny_config(**PAIR, encoder={"num_hidden_layers": 3, "ffn": {"kind": "dense", "intermediate_size": 8}})
    encoder = config.encoder
    assert encoder.layers == ("full()",) * 3
    assert (encoder.hidden_size, encoder.ffn.kind, config.ffn.kind) == (32, "dense", "gated")
    assert config.cross_attention.num_key_value_heads == 2
    assert config.tie_word_embeddings
    assert tiny_config(**PAIR, embedding_multiplier="sqrt").encoder.embedding_multiplier == 32**0.5
    assert not tiny_config(**PAIR, attention=HEADS | {"attention_sinks": True}).cross_attention.attention_sinks


@pytest.mark.parametrize(
    ("family", "head", "rule"),
    [
        ("encoder", "masked_lm", "full()"),
        ("decoder", "language_model", "causal()"),
        ("encoder_decoder", "language_model", "causal()"),
    ],
)
def test_each_family_has_its_usual_head_and_rule(family, head, rule):
    config = tiny_config(family=family)
    assert (config.head.kind, config.layers[0], config.tie_word_embeddings) == (head, rule, True)


@pytest.mark.parametrize(("family", "pooling"), [("encoder", "first"), ("decoder", "last")])
def test_each_family_pools_in_its_usual_way(family, pooling):
    config = tiny_config(family=family, head={"kind": "sequence_classification", "num_labels": 3})
    assert (config.head.pooling, config.tie_word_embeddings) == (pooling, False)


TOGETHER = [
    ({"attention": HEADS | {"qkv_bias": True, "q_bias": False}}, "leave q_bias or qkv_bias out"),
    ({"attention": HEADS | {"qk_norm": {"kind": "layer_norm", "offset": 1}}}, "offset 1 belongs to rms_norm"),
    ({"attention": HEADS | {"qk_norm": {"kind": "head_layer_norm", "over": "projection"}}}, "set over to 'head'"),
    ({"attention": HEADS | {"clip_qkv": 0}}, "clip_qkv is 0, but must be more than 0"),
    ({"attention": LATENT | {"head_dim": 8}}, "head_dim"),
    ({"attention": LATENT | {"qk_rope_head_dim": 5}}, "make it even"),
    ({"attention": LATENT, "position": {"kind": "learned", "max_position_embeddings": 9}}, "rotates its shared key"),
    ({"attention": LATENT, **PAIR}, "give cross_attention its num_attention_heads"),
    ({"family": "encodr"}, "family is 'encodr', but must be 'encoder', 'decoder' or 'encoder_decoder'"),
    ({"family": ["encoder"]}, "family is"),
    ({"encoder": {"num_hidden_layers": 1}}, "encoder belongs to family 'encoder_decoder'"),
    ({"source_vocab_size": 9}, "source_vocab_size belongs to family 'encoder_decoder'"),
    ({"cross_attention": HEADS}, "cross_attention belongs to family 'encoder_decoder'"),
    ({**PAIR, "encoder": {"hidden_sise": 3}}, "encoder has no key 'hidden_sise', did you mean 'hidden_size'"),
    ({**PAIR, "encoder": {"hidden_size": 16}}, "cannot share a token table; give source_vocab_size"),
    ({**PAIR, "norm_placement": "parallel"}, "'parallel' has no place for cross-attention"),
    ({**PAIR, "norm_placement": "parallel_two"}, "'parallel_two' has no place for cross-attention"),
    ({**PAIR, "cross_attention": HEADS | {"attention_sinks": True}}, "cross-attention has no sinks"),
    ({**PAIR, "cross_attention": LATENT}, "cross_attention.kind is 'latent'"),
    ({**PAIR, "head": {"kind": "span"}}, "an encoder_decoder gives tokens"),
    ({"head": {"kind": "masked_lm"}}, "'masked_lm' belongs to an encoder"),
    ({"head": {"kind": "span"}, "tie_word_embeddings": True}, "tie_word_embeddings is about tokens' logits"),
    ({"head": {"kind": "span"}, "head_bias": True}, "head_bias is about tokens' logits"),
    ({"head": {"kind": "span"}, "logit_multiplier": 2.0}, "logit_multiplier is about tokens' logits"),
    ({"head": {"kind": "span"}, "final_logit_softcapping": 2.0}, "final_logit_softcapping is about tokens' logits"),
    ({"head": {"kind": "sequence_classification", "num_labels": 1}}, "num_labels is 1, but must be at least 2"),
    ({"norm_placement": "sandwich", "residual_init": "zero"}, "a norm behind each branch undoes it"),
    ({"norm_placement": "deep", "initializer_range": 0.02}, "'deep' starts from Xavier's scale"),
    ({"num_hidden_layers": None, "layers": ["causal", {"same_as": 1}]}, "must be an earlier layer"),
    ({"num_hidden_layers": None, "layers": ["causal", {"same_as": 0}, {"same_as": 1}]}, "weights of its own"),
    (
        {"num_hidden_layers": None, "layers": ["causal", {"same_as": 0, "rule": "causal & window(2)"}]},
        "make the two agree",
    ),
    ({"num_hidden_layers": None, "layers": ["causal", {"same_as": 0, "ffn": moe()}]}, "make the two agree"),
    (
        {"num_hidden_layers": None, "layers": [{"position": {"kind": "learned", "max_position_embeddings": 3}}]},
        "learned",
    ),
    (
        {"num_hidden_layers": None, "layers": [{"position": {"kind": "none"}}], "position": {"kind": "sinusoidal"}},
        "'sinusoidal' is added on entry, before any layer",
    ),
    ({"position": {"kind": "rope", "rotary_dim": 3}}, "make it even"),
    ({"position": {"kind": "rope", "rotary_dim": 64}}, "rotary_dim is 64, but must be 2 to the 8 features of a head"),
    (
        {
            "position": {
                "kind": "rope",
                "scaling": {
                    "kind": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 9,
                    "high_freq_factor": 1.0,
                },
            }
        },
        "the high one must be larger",
    ),
    (
        {
            "position": {
                "kind": "rope",
                "scaling": {
                    "kind": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                    "original_max_position_embeddings": 8,
                },
            }
        },
        "give attention_factor, or factor",
    ),
    ({"position": {"kind": "rope", "rotary_dim": 65}}, "rotary_dim is 65; make it even"),
    ({"position": {"kind": "rope", "rotary_dim": 66}}, "rotary_dim is 66, but must be 2"),
    (
        {"position": {"kind": "relative_bias", "num_buckets": 3, "bidirectional": True}},
        "num_buckets is 3, but bidirectional",
    ),
    ({"position": {"kind": "relative_bias", "num_buckets": 1}}, "num_buckets is 1, but must be at least 2"),
    ({"position": {"kind": "relative_bias", "max_distance": 8}}, "make it above 16"),
    (
        {"position": {"kind": "learned", "max_position_embeddings": 9}, "max_position_embeddings": 10},
        "has a table for 9",
    ),
    ({"ffn": moe(num_experts_per_tok=5)}, "choose at most all of them"),
    (
        {"ffn": moe(router={"kind": "sigmoid", "groups": {"n_group": 3, "topk_group": 1, "score": "max"}})},
        "equal groups",
    ),
    (
        {
            "ffn": moe(
                num_experts_per_tok=3,
                router={"kind": "sigmoid", "groups": {"n_group": 2, "topk_group": 1, "score": "max"}},
            )
        },
        "cannot give 3 experts",
    ),
    ({"ffn": moe(router={"kind": "top_k_softmax", "norm_topk_prob": True})}, "norm_topk_prob"),
    ({"norm": {"kind": "rms_norm", "offset": 2}}, "norm.offset is 2, but must be 0 or 1"),
    ({"norm": {"kind": "bare_rms_norm", "offset": 1}}, "norm has no key 'offset'"),
    ({"type_vocab_size": 0}, "type_vocab_size is 0"),
    ({"embedding_multiplier": "root"}, "embedding_multiplier"),
    ({"residual_dtype": "float16"}, "residual_dtype is 'float16', but must be 'float32'"),
]


@pytest.mark.parametrize(("changes", "message"), TOGETHER, ids=range(len(TOGETHER)))
def test_words_that_cannot_stand_together_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        tiny_config(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden_size": 3}, "hidden_size"),
        ({"attention": {"num_attention_heads": 4, "qknorm": True}}, "qk_norm"),
        ({"attention": {"num_attention_heads": 5}}, "hidden_size 32 does not divide by 5"),
        ({"attention": {"num_attention_heads": 4, "num_key_value_heads": 3}}, "4 query heads cannot share 3"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"layers": ["causal", "causl"], "num_hidden_layers": None}, "no rule 'causl'"),
        ({"layers": ["causal"], "num_hidden_layers": 2}, "layers lists 1"),
        ({"num_hidden_layers": 0}, "from 1 to"),
        ({"num_hidden_layers": True}, "from 1 to"),
        ({"num_hidden_layers": 10**12}, "from 1 to"),
        ({"norm_placement": "post", "residual_init": "zero"}, "belong to 'pre'"),
        ({"norm_placement": "middle"}, "pre"),
        ({"attention": {"num_attention_heads": 4, "head_dim": 7}}, "make it even"),
        ({"ffn": {"kind": "gatd", "intermediate_size": 8}}, "gated"),
        ({"position": {"kind": "rope", "rope_theta": float("nan")}}, "rope_theta"),
        ({"dropout": {"residual": 1.0}}, "residual"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
    ],
)
def test_wrong_values_are_named_with_the_way_out(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        tiny_config(**changes)
    assert "\n" not in str(caught.value)


def test_configs_are_frozen():
    config = tiny_config()
    with pytest.raises((ConfigError, ValueError), match="frozen"):
        config.hidden_size = 3


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32', but must be a whole number: it is text, write 32 without quotes"),
        ({"hidden_size": True}, "hidden_size is true, but must be a whole number"),
        ({"hidden_size": -4}, "hidden_size is -4, but must be at least 1"),
        (
            {"hidden_size": "032"},
            "hidden_size is '032', but must be a whole number: a number that begins with 0 is text in YAML 1.2, write "
            "32, or 0o32 where it is octal",
        ),
        ({"hidden_size": 0, "family": "encoder_decoder"}, "hidden_size is 0, but must be at least 1"),
        (
            {"attention": {"num_attention_heads": 0}, "family": "encoder_decoder"},
            "attention.num_attention_heads is 0, but must be at least 1",
        ),
        ({"attention": {}}, "attention.num_attention_heads is missing"),
        (
            {"attention": {"heads": 4}},
            "attention.num_attention_heads is missing; attention has no key 'heads', did you mean "
            "'num_attention_heads'?",
        ),
        ({"rule": 3}, "rule is 3, but must be text such as 'causal & (window(256) | sinks(4))'"),
        (
            {"layers": ["causal", {"rule": "causal", "same_as": -1}], "num_hidden_layers": None},
            "layers.1.same_as is -1, but must be at least 0",
        ),
        ({"position": "rop"}, "position is 'rop', but must be a mapping: write {kind: rope}"),
        ({"norm": "layernorm"}, "norm is 'layernorm', but must be a mapping: write {kind: layer_norm}"),
        (
            {"head": "xyz"},
            "head is 'xyz', but must be a mapping with kind: choose 'language_model', 'masked_lm', "
            "'sequence_classification', 'token_classification', 'span', 'regression' or 'sentence_embedding'",
        ),
        (
            {"dropout": 0.1},
            "dropout is 0.1, but must be a mapping with keys such as embedding, attention, residual, ffn",
        ),
        ({"embedding_multiplier": "sqr"}, "embedding_multiplier is 'sqr', but must be a number above 0, or 'sqrt'"),
        ({"hidden_size": None, "embedding_multiplier": "sqrt"}, "hidden_size is missing"),
        ({"norm": {"kind": "layer_norm", "offset": 1}}, "norm has no key 'offset', it belongs to kind 'rms_norm'"),
        (
            {"head": {"kind": "span", "pooling": "mean"}},
            "head has no key 'pooling', it belongs to kind 'sequence_classification', 'regression' or "
            "'sentence_embedding'",
        ),
        (
            {"family": "encoder_decoder", "encoder": {"vocab_size": 9}},
            "encoder has no key 'vocab_size', did you mean 'type_vocab_size'?",
        ),
        (
            {"family": "encoder_decoder", "encoder": {"head": {"kind": "span"}}},
            "encoder has no key 'head', it belongs outside encoder, as 'head'",
        ),
    ],
)
def test_one_mistake_is_one_complaint(changes, whole):
    """What follows from it is not said as well."""
    with pytest.raises(ConfigError) as caught:
        tiny_config(**changes)
    assert str(caught.value) == whole


def test_mistakes_of_ones_own_are_all_told():
    with pytest.raises(ConfigError) as caught:
        tiny_config(
            family="encoder_decoder",
            hidden_size="32",
            encoder={"hidden_size": 3.5},
            norm={"kind": "rms_norm", "eps": 0},
        )
    said = str(caught.value)
    assert [part.split(" is ")[0] for part in said.split("; ")] == ["hidden_size", "norm.eps", "encoder.hidden_size"]
