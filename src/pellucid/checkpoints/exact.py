"""A config's forward pass in float64, by the readable kernels, from weights that are read part by part.

It says what a checkpoint's forward *is*: the same on every machine to about 1e-12, whatever dtype the weights
are stored in and whatever dtype or device they will be used in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pellucid.checkpoints.probes import spread
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.decoder import Decoder

Read = Callable[[str], Tensor]

SMALL = 2**30
"""Bytes of float64 weights that are kept while a model is asked; of a larger model one part at a time is."""


def exact_model(config: ModelConfig, read: Read, tied: Mapping[str, str]) -> Decoder:
    """The model of ``config``, whose parameters are ``read`` by name when a part needs them, and let go after it.

    The head stays, because the loss and new caches look at it, and what is tied to it; a small model stays whole.
    """
    model = build(config, device="meta", backend="reference").requires_grad_(False)

    def fetch(module: nn.Module, name: str) -> None:
        for leaf in module._parameters:
            full = f"{name}.{leaf}"
            if module._parameters[leaf] is not None:
                tensor = read(tied.get(full, full)).to("cpu", torch.float64)
                setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))

    fetch(model.lm_head, "lm_head")
    if config.tie_word_embeddings:
        model.embed_tokens.weight = model.lm_head.weight
    resident = {model.lm_head, model.embed_tokens} if config.tie_word_embeddings else {model.lm_head}
    parts = [(name, module) for name, module in model.named_modules() if module not in resident]
    small = 8 * sum(weight.numel() for weight in model.parameters()) <= SMALL
    for name, module in parts:
        if small:
            fetch(module, name)
        elif module._parameters:
            blank = dict(module._parameters)
            module.register_forward_pre_hook(lambda m, _, name=name: fetch(m, name))
            module.register_forward_hook(lambda m, *_, blank=blank: m._parameters.update(blank))
    return model


class PortableDropout(TorchFunctionMode):
    """Dropout whose choice follows from where it happens, not from a generator: alike on every machine.

    What is dropped where, and how often, is the model's own doing; only the dice are replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (F.dropout, torch.dropout):
            return func(*args, **kwargs)
        x, p, *rest = [*args, *([kwargs["p"]] if "p" in kwargs else [])]
        active = rest[0] if rest else kwargs.get("training", kwargs.get("train"))
        if not active or not p:
            return x
        self._calls += 1
        dice = spread(np.arange(x.numel(), dtype=np.uint64) + np.uint64(self._calls << 40))
        kept = torch.from_numpy(dice.astype(np.float64) / 2.0**64 >= p).view(x.shape)
        return torch.where(kept, x / (1 - p), torch.zeros((), dtype=x.dtype))
