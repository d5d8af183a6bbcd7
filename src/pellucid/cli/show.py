"""``pellucid show``."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from pellucid.cli import common

if TYPE_CHECKING:
    from pellucid.checkpoints.contract import Contract
    from pellucid.checkpoints.folder import Folder
    from pellucid.records import Table


def show(checkpoint: common.Checkpoint, as_json: common.Json = False) -> None:
    """Say what a checkpoint is: its contract, its tensors, and whether they fit.

    Reads headers only: no weight is loaded. Exits with 1 when the tensors are not those of the contract.

    \b
    Example:
      pellucid show my-model
    """
    from pellucid.checkpoints.folder import open_folder
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
        "witness": list(folder.contract.witness.probes),
        "tensors": rows,
        "complete": folder.report.complete,
        "changed": folder.changed,
    }


def _summary(folder: Folder) -> Table:
    """What one asks first, in a few lines."""
    from pellucid.records import Table

    contract = folder.contract
    model = contract.model
    heads = model.attention
    rules = [f"{number} × {rule}" for number, rule in _runs(model.layers)]
    text = contract.text
    known = "" if text is None else f", of which {text.vocab_size:,} have tokens"
    rows = [
        ("parameters", f"{_parameters(folder):,}"),
        ("vocabulary", f"{model.vocab_size:,}{known}"),
        ("layers", ", ".join(rules)),
        ("size", f"{model.hidden_size}, {model.ffn.kind} ffn {model.ffn.intermediate_size} ({model.ffn.activation})"),
        ("heads", f"{heads.num_attention_heads} of {heads.head_dim}, {heads.num_key_value_heads} for keys and values"),
        ("positions", _part(model.position)),
        ("norm", f"{_part(model.norm)}, {model.norm_placement}"),
        ("head", "tied to the embedding" if model.tie_word_embeddings else "its own"),
        ("text", "no tokenizer" if text is None else f"begin {text.bos_id}, end {text.eos_id}, pad {text.pad_id}"),
        ("witness", ", ".join(contract.witness.probes)),
    ]
    return Table(str(folder.path), ("contract", ""), tuple(rows))


def _contract_lines(folder: Folder) -> list[str]:
    """Every field of the contract, except the tensors, which have a table of their own, in YAML's form."""
    from pellucid.configfile.text import dump

    contract = folder.contract
    data = contract.model_dump(mode="json", exclude={"tensors", "witness"})
    data["model"]["layers"] = [f"{number} × {rule}" for number, rule in _runs(contract.model.layers)]
    data["witness"] = _cases(contract)
    return [common.printable(line) for line in dump(data).splitlines()]


def _cases(contract: Contract) -> dict[str, Any]:
    """What the witness asks: sizes of the inputs, and how many answers are kept."""
    witness = contract.witness
    cases: dict[str, Any] = {"tolerance": witness.tolerance}
    for name, answer in witness.probes.items():
        rows, slots = len(answer.asked.tokens), len(answer.asked.tokens[0])
        kept = f"{len(answer.logits)} slots" + ("" if answer.loss is None else f", loss {answer.loss:.6g}")
        cases[name] = f"{rows} × {slots} tokens, {kept}"
    if text := witness.text:
        cases["tokens"] = f"SHA-256 {text.tokens}"
        cases["sample"] = f"{len(text.sample)} lines, {sum(map(len, text.ids))} ids"
        for name, chat in (text.chats or {}).items():
            cases[f"chat {name}"] = "refused by the template" if chat.ids is None else f"{len(chat.ids)} ids"
    return cases


def _runs(layers: tuple[str, ...]) -> list[tuple[int, str]]:
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
    values = part.model_dump(mode="json")
    kind = values.pop("kind")
    return f"{kind} ({', '.join(f'{name} {value}' for name, value in values.items())})" if values else str(kind)
