"""Short forms of a model's config, written out: what is left out is filled in, so that a stored config is complete."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pellucid.configfile import read_mapping
from pellucid.configfile.yaml import yaml_repr
from pellucid.errors import ConfigError
from pellucid.messages import nearest
from pellucid.visibility import parse
from pellucid.visibility.primitives import EXAMPLE

MOST_LAYERS = 4096
PRESETS = Path(__file__).parent / "presets"
"""One YAML file a preset."""

_RULES = {"encoder": "full()", "decoder": "causal()", "encoder_decoder": "causal()"}
_HEADS = {"encoder": "masked_lm", "decoder": "language_model", "encoder_decoder": "language_model"}
_OF_A_STACK = (
    "hidden_size", "attention", "ffn", "norm", "norm_placement", "residual_multiplier", "residual_dtype",
    "embedding_multiplier", "embedding_norm", "max_position_embeddings", "dropout", "initializer_range",
    "residual_init",
)  # fmt: skip
"""What an encoder takes from its decoder unless it is given; its position too, made bidirectional."""


def normalize(data: dict[str, Any]) -> dict[str, Any]:
    """A model's config with every short form written out; what is wrong in other ways is left for later checks."""
    if "preset" in data:
        data = _from_preset(data)
    family = data.get("family", "decoder")
    if not isinstance(family, str) or family not in _RULES:
        raise ValueError(f"family is {yaml_repr(family)}, but must be 'encoder', 'decoder' or 'encoder_decoder'")
    for name in ("encoder", "source_vocab_size", "cross_attention"):
        if family != "encoder_decoder" and data.get(name) is not None:
            raise ValueError(f"{name} belongs to family 'encoder_decoder', but family is {family!r}; leave it out")
    given_layers, multiplier = data.get("num_hidden_layers"), data.get("embedding_multiplier")
    data = _stack(data, _RULES[family], two_way=family == "encoder")
    data["head"] = _head(data.get("head"), family)
    data.setdefault("tie_word_embeddings", _kind(data["head"]) in ("language_model", "masked_lm"))
    if family == "encoder_decoder":
        data["encoder"] = _encoder(data, given_layers, by_root=multiplier == "sqrt")
        if data.get("cross_attention") is None and _kind(data.get("attention")) == "grouped":
            data["cross_attention"] = _cross(data["attention"])
        elif isinstance(data.get("cross_attention"), Mapping):
            data["cross_attention"] = _attention(dict(data["cross_attention"]), data)
    return data


def preset_names() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.yaml")))


def known_preset(name: object) -> str:
    """``name``, if there is such a preset.

    Raises:
        ConfigError: there is none.
    """
    known = preset_names()
    if name in known:
        return str(name)
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
    raise ConfigError(f"there is no preset {yaml_repr(name)}; {hint}")


def _from_preset(data: dict[str, Any]) -> dict[str, Any]:
    try:
        return _with_preset(data["preset"], {key: value for key, value in data.items() if key != "preset"})
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _with_preset(name: object, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's mapping, short forms and all, overridden by ``changes``.

    A mapping overrides a mapping key by key, unless it has another ``kind``; anything else replaces what was there.
    ``layers`` replaces ``num_hidden_layers`` and ``rule``; of a preset that lists its layers, ``num_hidden_layers``
    takes the first ones.
    """
    mapping = read_mapping(PRESETS / f"{known_preset(name)}.yaml")
    if "layers" in changes:
        mapping = {key: value for key, value in mapping.items() if key not in ("num_hidden_layers", "rule")}
    count = changes.get("num_hidden_layers")
    if "layers" in mapping and "layers" not in changes and type(count) is int and 0 < count <= len(mapping["layers"]):
        mapping = {**mapping, "layers": mapping["layers"][:count]}
    merged = _merged(mapping, changes)
    assert isinstance(merged, dict)
    return merged


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    if "kind" in above and above["kind"] != below.get("kind", "grouped"):  # only attention may leave its kind out
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def _stack(data: dict[str, Any], rule: str, *, two_way: bool) -> dict[str, Any]:
    data = _layers(data, rule, two_way)
    data["position"] = _position(data.get("position", {"kind": "rope"}), two_way)
    if isinstance(data.get("attention"), Mapping):
        data["attention"] = _attention(dict(data["attention"]), data)
    size = data.get("hidden_size")
    # a size that is none is an error of its own
    size = size if size is not None and _counts(size) else 1
    for name, word, resolve_checkpoint_path in (
        ("embedding_multiplier", "sqrt", math.sqrt(size)),
        ("logit_multiplier", "rsqrt", size**-0.5),
    ):
        given = data.get(name)
        if given == word:
            data[name] = resolve_checkpoint_path
        elif isinstance(given, str):
            raise ValueError(f"{name} is {yaml_repr(given)}, but must be a number above 0, or {word!r}")
    return data


def _counts(value: Any) -> bool:
    return type(value) is int and 0 < value <= 1 << 24


def _encoder(decoder: dict[str, Any], layers: Any, *, by_root: bool) -> Any:
    own = decoder.get("encoder")
    if own is not None and not isinstance(own, Mapping):
        return own
    own = dict(own or {})
    data = {name: decoder[name] for name in _OF_A_STACK if name in decoder} | own
    if "position" not in own:
        position = decoder["position"]
        if _kind(position) == "relative_bias":
            position = dict(position) | {"bidirectional": True}
        data["position"] = position
    if "layers" not in own and "num_hidden_layers" not in own:
        data["num_hidden_layers"] = layers if layers is not None else len(decoder.get("layers") or ())
    if by_root and "embedding_multiplier" not in own:
        data["embedding_multiplier"] = "sqrt"  # of its own size
    return _stack(data, "full()", two_way=True)


def _layers(data: dict[str, Any], usual: str, two_way: bool) -> dict[str, Any]:
    count, rule = data.pop("num_hidden_layers", None), data.pop("rule", None)
    layers = data.get("layers")
    if rule is not None and not isinstance(rule, str):
        raise ValueError(f"rule is {yaml_repr(rule)}, but must be text such as {EXAMPLE!r}")
    if layers is None and count is not None:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_LAYERS:
            raise ValueError(
                f"num_hidden_layers is {yaml_repr(count)}, but a whole number from 1 to {MOST_LAYERS} is needed"
            )
        layers = data["layers"] = [rule if rule is not None else usual] * count
    elif layers is not None:
        if rule is not None:
            raise ValueError("layers lists a rule for each layer already; leave rule out")
        if isinstance(layers, list | tuple) and count is not None and count != len(layers):
            raise ValueError(
                f"num_hidden_layers is {yaml_repr(count)}, but layers lists {len(layers)} rules; make them agree"
            )
    if isinstance(layers, list | tuple):
        data["layers"] = tuple(_layer(layer, usual, two_way) for layer in layers)
    return data


def _layer(layer: Any, usual: str, two_way: bool) -> Any:
    """One entry, its rule in canonical form; a mapping with nothing else becomes its rule."""
    if isinstance(layer, str):
        return _canonical(layer)
    if not isinstance(layer, Mapping):
        return layer
    layer = {"rule": usual, **layer}
    if isinstance(layer["rule"], str):
        layer["rule"] = _canonical(layer["rule"])
    if layer.get("position") is not None:
        layer["position"] = _position(layer["position"], two_way)
    given = {key for key, value in layer.items() if value is not None}
    return layer["rule"] if given == {"rule"} else layer


def _canonical(text: str) -> str:
    try:
        return parse(text).describe()
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _kind(part: Any) -> Any:
    return part.get("kind") if isinstance(part, Mapping) else getattr(part, "kind", None)


def _position(position: Any, two_way: bool) -> Any:
    if isinstance(position, Mapping) and position.get("kind") == "relative_bias":
        return {"bidirectional": two_way, **position}
    return position


def _head(head: Any, family: str) -> Any:
    if head is None:
        return {"kind": _HEADS[family]}
    if not isinstance(head, Mapping):
        return head
    if head.get("kind") in ("sequence_classification", "regression"):
        return {"pooling": "first" if family == "encoder" else "last", **head}
    return head


def _cross(attention: Any) -> dict[str, Any]:
    """Cross-attention like the self-attention, without what only that has."""
    given = attention if isinstance(attention, Mapping) else attention.model_dump()
    return {name: value for name, value in given.items() if name != "attention_sinks"}


def _attention(attention: dict[str, Any], stack: Mapping[str, Any]) -> dict[str, Any]:
    attention = {"kind": "grouped", **attention}
    if attention["kind"] != "grouped":
        return attention
    if (bias := attention.pop("qkv_bias", None)) is not None:
        for name in ("q_bias", "k_bias", "v_bias"):
            if name in attention:
                raise ValueError(f"qkv_bias is short for q_bias, k_bias and v_bias; leave {name} or qkv_bias out")
            attention[name] = bias
    if isinstance(wanted := attention.get("qk_norm"), bool):
        norm = stack.get("norm")
        eps = {"eps": norm["eps"]} if isinstance(norm, Mapping) and "eps" in norm else {}
        attention["qk_norm"] = {"kind": "rms_norm", **eps} if wanted else None
    return _heads(attention, stack.get("hidden_size"))


def _heads(attention: dict[str, Any], size: Any) -> dict[str, Any]:
    """What follows from the number of heads; from one that is wrong or missing, which is an error of its own, follows
    nothing that could be a second one."""
    heads = attention.get("num_attention_heads")
    if attention.get("num_key_value_heads") is None:
        attention["num_key_value_heads"] = heads if _counts(heads) else 1
    if attention.get("head_dim") is None and not (_counts(heads) and _counts(size)):
        attention["head_dim"] = 2
    elif attention.get("head_dim") is None:
        if size % heads:
            raise ValueError(
                f"hidden_size {size} does not divide by {heads} attention heads; choose a multiple, or give "
                "attention.head_dim"
            )
        attention["head_dim"] = size // heads
    return attention
