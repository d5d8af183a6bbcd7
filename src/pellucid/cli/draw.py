"""``pellucid draw``: the mask picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pellucid.cli import common
from pellucid.errors import ConfigError
from pellucid.files import replace_file
from pellucid.messages import nearest

if TYPE_CHECKING:
    from pellucid.models.config import ModelConfig
    from pellucid.visibility import Rule

Part = Literal["", "encoder", "decoder", "cross"]
"""Whose rules are drawn; empty where no model was named."""

Target = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG|CKPT|RULE",
        help="A model's YAML or JSON file or preset, a checkpoint folder, or a rule such as 'causal & window(4)'.",
        show_default=False,
    ),
]
Output = Annotated[str, typer.Option("--output", "-o", help="The picture: .svg or .png.")]
Length = Annotated[int, typer.Option(help="Tokens to draw, one document.")]
Documents = Annotated[
    str | None,
    typer.Option(help="Lengths of documents packed in one row, such as 5,3,8.", show_default=False),
]
Groups = Annotated[
    str | None,
    typer.Option(help="A group for each token, for rules that read groups: 0,1,1,0.", show_default=False),
]


def draw(
    target: Target,
    output: Output = "mask.svg",
    length: Length = 16,
    documents: Documents = None,
    groups: Groups = None,
    as_json: common.Json = False,
) -> None:
    """Draw who may see whom: one panel for each rule of a model; of an encoder and decoder, also who reads the source.

    \b
    Example:
      pellucid draw "causal & (window(4) | sinks(2))" --documents 9,5 -o mask.svg
    """
    suffix = os.path.splitext(output)[1].lower()
    if suffix not in (".svg", ".png"):
        raise typer.BadParameter(
            f"{output!r} ends in {suffix!r}; give a name that ends in .svg or .png", param_hint="--output"
        )

    from pellucid.reports import mask_figure, mask_panels, mask_png

    stacks = _stacks(target)
    lengths = [length] if documents is None else common.numbers(documents, "--documents")
    members = None if groups is None else common.numbers(groups, "--groups")
    try:
        panels = [
            panel
            for part, rules in stacks
            for panel in mask_panels(rules, documents=lengths, groups=members, layered=part != "", part=part)
        ]
    except ConfigError as error:
        if members is not None:
            raise
        raise ConfigError(f"{error}; on the command line: --groups 0,1,1,0, one number a token") from None
    figure = mask_figure(panels)
    replace_file(output, figure.svg.encode() if suffix == ".svg" else mask_png(panels))
    if as_json:
        facts = [
            {
                "part": p.part,
                "rule": p.rule,
                "layers": list(p.layers),
                "documents": list(p.documents),
                "visible_pairs": p.edges,
            }
            for p in panels
        ]
        common.print_json({"output": output, "panels": facts})
    else:
        typer.echo(f"wrote {output}: {figure.caption}")


def _stacks(target: str) -> list[tuple[Part, tuple[Rule, ...]]]:
    """Whose rules ``target`` names, and the rules: of an encoder and decoder three kinds."""
    config = _config(target)
    if config is None:
        from pellucid.visibility import parse

        try:
            return [("", (parse(target),))]
        except ConfigError as error:
            raise ConfigError(f"{error}{_nearest_preset(target)}") from None
    if config.encoder is None:
        return [("encoder" if config.family == "encoder" else "decoder", config.rules)]
    from pellucid.visibility import full

    cross = (full(),) * len(config.layers)
    return [("encoder", config.encoder.rules), ("decoder", config.rules), ("cross", cross)]


def _nearest_preset(target: str) -> str:
    """A hint where a preset may have been meant."""
    from pellucid.models import presets

    near = nearest(target, presets.names())
    return "" if near is None else f"; there is a preset {near!r}"


def _config(target: str) -> ModelConfig | None:
    """The config that ``target`` names, if it is no rule."""
    if os.path.exists(target) and (os.path.isdir(target) or Path(target).name in ("best", "last")):
        from pellucid.checkpoints.contract import CONTRACT, read_contract
        from pellucid.checkpoints.files import resolve_checkpoint_path

        return read_contract(resolve_checkpoint_path(target) / CONTRACT).model
    if target.lower().endswith((".yaml", ".yml", ".json")):
        from pellucid.configfile import read_mapping
        from pellucid.models.config import ModelConfig

        mapping = read_mapping(target)
        inner = mapping.get("model")
        return ModelConfig.from_mapping(inner if isinstance(inner, dict) else mapping)
    from pellucid.models import presets

    return presets.preset(target) if target in presets.names() else None
