"""Configs drawn at random: family × attention × positions × norm × placement × ffn × rules by layer × head."""

from typing import Any

from hypothesis import strategies as st

from helpers.tiny import VOCABULARY

ACTIVATIONS = ["gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "sigmoid", "silu"]
SEEING_BACK = [
    "causal",
    "causal & window(1)",
    "causal & window(3)",
    "causal & chunk(4)",
    "causal & (window(2) | sinks(1))",
    "causal & (chunk(3) | window(2))",
]
SEEING_ALL = ["full", "window(3)", "window(2) & lookahead(1)", "chunk(4)", "causal", "window(3) | sinks(2)"]
SCALE = st.sampled_from([0.1, 0.5, 1.0])
SOME = st.sampled_from([{}, {"mscale": 0.7, "mscale_all_dim": 1.0}])
maybe = st.booleans()


@st.composite
def configs(draw: Any) -> dict[str, Any]:
    """Words for a :class:`ModelConfig` that fit each other, of a size that computes in milliseconds."""
    family = draw(st.sampled_from(["decoder", "decoder", "encoder", "encoder_decoder"]))
    latent = draw(st.integers(0, 3)) == 0
    attention = draw(latents() if latent else grouped())
    words: dict[str, Any] = {
        "family": family,
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "attention": attention,
        "ffn": draw(ffns()),
        "norm": draw(norms()),
        "position": draw(ropes(attention) if latent else positions(attention)),
        "residual_multiplier": draw(st.sampled_from([1.0, 0.3])),
        "embedding_multiplier": draw(st.sampled_from([1.0, "sqrt", 3.0])),
        "embedding_norm": draw(maybe),
        "tie_word_embeddings": False,
    }
    placements = ["pre", "post", "deep", "sandwich", "reordered", "parallel", "parallel_two"]
    words["norm_placement"] = draw(st.sampled_from(placements[:5] if family == "encoder_decoder" else placements))
    words["layers"] = draw(layers(SEEING_ALL if family == "encoder" else SEEING_BACK, words))
    if family == "encoder_decoder":
        words["cross_attention"] = draw(grouped(sinks=False))
        words["encoder"] = {"layers": draw(layers(SEEING_ALL, words))}
    words |= draw(heads(family))
    return words


@st.composite
def grouped(draw: Any, sinks: bool = True) -> dict[str, Any]:
    num_kv_heads = draw(st.sampled_from([1, 2]))
    words: dict[str, Any] = {
        "num_attention_heads": num_kv_heads * draw(st.sampled_from([1, 2])),
        "num_key_value_heads": num_kv_heads,
        "head_dim": 8,
        **{f"{name}_bias": draw(maybe) for name in ("q", "k", "v", "o")},
        "scale": draw(st.none() | SCALE),
        "clip_qkv": draw(st.sampled_from([None, None, 0.7])),
        "attn_logit_softcapping": draw(st.sampled_from([None, None, 2.0])),
        "attention_sinks": sinks and draw(st.integers(0, 3)) == 0,
    }
    kind = draw(st.sampled_from([None, "rms_norm", "layer_norm", "head_layer_norm", "bare_rms_norm", "l2_norm"]))
    if kind is not None:
        over = "head" if kind == "head_layer_norm" else draw(st.sampled_from(["head", "projection"]))
        words["qk_norm"] = {"kind": kind, "over": over, "after_positions": draw(maybe)}
    return words


@st.composite
def latents(draw: Any) -> dict[str, Any]:
    return {
        "kind": "latent",
        "num_attention_heads": draw(st.sampled_from([1, 2])),
        "q_lora_rank": draw(st.sampled_from([None, 6])),
        "kv_lora_rank": draw(st.sampled_from([4, 9])),
        "qk_nope_head_dim": draw(st.sampled_from([3, 6])),
        "qk_rope_head_dim": 8,
        "v_head_dim": draw(st.sampled_from([3, 8])),
        "scale": draw(st.none() | SCALE),
    }


@st.composite
def ffns(draw: Any, experts: bool = True) -> dict[str, Any]:
    kind = draw(st.sampled_from(["dense", "gated", "clamped_gated", *(["moe", "moe"] if experts else [])]))
    if kind != "moe":
        words: dict[str, Any] = {"kind": kind, "intermediate_size": draw(st.sampled_from([5, 12])), "bias": draw(maybe)}
        return words if kind == "clamped_gated" else words | {"activation": draw(st.sampled_from(ACTIVATIONS))}
    kind = draw(st.sampled_from(["softmax", "top_k_softmax", "sigmoid"]))
    router: dict[str, Any] = {
        "kind": kind,
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "bias": draw(maybe),
    }
    if kind != "top_k_softmax":
        router["norm_topk_prob"] = draw(maybe)
    if draw(maybe):
        router["groups"] = {
            "n_group": 2,
            "topk_group": draw(st.sampled_from([1, 2])),
            "score": draw(st.sampled_from(["max", "top2"])),
        }
    words = {
        "kind": "moe",
        "num_experts": 4,
        "num_experts_per_tok": draw(st.sampled_from([1, 2])),
        "expert": draw(ffns(experts=False)),
        "router": router,
        "apply_weight_on_input": draw(st.booleans()),
    }
    if draw(maybe):
        words["shared"] = {"intermediate_size": 6, "gated": draw(maybe)}
    return words


@st.composite
def norms(draw: Any) -> dict[str, Any]:
    kind = draw(st.sampled_from(["rms_norm", "layer_norm", "bare_rms_norm", "bare_layer_norm"]))
    words = {"kind": kind, "eps": draw(st.sampled_from([1e-6, 1e-3]))}
    if kind == "rms_norm":
        words["offset"] = draw(st.sampled_from([0, 1]))
    if kind == "layer_norm":
        words["bias"] = draw(maybe)
    return words


@st.composite
def ropes(draw: Any, attention: dict[str, Any]) -> dict[str, Any]:
    words: dict[str, Any] = {
        "kind": "rope",
        "rope_theta": draw(st.sampled_from([50.0, 10000.0])),
        "interleaved": draw(st.booleans()),
        "rotary_dim": draw(st.sampled_from([None, None, 4])),
    }
    pairs = 4 if words["rotary_dim"] is None else 2
    scaling = {
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0, "original_max_position_embeddings": 5},
        "llama3": {"factor": 4.0, "original_max_position_embeddings": 6},
        "yarn": {
            "factor": 4.0,
            "original_max_position_embeddings": 6,
            "truncate": draw(maybe),
            **draw(st.sampled_from([{}, {"mscale": 0.7, "mscale_all_dim": 1.0}])),
        },
        "longrope": {
            "short_factor": [1.0] * pairs,
            "long_factor": [1.5] * pairs,
            "original_max_position_embeddings": 5,
            "factor": 4.0,
        },
        "proportional": {"partial_rotary_factor": 0.5},
    }
    kind = draw(st.sampled_from([None, None, *scaling]))
    if kind is not None:
        words["scaling"] = {"kind": kind, **scaling[kind]}
    return words


def positions(attention: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    length = {"max_position_embeddings": st.just(24), "offset": st.sampled_from([0, 2])}
    buckets = {"num_buckets": st.sampled_from([4, 8]), "max_distance": st.just(9), "shared": maybe}
    layouts = {"layout": st.sampled_from(["interleaved", "half", "tensor2tensor"]), "offset": st.sampled_from([0, 2])}
    return st.one_of(
        ropes(attention),
        ropes(attention),
        st.fixed_dictionaries({"kind": st.just("learned"), **length}),
        st.fixed_dictionaries({"kind": st.just("sinusoidal"), **layouts}),
        st.fixed_dictionaries({"kind": st.just("relative_bias"), **buckets}),
        st.just({"kind": "alibi"}),
        st.just({"kind": "none"}),
    )


@st.composite
def layers(draw: Any, rules: list[str], words: dict[str, Any]) -> list[Any]:
    """Two or three layers, some of which say more than their rule."""
    on_entry = words["position"]["kind"] in ("learned", "sinusoidal")
    found: list[Any] = []
    for number in range(draw(st.sampled_from([1, 2, 3]))):
        layer: dict[str, Any] = {"rule": draw(st.sampled_from(rules))}
        what = draw(st.sampled_from(["nothing", "nothing", "position", "ffn", "same_as"]))
        if what == "position" and not on_entry:
            latent = words["attention"].get("kind") == "latent"
            layer["position"] = draw(ropes(words["attention"]) if latent else st.just({"kind": "none"}) | ropes({}))
        elif what == "ffn":
            layer["ffn"] = draw(ffns())
        elif what == "same_as" and number:
            layer = {**found[0], "same_as": 0}
        found.append(layer)
    return found


@st.composite
def heads(draw: Any, family: str) -> dict[str, Any]:
    tokens = {
        "tie_word_embeddings": draw(maybe),
        "head_bias": draw(maybe),
        "logit_multiplier": draw(st.sampled_from([1.0, 0.25])),
        "final_logit_softcapping": draw(st.sampled_from([None, 5.0])),
    }
    kinds = ["tokens", "tokens", "classes", "marks", "span", "numbers", "vectors"]
    match draw(st.sampled_from(kinds[:1] if family == "encoder_decoder" else kinds)):
        case "classes":
            pooling = draw(st.sampled_from(["first", "mean", "last"]))
            pooler = draw(st.sampled_from(["none", "tanh", "gelu", "relu"]))
            return {"head": {"kind": "sequence_classification", "num_labels": 3, "pooling": pooling, "pooler": pooler}}
        case "marks":
            return {"head": {"kind": "token_classification", "num_labels": 5}}
        case "span":
            return {"head": {"kind": "span"}}
        case "numbers":
            return {
                "head": {"kind": "regression", "num_outputs": 2, "pooling": draw(st.sampled_from(["mean", "last"]))}
            }
        case "vectors":
            return {"head": {"kind": "sentence_embedding", "projection_dim": draw(st.sampled_from([None, 6]))}}
    if family == "encoder":
        tokens["head"] = {"kind": draw(st.sampled_from(["masked_lm", "language_model"]))}
    return tokens | {"embedding_size": draw(st.sampled_from([None, 10]))}
