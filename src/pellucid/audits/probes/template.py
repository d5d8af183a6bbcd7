"""The beginning of a probe for a model that is not called with token ids alone, written from its signature."""

from __future__ import annotations

import inspect
import re

from torch import nn

from pellucid.audits.probes.tokens_probe import parameters_of

_ARGUMENTS: tuple[tuple[str, str, str], ...] = (
    (r"(src_|tgt_)?key_padding_mask", "batch.segments == 0  # True hides", "padding"),
    (r"(source|memory|encoder)\w*mask", "batch.source.segments == 0  # True hides", "source"),
    (r"(\w+_)?mask|pad_mask", "(batch.segments != 0).long()  # 1 for tokens", "padding"),
    (r"\w*position\w*", "batch.positions", "positions"),
    (r"\w*(lengths|lens|seq_len\w*)", "(batch.segments != 0).sum(1)", "padding"),
    (r"(segment|document|doc|seq)_ids", "batch.segments", "packing"),
    (r"\w*embeds|embeddings", "batch.inputs_embeds", "embeddings"),
    (r"src\w*|source\w*|encoder_input\w*", "batch.source.tokens", "source"),
    (r"tgt\w*|target_ids|decoder_input\w*|tokens?|ids|input_ids|x|idx|inputs?", "batch.tokens", ""),
)
"""Pattern of an argument's name, what a batch has for it, and the capability that it gives."""


def probe_template(target: object, name: str, source: str) -> str:
    """Python source of a probe: the call by the arguments' names, and what is to be filled in.

    Args:
        target: the module or function.
        name: ``module:attribute`` that names it, or makes it.
        source: what to call for the target, such as ``make_model()``.
    """
    module, _, attribute = name.partition(":")
    arguments, capabilities, taken = [], set(), ""
    for parameter in parameters_of(target).values():
        required = parameter.default is parameter.empty
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or parameter.name in (
            "labels",
            "targets",
        ):
            continue
        match = next((entry for entry in _ARGUMENTS if re.fullmatch(entry[0], parameter.name)), None)
        if match is None and not required:
            continue
        value, capability = match[1:] if match else ("...  # fill in", "")
        if match is None and not taken:
            value = "batch.tokens"
        taken = taken or value
        capabilities |= {capability} - {"", "embeddings"}
        arguments.append(_line(parameter, value))
    listed = ", ".join(f'"{capability}"' for capability in sorted(capabilities))
    vocabulary = _vocabulary(target)
    return _TEMPLATE.format(
        name=type(target).__name__ if isinstance(target, nn.Module) else attribute.rpartition(".")[2],
        module=module,
        root=attribute.partition(".")[0],
        source=source,
        arguments="\n".join(arguments),
        capabilities=f"frozenset({{{listed}}})" if listed else "frozenset()",
        vocabulary=vocabulary or "...",
        note="" if vocabulary else "  # fill in: token ids below this number are used",
    )


def _line(parameter: inspect.Parameter, value: str) -> str:
    code, _, comment = value.partition("  # ")
    named = "" if parameter.kind is parameter.POSITIONAL_ONLY else f"{parameter.name}="
    return f"            {named}{code},{f'  # {comment}' if comment else ''}"


def _vocabulary(target: object) -> int | None:
    parts = target.modules() if isinstance(target, nn.Module) else ()
    return max((part.num_embeddings for part in parts if isinstance(part, nn.Embedding)), default=None)


_TEMPLATE = '''"""How an audit calls {name}: check each line, then ``pellucid audit FILE:make_probe`` (without .py)."""

from pellucid.probe import Probe
from pellucid.visibility import causal

from {module} import {root}


class ModelProbe(Probe):
    name = "{name}"
    vocab_size = {vocabulary}{note}
    rules = (causal(),)  # who may see whom, one for each layer: full(), causal() & window(64), …
    capabilities = {capabilities}  # what the call below obeys

    def __init__(self, model):
        self.module = model

    def logits(self, batch):
        """[B, T, V] from batch.tokens, .segments (0 is padding), .positions; True is visible everywhere here."""
        output = self.module(
{arguments}
        )
        return output if hasattr(output, "shape") else output.logits

    def with_module(self, module):
        return ModelProbe(module)


def make_probe():
    return ModelProbe({source})
'''
