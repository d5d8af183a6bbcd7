"""Every field of a model's config, and other values for it: found in the types, so that no new word is left out."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pellucid.configfile import Config
from pellucid.errors import ConfigError
from pellucid.models import ModelConfig
from pellucid.models.config import LayerConfig, TransformerConfig

RULES = ["causal & window(2)", "causal & (window(2) | sinks(2))", "causal & chunk(3)", "lookahead(1)", "full"]
SAMPLES: dict[str, Any] = {
    "max_position_embeddings": 32, "intermediate_size": 24, "bidirectional": False, "factor": 3.0, "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0], "num_labels": 3, "pooling": "mean", "n_group": 2, "topk_group": 1,
    "score": "max", "num_experts": 4, "num_experts_per_tok": 1, "expert": {"kind": "gated", "intermediate_size": 24},
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 4, "rope_theta": 77.0,
}  # fmt: skip
"""Values for what a part needs where nothing says it."""


class Change(NamedTuple):
    """Another value for one field: ``word`` is its class and name, ``path`` where it is in the data."""

    word: str
    path: tuple[str | int, ...]
    value: Any


def members(annotation: Any) -> list[Any]:
    """The types that a field may have."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return [m for part in get_args(annotation) for m in members(part)]
    return [annotation]


def parts_in(annotation: Any) -> list[type[Config]]:
    """The parts of a config that a field may be."""
    found = members(annotation)
    inside = [m for kind in found if get_origin(kind) is tuple for part in get_args(kind) for m in members(part)]
    return [kind for kind in (*found, *inside) if isinstance(kind, type) and issubclass(kind, Config)]


def words_of(part: type[Config], seen: set[type[Config]] | None = None) -> set[str]:
    """``Class.field`` for every field of ``part`` and of the parts inside it."""
    seen = set() if seen is None else seen
    if part in seen:
        return set()
    seen.add(part)
    found = {f"{part.__name__}.{name}" for name in part.model_fields}
    for field in part.model_fields.values():
        for inner in parts_in(field.annotation):
            found |= words_of(inner, seen)
    return found


def kind_of(part: type[Config]) -> str | None:
    """What tells ``part`` from others of its union; a kind that can be several is a field like any other."""
    field = part.model_fields.get("kind")
    return None if field is None or len(get_args(field.annotation)) != 1 else field.default


def others(annotation: Any, value: Any) -> list[Any]:
    """Other values that a field might have."""
    kinds = members(annotation)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    none = [None] if value is not None and type(None) in kinds else []
    if choices:
        return [choice for choice in choices if choice != value] + none
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value // 2, value + 1, *none]
    if isinstance(value, float):
        return [*([value * 2, value / 2] if value else [0.25]), *none]
    if isinstance(value, list):
        return [[*value[:at], number * 1.5, *value[at + 1 :]] for at, number in enumerate(value)] + none
    if value is None:
        return [*([0.3] if float in kinds else []), *([2, 1, 30] if int in kinds else [])]
    return none


def made(part: type[Config], said: dict[str, Any]) -> dict[str, Any]:
    """``part`` with what ``said`` says, or a sample where it has to be said."""
    values = {name: said.get(name, SAMPLES.get(name)) for name in part.model_fields if name != "kind"}
    needed = {name for name, field in part.model_fields.items() if field.is_required()}
    kept = {
        name: value
        for name, value in values.items()
        if value is not None and (name in said or name in needed or name == "rope_theta")
    }
    return kept | ({} if kind_of(part) is None else {"kind": kind_of(part)})


def changes(part: type[Config], value: dict[str, Any], path: tuple[str | int, ...] = ()) -> Iterator[Change]:
    """Other values for every field that ``value`` has, and for those of the parts inside it."""
    for name, field in part.model_fields.items():
        here, place, word = value[name], (*path, name), f"{part.__name__}.{name}"
        inner = parts_in(field.annotation)
        if name == "layers":
            yield from _of_layers(part, here, place)
        elif name == "rule":
            yield from (Change(word, place, rule) for rule in RULES)
        elif isinstance(here, dict):
            (member,) = [m for m in inner if len(inner) == 1 or kind_of(m) == here["kind"]]
            yield from changes(member, here, place)
            for other in inner:
                if other is not member:
                    yield Change(word, place, made(other, here))
                    yield Change(f"{member.__name__}.kind", place, made(other, here))
            yield from (Change(word, place, other) for other in others(field.annotation, here))
        elif name != "kind" or kind_of(part) is None:
            yield from (Change(word, place, other) for other in others(field.annotation, here))
            yield from (Change(word, place, made(other, {})) for other in inner if here is None)


def _of_layers(part: type[Config], layers: list[Any], path: tuple[str | int, ...]) -> Iterator[Change]:
    word = f"{part.__name__}.layers"
    yield Change(word, path, layers[:-1])
    for index, layer in enumerate(layers):
        if isinstance(layer, dict):
            yield from changes(LayerConfig, layer, (*path, index))
        else:
            yield from (Change(word, (*path, index), rule) for rule in RULES)
            bare = dict.fromkeys(LayerConfig.model_fields) | {"rule": layer}
            for change in changes(LayerConfig, bare):
                if change.word != "LayerConfig.rule":
                    yield Change(change.word, (*path, index), bare | {change.path[0]: change.value})


def changed(config: ModelConfig, change: Change) -> ModelConfig | None:
    """``config`` with that value; None where nobody could say so, or it says the same."""
    data = copy.deepcopy(config.model_dump(mode="json"))
    place: Any = data
    for key in change.path[:-1]:
        place = place[key]
    place[change.path[-1]] = change.value
    try:
        found = ModelConfig.from_mapping(data)
    except ConfigError:
        return None
    return None if _filled_in(found) == _filled_in(config) else found


def _filled_in(config: ModelConfig) -> dict[str, Any]:
    """What each layer has, whether it or its stack says so."""
    data = config.model_dump(mode="json")
    for stack, said in ((config, data), (config.encoder, data["encoder"])):
        if stack is not None:
            said["layers"] = [
                (layer.rule, layer.same_as, layer.position or stack.position, layer.ffn or stack.ffn)
                for layer in stack.each_layer
            ]
    return data


def alike(config: ModelConfig, change: Change) -> str:
    """Why another value gives the same outputs as the one that ``config`` has; nothing where it does not."""
    data = config.model_dump(mode="json")
    stack = data["encoder"] if change.path[0] == "encoder" else data
    part: Any = data
    for key in change.path[:-1]:
        part = part[key]
    name, old, new = change.path[-1], part[change.path[-1]], change.value
    if name == "router":
        two = {router["kind"]: router for router in (old, new)}
        if set(two) == {"softmax", "top_k_softmax"} and two["softmax"].get("norm_topk_prob", True):
            return "a softmax over all that is renormalised is one over the chosen"
    elif name in ("mscale", "mscale_all_dim", "factor") and part.get("attention_factor") is not None:
        return "" if part["kind"] == "yarn" and name == "factor" else "an attention_factor comes first"
    elif name == "after_positions" and part["kind"] in ("bare_rms_norm", "l2_norm"):
        return "turning changes no length"
    elif name == "norm_placement" and {old, new} == {"parallel", "parallel_two"} and "bare" in stack["norm"]["kind"]:
        return "two norms without weights are one"
    elif name == "max_position_embeddings" and new == stack["position"].get("max_position_embeddings", 0):
        return "the table of positions says so"
    return ""


EVERY_WORD = words_of(ModelConfig)
assert {
    "TransformerConfig.layers",
    "ModelConfig.layers",
    "LayerConfig.rule",
    "YarnScalingConfig.truncate",
} <= EVERY_WORD
assert issubclass(ModelConfig, TransformerConfig)
