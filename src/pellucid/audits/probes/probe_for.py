"""Which probe calls a target."""

from __future__ import annotations

import inspect
from typing import cast

from torch import nn

from pellucid.audits.probes.hf_detect import probe_for_hf
from pellucid.audits.probes.keyword_probe import KeywordProbe, keyword_arguments
from pellucid.audits.probes.tokens_probe import TokensProbe
from pellucid.audits.probes.torch_layers_probe import TorchLayersProbe, is_torch_layer
from pellucid.errors import InputError
from pellucid.probe import Probe

_REQUIRED = ("name", "vocab_size", "rules", "module", "max_length", "capabilities", "logits", "with_module")


def probe_for(target: object) -> Probe:
    """The target's own (``target.probe()``), or one by its kind.

    Known are transformers models, what takes their arguments, torch's own layers, and anything else that takes tokens
    and returns logits.
    """
    if isinstance(target, type):
        raise InputError(f"{target.__name__} is a class; audit an instance of it: {target.__name__}(…)")
    own = getattr(target, "probe", None)
    if inspect.ismethod(own):
        made: Probe = own()
        return made
    if not callable(target):
        if not _missing(target):
            return cast(Probe, target)
        raise InputError(
            f"{type(target).__name__} cannot be called, so it cannot be audited; give a module, a function or a probe"
        )
    if inspect.isfunction(target):
        parameters = inspect.signature(target).parameters.values()
        if all(each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters):
            name = target.__name__
            raise InputError(
                f"{name} takes no tokens; it is a factory, perhaps: call it, and audit what it makes: {name}()"
            )
    if is_torch_layer(target):
        return TorchLayersProbe(cast(nn.Module, target))
    return probe_for_hf(target) or (KeywordProbe(target) if keyword_arguments(target) else TokensProbe(target))


def refuse_incomplete(probe: object) -> None:
    """What is no probe, or has no vocabulary to change tokens in, cannot be audited."""
    missing = _missing(probe)
    if missing:
        raise InputError(
            f"{type(probe).__name__} is no probe: it lacks {', '.join(missing)}; subclass pellucid.probe.Probe"
        )
    size = cast(Probe, probe).vocab_size
    if size < 2:
        raise InputError(f"the vocabulary has {size} tokens, but a token can only be changed where there are 2 or more")


def _missing(probe: object) -> list[str]:
    return [name for name in _REQUIRED if not hasattr(probe, name)]
