"""A config's forward pass in float64, by the readable kernels, from weights that are read part by part.

It says what a checkpoint's forward *is*: the same on every machine to about 1e-12, whatever dtype the weights
are stored in and whatever dtype or device they will be used in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pellucid.checkpoints.inputs import spread
from pellucid.models.build import build
from pellucid.models.config import ModelConfig, TransformerConfig
from pellucid.models.model import Model
from pellucid.nn.mla import MLA

Read = Callable[[str], Tensor]

SMALL = 2**30
"""Bytes of float64 weights that are kept while a model is asked; of a larger model one part at a time is."""

_WHOLE = (MLA,)
"""Parts that multiply by the weights of their own parts, which are therefore there together."""


def exact_model(config: ModelConfig, read: Read, tied: Mapping[str, str], dtype: torch.dtype = torch.float64) -> Model:
    """The model of ``config``, whose tensors are ``read`` by name when a part needs them, and let go after it.

    The head stays, because the loss looks at it, and the token table, which says where a model is; a small model stays
    whole.
    """
    model = build(config, device="meta", dtype=dtype, backend="reference").requires_grad_(False)

    def fetch(module: nn.Module, name: str) -> None:
        for leaf, blank in _own(module):
            full = f"{name}.{leaf}"
            tensor = read(tied.get(full, full)).to("cpu", blank.dtype)
            setattr(module, leaf, nn.Parameter(tensor, False) if isinstance(blank, nn.Parameter) else tensor)

    names = {module: name for name, module in model.named_modules()}
    units = _units(model)
    small = 8 * sum(weight.numel() for weight in model.parameters()) <= SMALL
    resident = {part for unit in (model.head, model.embed_tokens) for part in unit.modules()}
    for unit in units:
        modules = [module for module in unit if _own(module)]
        if small or resident.issuperset(unit):
            for module in modules:
                fetch(module, names[module])
        elif modules:
            _fetch_when_asked(unit[0], modules, names, fetch)
    if config.tie_word_embeddings:
        model.head.weight = model.embed_tokens.weight
    return model


def _units(model: Model) -> list[list[nn.Module]]:
    """All parts of ``model``, those together that must be there together."""
    found: list[list[nn.Module]] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside:
            whole = list(module.modules()) if isinstance(module, _WHOLE) else [module]
            inside.update(whole)
            found.append(whole)
    return found


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors of ``module`` itself."""
    return [
        (leaf, tensor) for leaf, tensor in (*module._parameters.items(), *module._buffers.items()) if tensor is not None
    ]


def _fetch_when_asked(
    unit: nn.Module,
    modules: Sequence[nn.Module],
    names: Mapping[nn.Module, str],
    fetch: Callable[[nn.Module, str], None],
) -> None:
    blanks = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]

    def before(*_: object) -> None:
        for module in modules:
            fetch(module, names[module])

    def after(*_: object) -> None:
        for module, parameters, buffers in blanks:
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    unit.register_forward_pre_hook(before)
    unit.register_forward_hook(after)


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


@contextmanager
def amplified(model: Model, gains: Sequence[float]) -> Iterator[None]:
    """While inside, each row of what enters a branch is multiplied by its gain, and what enters the head.

    This happens in the first layer of each stack, and in the first of each other kind of feed-forward network: a
    whole deep model of large numbers would be chaotic, and what it gives no property of its weights.
    """
    gains_B11 = torch.tensor(gains, dtype=torch.float64)[:, None, None] if gains else None

    def louder(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0] * gains_B11, *arguments[1:])

    with ExitStack() as hooks:
        if gains_B11 is not None:
            parts = [part for stack in model.stacks for part in _first_branches(stack)]
            for part in parts:
                hooks.callback(part.register_forward_pre_hook(louder).remove)
        yield


def _first_branches(stack: Model) -> list[nn.Module]:
    config: TransformerConfig = stack.config
    seen: set[object] = set()
    found: dict[nn.Module, None] = {}
    for layer, block in zip(config.each_layer, stack.layers, strict=True):
        word = layer.ffn or config.ffn
        if word not in seen:
            seen.add(word)
            branches = (block.attention, getattr(block, "cross_attention", None), block.ffn)
            found |= dict.fromkeys(branch for branch in branches if isinstance(branch, nn.Module))
    return list(found)
