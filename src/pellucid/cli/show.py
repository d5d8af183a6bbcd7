"""``pellucid show``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from pellucid.cli import common

if TYPE_CHECKING:
    from pellucid.checkpoints.contract import Contract
    from pellucid.checkpoints.loading import Folder
    from pellucid.models.config import LayerConfig, ModelConfig, TransformerConfig
    from pellucid.models.configs import FFNConfig, GroupedQueryAttentionConfig, MLAConfig
    from pellucid.records import Table


def show(checkpoint: common.Checkpoint, as_json: common.Json = False) -> None:
    """Say what a checkpoint is: its contract, its tensors, and whether they fit.

    Reads headers only: no weight is loaded. Exits with 1 when the tensors are not those of the contract.

    \b
    Example:
      pellucid show my-model
    """
    from pellucid.checkpoints.loading import open_folder
    from pellucid.reports import show as draw

    folder = open_folder(checkpoint)
    if as_json:
        common.print_json(_as_data(folder))
    else:
        draw(_summary(folder), sys.stdout)
        typer.echo("\n" + "\n".join(_contract_lines(folder)) + "\n")
        draw(_tensors(folder), sys.stdout)
        typer.echo(f"\n{folder.report}" + (f"\n{folder.changed}" if folder.changed else ""))
    raise typer.Exit(0 if folder.report.complete and not folder.changed else 1)


def _as_data(folder: Folder) -> dict[str, Any]:
    rows = [dict(zip(_COLUMNS, row, strict=True)) for row in _tensors(folder).rows]
    return {
        "path": str(folder.path),
        "parameters": _parameters(folder),
        "contract": folder.contract.model_dump(mode="json"),
        "witness": None if folder.contract.witness is None else list(folder.contract.witness.probes),
        "tensors": rows,
        "complete": folder.report.complete,
        "changed": folder.changed,
    }


def _summary(folder: Folder) -> Table:
    """The most important facts, in a few lines."""
    from pellucid.records import Table

    contract = folder.contract
    model = contract.model
    text = contract.text
    known = "" if text is None else f", of which {text.vocab_size:,} have tokens"
    rows = [
        ("family", model.family),
        ("parameters", f"{_parameters(folder):,}"),
        ("vocabulary", f"{model.vocab_size:,}{known}"),
        *_stack(model),
    ]
    if model.encoder is not None:
        rows += [(f"encoder's {name}", value) for name, value in _stack(model.encoder)]
    if model.cross_attention is not None:
        rows.append(("reads the encoder", _heads(model.cross_attention)))
    rows += [
        ("head", _head(model)),
        ("text", "no tokenizer" if text is None else f"begin {text.bos_id}, end {text.eos_id}, pad {text.pad_id}"),
        ("witness", "none (digests only)" if contract.witness is None else ", ".join(contract.witness.probes)),
    ]
    return Table(str(folder.path), ("contract", ""), tuple(rows))


def _stack(stack: TransformerConfig) -> list[tuple[str, str]]:
    """What an encoder or a decoder is made of."""
    rules = [f"{number} × {layer}" for number, layer in _runs([_layer(layer) for layer in stack.layers])]
    return [
        ("layers", ", ".join(rules)),
        ("size", f"{stack.hidden_size}, {_feed_forward(stack.ffn)}"),
        ("heads", _heads(stack.attention)),
        ("positions", _part(stack.position)),
        ("norm", f"{_part(stack.norm)}, {stack.norm_placement}"),
    ]


def _layer(layer: str | LayerConfig) -> str:
    """A layer: its rule, and what it has of its own."""
    if isinstance(layer, str):
        return layer
    fields = layer.model_dump(mode="json", exclude_none=True)
    own = [
        f"{name} {part['kind'] if isinstance(part, dict) else part}" for name, part in fields.items() if name != "rule"
    ]
    return f"{layer.rule} ({', '.join(own)})" if own else layer.rule


def _feed_forward(word: FFNConfig) -> str:
    """Kind, inner size and activation, and of experts how many."""
    if word.kind == "moe":
        shared = "" if word.shared is None else f", one of {word.shared.intermediate_size} for all"
        return (
            f"{word.num_experts_per_tok} of {word.num_experts} experts by {word.router.kind}, each "
            f"{_feed_forward(word.expert)}{shared}"
        )
    activation = f" ({word.activation})" if word.kind != "clamped_gated" else ""
    return f"{word.kind} ffn {word.intermediate_size}{activation}"


def _heads(word: GroupedQueryAttentionConfig | MLAConfig) -> str:
    if word.kind == "latent":
        size = word.qk_nope_head_dim + word.qk_rope_head_dim
        return (
            f"{word.num_attention_heads} of {size} ({word.qk_rope_head_dim} turned), values of {word.v_head_dim}, from "
            f"latents of {word.kv_lora_rank}"
        )
    return f"{word.num_attention_heads} of {word.head_dim}, {word.num_key_value_heads} for keys and values"


def _head(model: ModelConfig) -> str:
    if model.tie_word_embeddings:
        tied = "tied to the embedding"
    else:
        tied = "its own" if model.head.kind in ("language_model", "masked_lm") else ""
    return ", ".join(part for part in (_part(model.head), tied) if part)


def _contract_lines(folder: Folder) -> list[str]:
    """Every field of the contract, except the tensors, which have a table of their own, in YAML's form."""
    from pellucid.configfile.yaml import dump_yaml

    contract = folder.contract
    data = contract.model_dump(mode="json", exclude={"tensors", "witness"})
    for stack in (data["model"], data["model"]["encoder"]):
        if stack is not None and all(isinstance(layer, str) for layer in stack["layers"]):
            stack["layers"] = [f"{number} × {rule}" for number, rule in _runs(stack["layers"])]
    data["witness"] = _cases(contract)
    return [common.printable(line) for line in dump_yaml(data).splitlines()]


def _cases(contract: Contract) -> dict[str, Any] | None:
    """The probes of the witness: sizes of the inputs, and the number of outputs."""
    witness = contract.witness
    if witness is None:
        return None
    cases: dict[str, Any] = {"tolerance": witness.tolerance}
    cases["stream"] = ", ".join(f"{number} × {kind}" for number, kind in _runs(witness.stream))
    for name, record in witness.probes.items():
        probe = record.probe
        rows, slots = probe.batch.shape
        read = "" if probe.batch.source is None else f" from {probe.batch.source.shape[1]}"
        kept = f"{len(record.logits)} {'documents' if probe.at is None else 'slots'}"
        loss = "" if record.loss is None else f", loss {record.loss:.6g}"
        cases[name] = f"{rows} × {slots} tokens{read}, {kept}{loss}"
    if text := witness.text:
        cases["tokens"] = f"SHA-256 {text.tokens}"
        cases["sample"] = f"{len(text.sample)} lines, {sum(map(len, text.ids))} ids"
        for name, chat in (text.chats or {}).items():
            cases[f"chat {name}"] = "refused by the template" if chat.ids is None else f"{len(chat.ids)} ids"
    return cases


def _runs(layers: Sequence[str]) -> list[tuple[int, str]]:
    """Equal rules that follow each other, counted."""
    return [(len(list(run)), rule) for rule, run in groupby(layers)]


_COLUMNS = ("name", "tensor", "file", "status", "detail")


def _tensors(folder: Folder) -> Table:
    """Every tensor of the contract and of the files."""
    from pellucid.records import Table

    header, files = folder.weights.header, folder.weights.places
    rows = []
    for name, status, detail in folder.report:
        place = folder.places.get(name, name)
        spec = str(header[place]) if place in header else None
        file = files[place].name if place in files else None
        rows.append((name, spec, file, status, "" if detail == spec else detail))
    return Table("tensors", _COLUMNS, tuple(rows))


def _parameters(folder: Folder) -> int:
    """Numbers in the stored tensors; a tied one counts once."""
    from math import prod

    return sum(prod(folder.weights.header[place].shape) for place in folder.places.values())


def _part(part: Any) -> str:
    """A part of a config: its kind and what it sets."""
    return _described(part.model_dump(mode="json", exclude_none=True))


def _described(values: dict[str, Any]) -> str:
    kind = values.pop("kind", "")
    fields = [f"{name} {_described(value) if isinstance(value, dict) else value}" for name, value in values.items()]
    return f"{kind} ({', '.join(fields)})" if fields else str(kind)
