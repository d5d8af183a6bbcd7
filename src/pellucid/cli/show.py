"""``pellucid show``."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pellucid.cli import common

if TYPE_CHECKING:
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

    folder = open_folder(Path(checkpoint))
    if as_json:
        common.print_json(_as_data(folder))
    else:
        draw(_summary(folder), sys.stdout)
        typer.echo()
        draw(_tensors(folder), sys.stdout)
        typer.echo(f"\n{folder.report}" + (f"\n{folder.changed}" if folder.changed else ""))
    raise typer.Exit(0 if folder.report.complete and not folder.changed else 1)


def _as_data(folder: Folder) -> dict[str, Any]:
    rows = [dict(zip(_COLUMNS, row, strict=True)) for row in _tensors(folder).rows]
    return {
        "path": str(folder.path),
        "parameters": _parameters(folder),
        "contract": folder.contract.model_dump(mode="json", exclude={"tensors", "tied", "witness"}),
        "witness": list(folder.contract.witness.probes),
        "tensors": rows,
        "complete": folder.report.complete,
        "changed": folder.changed,
    }


def _summary(folder: Folder) -> Table:
    """The contract in a dozen lines."""
    from pellucid.records import Table

    contract = folder.contract
    model = contract.model
    heads = model.attention
    rules = [f"{number} × {rule}" for rule, number in Counter(model.layers).items()]
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
        ("files", ", ".join(sorted(contract.digests))),
        ("witness", ", ".join(contract.witness.probes)),
    ]
    return Table(str(folder.path), ("contract", ""), tuple(rows))


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
