"""Who may see whom in a transformers model, read off its config, one rule a layer.

What a config states in words that are known here is *declared*: the model has to see exactly that. Where it does not
(recurrent, sparse or unknown layers), only the certain half is assumed: a causal class must not see the future, and
seeing less is no fault.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pellucid.probe import Visibility
from pellucid.visibility import Rule, causal, chunk, full, lookahead, window

Kind = Literal["causal", "masked", "seq2seq"]

_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_ENCODER_COUNTS = ("encoder_layers", "num_encoder_layers")
_DECODER_COUNTS = ("decoder_layers", "num_decoder_layers")


@dataclass(frozen=True)
class DeclaredRules:
    """The rules of a model's layers, and whether its config states them (else they are assumed)."""

    rules: tuple[Rule, ...]
    rules_declared: bool = True


def rules_of(config: Any, kind: Kind) -> DeclaredRules:
    """The rules of the layers that the logits come from: the whole model, or the decoder of a seq2seq one."""
    if kind == "seq2seq":
        part = _config_part(config, "decoder")
        return _layers(part, _count(part, _DECODER_COUNTS + _COUNTS), both_ways=False)
    text = text_config(config)
    return _layers(text, _count(text, _COUNTS + _DECODER_COUNTS), both_ways=kind == "masked" or _is_bidirectional(text))


def source_rules_of(config: Any) -> DeclaredRules:
    """The rules of a seq2seq model's encoder."""
    part = _config_part(config, "encoder")
    return _layers(part, _count(part, _ENCODER_COUNTS + _COUNTS), both_ways=True)


def forbidden_tokens(config: Any) -> frozenset[int]:
    """Ids that mean something to the library: pads, ends, masks, image marks."""
    given: set[int] = set()
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        for key, value in vars(part).items():
            if key.endswith(("_token_id", "_token_ids", "_token_index", "_token_idx")) or key == "pad_index":
                given.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(value for value in given if isinstance(value, int) and value >= 0)


def only_rotates(config: Any) -> bool:
    """Whether nothing but differences of positions matters: plain rotary angles."""
    text = text_config(config)
    rope = _get(text, "rope_parameters")
    if not isinstance(rope, dict) or not rope:
        return False
    if any("expert" in name and type(value) is int and value > 1 for name, value in vars(text).items()):
        return False  # a router turns rounding into another choice
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    kinds = {part.get("rope_type", "default") for part in parts}
    other = ("attn_temperature_tuning", "attention_chunk_size", "llama_4_scaling_beta", "position_embedding_type")
    scaled = any("llama_4_scaling_beta" in part for part in parts) or any(_get(text, name) for name in other)
    return kinds <= {"default", "linear", "llama3", "yarn"} and not scaled


@cache
def families() -> dict[str, Any]:
    """What configs do not say by themselves, by model type: ``hf_families.json``."""
    return dict(json.loads(Path(__file__).with_name("hf_families.json").read_text(encoding="utf-8")))


def padded_right(config: Any) -> bool:
    """Whether the library's documentation says of this type that it is padded on the right."""
    return _get(config, "model_type", "") in families()["padded_on_the_right"]


def looks_back(rules: Sequence[Visibility]) -> bool:
    """Whether every layer is causal: such models are generated with, for which rows are padded on the left."""
    return all(rule.lookahead == 0 for rule in rules)


def text_config(config: Any) -> Any:
    """The part of a config that is about text."""
    found = _get(config, "text_config")
    return config if found is None else found


def _get(config: Any, name: str, default: Any = None) -> Any:
    """An attribute; some configs raise where layers differ in it."""
    try:
        return getattr(config, name, default)
    except Exception:  # noqa: BLE001 (anybody's config)
        return default


def _config_part(config: Any, name: str) -> Any:
    """The encoder's or decoder's own config, where it has one."""
    found = _get(config, name)
    return text_config(found) if hasattr(found, "to_dict") else text_config(config)


def _count(config: Any, names: tuple[str, ...]) -> int:
    for name in names:
        value = _get(config, name)
        if isinstance(value, int) and value > 0:
            return value
    return 1


def _is_bidirectional(config: Any) -> bool:
    """Whether a class of the causal family is configured to see both ways."""
    if _get(config, "use_bidirectional_attention") in (True, "all") or _get(config, "attn_type") == "bi":
        return True
    if _get(config, "is_causal", True) is False or _get(config, "causal") is False:
        return True
    # is_decoder=False means *both ways* only to encoders that can be turned into decoders
    encoder = hasattr(config, "is_decoder") and _get(config, "model_type", "") not in families()["always_causal"]
    return encoder and not config.is_decoder


def _layers(config: Any, count: int, both_ways: bool) -> DeclaredRules:
    listed = _listed_rules(config, count, both_ways)
    if listed is not None:
        return listed
    kinds = _get(config, "layer_types")
    if isinstance(kinds, list | tuple) and len(kinds) >= count:
        made = [_rule_of_kind(config, str(kind), layer, both_ways) for layer, kind in enumerate(kinds[:count])]
        return DeclaredRules(tuple(rule for rule, _ in made), all(known for _, known in made))
    size = _get(config, "sliding_window")
    if not isinstance(size, int) or size < 1 or _get(config, "use_sliding_window", True) is False:
        known = not any(hasattr(config, name) for name in families()["words_of_other_layers"])
        return DeclaredRules((full() if both_ways else causal(),) * count, known)
    first = _get(config, "max_window_layers", 0) if hasattr(config, "use_sliding_window") else 0
    near = _window_rule(config, size, both_ways)
    far = full() if both_ways else causal()
    return DeclaredRules(tuple(near if layer >= first else far for layer in range(count)))


def _rule_of_kind(config: Any, kind: str, layer: int, both_ways: bool) -> tuple[Rule, bool]:
    far = full() if both_ways else causal()
    if kind == "full_attention":
        return far, not any(hasattr(config, name) for name in ("index_topk", "indexer_types"))
    if kind == "sliding_attention":
        size = _window_of(config, layer)
        return (far, False) if size is None else (_window_rule(config, size, both_ways), True)
    if kind == "chunked_attention":
        size = _get(config, "attention_chunk_size")
        return (far, False) if not isinstance(size, int) or both_ways else (causal() & chunk(size), True)
    return far, False


def _window_of(config: Any, layer: int) -> int | None:
    own = _get(config, "per_layer_config")
    if own is not None:
        try:
            config = own[layer]
        except (KeyError, IndexError, TypeError):
            return None
    size = _get(config, "sliding_window")
    return size if isinstance(size, int) and size > 0 else None


def _window_rule(config: Any, size: int, both_ways: bool) -> Rule:
    """A window of ``size``. Both ways its meaning varies from family to family; three are known."""
    if not both_ways:
        return causal() & window(size)
    if _get(config, "use_bidirectional_attention") in (True, "all"):
        return window(size) & lookahead(size - 1)  # |query - key| < size
    if str(_get(config, "model_type", "")).startswith("t5gemma"):
        return window((size + 1) // 2) & lookahead(size // 2)
    return window(size + 1) & lookahead(size)  # |query - key| <= size


def _listed_rules(config: Any, count: int, both_ways: bool) -> DeclaredRules | None:
    """Families that list their layers under other words."""
    kinds = _get(config, "attention_layers")
    if isinstance(kinds, list) and len(kinds) == count and hasattr(config, "window_size"):
        local = causal() & window(config.window_size)
        return DeclaredRules(tuple(local if kind == "local" else causal() for kind in kinds))
    sizes = _get(config, "attention_window")
    if sizes is not None and both_ways:
        listed = [sizes] * count if isinstance(sizes, int) else list(sizes)
        if len(listed) >= count:
            return DeclaredRules(tuple(window(w // 2 + 1) & lookahead(w // 2) for w in listed[:count]))
    return None
