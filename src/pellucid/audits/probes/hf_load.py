"""A transformers model from a saved folder, or a tiny one of a class, by the library's own loaders."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from pellucid.audits.probes.hf_rules import families
from pellucid.errors import ArgumentError, CheckpointError, one_line

VOCABULARY, LAYERS, HEADS = 120, 4, 4


def is_hf_folder(path: Path) -> bool:
    """Whether a folder looks like a saved transformers model."""
    return (path / "config.json").is_file()


def from_folder(path: Path) -> nn.Module:
    """The model that the folder's ``config.json`` names, from safetensors only.

    Raises:
        ArgumentError: transformers is not installed.
        CheckpointError: it has no such class, or the weights cannot be read.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        message = "auditing Hugging Face models needs transformers; install it with pip install 'pellucid[hf]'"
        raise ArgumentError(message) from error
    file = path / "config.json"
    names = _read(file).get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    kind = getattr(transformers, name, None) if name and name.isidentifier() else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        known = f"transformers {transformers.__version__} has no such model"
        raise CheckpointError(f"{file} names the architecture {name!r}, but {known}; its code is not run")
    try:
        model: nn.Module = cast(Any, kind).from_pretrained(
            path, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:  # anybody's files
        raise CheckpointError(
            f"{path} cannot be loaded as {name}: {type(error).__name__}: {one_line(error)}"
        ) from error
    return model


def _read(file: Path) -> dict[str, Any]:
    if file.stat().st_size > 1 << 24:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes, which is no model's config")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds {type(config).__name__}, but a mapping is needed")
    return config


def is_pretrained_class(found: object) -> bool:
    """Whether it is one of transformers' model classes, known by what it offers."""
    return isinstance(found, type) and hasattr(found, "from_pretrained") and hasattr(found, "config_class")


def tiny_model(model_class: Any, kind: str | None = None) -> nn.Module:
    """A class of transformers over a tiny config of its own, with random weights that matter.

    Raises:
        ArgumentError: the class cannot be built so.
    """
    kind = kind or ("causal" if model_class.__name__.endswith(("CausalLM", "LMHeadModel")) else "masked")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return reweighted(model_class(_tiny_config(model_class.config_class, kind)))
    except Exception as error:  # anybody's code
        raise ArgumentError(
            f"{model_class.__name__} cannot be built from a tiny config: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}; write a factory that builds it and name that"
        ) from error


def _tiny_config(config_class: Any, kind: str) -> Any:
    """A config of the same architecture with small sizes; two layers, or four where they differ from each other."""
    base, special = config_class(), families()["special"].get(config_class.model_type, {})
    given, lists = _shrunk(base), families()["per_layer"]
    names = set(vars(base)) | set(getattr(config_class, "attribute_map", {}))
    if kind == "causal" and "is_decoder" in names and not getattr(base, "is_encoder_decoder", False):
        given["is_decoder"] = True
    if kind == "causal" and "causal" in names:
        given["causal"] = True
    if not _layers_differ(base) and not set(special) & set(lists):
        counts = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
        counts |= {"encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"}
        given |= {key: 2 for key in given if key in counts} | {key: given[key][:2] for key in given if key in lists}
    return config_class(**given | special)


def _layers_differ(config: Any) -> bool:
    """Whether layers differ from each other, which takes four of them to show."""
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    lists = [vars(part).get(key) for part in parts for key in families()["per_layer"]]
    return any(isinstance(value, list | tuple) and len(set(map(str, value))) > 1 for value in lists) or any(
        word in key for part in parts for key in vars(part) for word in ("pattern", "_freq", "period", "every")
    )


def _shrunk(config: Any) -> dict[str, Any]:
    """New values of everything that has a size in its name."""
    sizes = {name: int(size) for size, names in families()["sizes"].items() for name in names}
    unset = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "pad_token_id": 0, "head_dim": 8}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    given: dict[str, Any] = {}
    free = VOCABULARY - 3
    for key, value in sorted(vars(config).items()):
        if hasattr(value, "to_dict"):
            kept = {k: v for k, v in value.to_dict().items() if k not in ("transformers_version", "per_layer_config")}
            given[key] = kept | _shrunk(value)
        elif key in ("vocab_size", "src_vocab_size", "tgt_vocab_size", "vocab_size_per_layer_input", "n_words"):
            given[key] = VOCABULARY
        elif key.endswith(("_token_id", "_token_index", "_token_ids")) and value is not None:
            if key in ids:
                given[key] = ids[key]
            elif isinstance(value, int) and value >= VOCABULARY - 20:
                free -= 1
                given[key] = free
        elif key in families()["separate_kv_heads"] and isinstance(value, int):
            shared = value != vars(config).get("num_attention_heads")
            given[key] = 1 if value == 1 else 2 if shared else HEADS
        elif key in sizes and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            given[key] = min(value, sizes[key])
        elif key in unset and value is None:
            given[key] = unset[key]
        elif key in sizes and isinstance(value, list | tuple) and value and isinstance(value[0], int):
            given[key] = [min(size, sizes[key]) for size in value[:LAYERS]]
        elif key in families()["per_layer"] and isinstance(value, list | tuple) and value:
            given[key] = _one_of_each(list(value))
        elif "dropout" in key or "drop_prob" in key or "layerdrop" in key:
            given[key] = 0.0 if isinstance(value, float | int) and not isinstance(value, bool) else value
    return given


def _one_of_each(values: list[Any]) -> list[Any]:
    """Four entries in which as many kinds as possible appear, in their order."""
    first = values[:LAYERS]
    for value in dict.fromkeys(map(str, values)):
        if value not in map(str, first):
            first = [*first[: LAYERS - 1], next(v for v in values if str(v) == value)]
    return first


def reweighted(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights so large that attention visibly matters; norms, decays and biases nearly as they come."""
    generator = torch.Generator().manual_seed(seed)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() < 2 or any(word in name.lower() for word in ("a_log", "dt_", "norm", "decay")):
                weight.add_(0.05 * noise.to(weight.dtype))
            else:
                fan_in = weight.shape[-1] if weight.dim() == 2 else math.prod(weight.shape[1:-1]) or 1
                scale = 1.0 if id(weight) in tables else 1.2 / math.sqrt(max(fan_in, 1))
                weight.copy_(scale * noise.to(weight.dtype))
    return model.eval().float()
