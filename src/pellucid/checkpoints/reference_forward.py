"""A config's forward pass in float64, by the reference kernels, from weights that are read part by part.

It defines a checkpoint's outputs: the same on every machine to about 1e-12, whatever dtype the weights are stored in
and whatever dtype or device they will be used in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pellucid.batch import IGNORED, Batch
from pellucid.checkpoints.contract import PROJECTIONS, WitnessProbe
from pellucid.checkpoints.probe_set import splitmix64
from pellucid.checkpoints.weights import ReadTensor
from pellucid.data.objectives import causal
from pellucid.models import configs
from pellucid.models.build import build
from pellucid.models.config import ModelConfig, TransformerConfig
from pellucid.models.model import Model
from pellucid.nn.mla import MLA

SMALL = 2**30
"""Bytes of float64 weights that stay in memory; of a larger model, one part at a time is read."""

_WHOLE = (MLA,)
"""Parts that multiply by the weights of their own parts, which are therefore loaded together."""


def reference_model(
    config: ModelConfig, read: ReadTensor, tied: Mapping[str, str], dtype: torch.dtype = torch.float64
) -> Model:
    """The model of ``config``, whose tensors are ``read`` by name when a part runs, and released after it.

    The head stays loaded, because the loss reads it, and the token table, which defines the model's device; of a model
    of at most :data:`SMALL` bytes, all parts stay.
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
            _fetch_around_forward(unit[0], modules, names, fetch)
    if config.tie_word_embeddings:
        model.head.weight = model.embed_tokens.weight
    return model


def _units(model: Model) -> list[list[nn.Module]]:
    """All parts of ``model``, grouped where they must be loaded together."""
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


def _fetch_around_forward(
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


class DeterministicDropout(TorchFunctionMode):
    """Dropout whose mask follows from the number of the call, not from a generator: the same on every machine.

    Where the model drops, and with which probability, stays its own; only the random numbers are replaced.
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
        numbers = splitmix64(np.arange(x.numel(), dtype=np.uint64) + np.uint64(self._calls << 40))
        kept = torch.from_numpy(numbers.astype(np.float64) / 2.0**64 >= p).view(x.shape)
        return torch.where(kept, x / (1 - p), torch.zeros((), dtype=x.dtype))


@contextmanager
def scaled_branches(model: Model, gains: Sequence[float]) -> Iterator[None]:
    """While active, each row of the input of a branch is multiplied by its gain.

    Branches are those of the first layer of each stack, and of the first layer with each other kind of feed-forward
    network: a whole deep model of large numbers would be chaotic, and its outputs no property of its weights.
    """

    def scale_inputs(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (scaled(arguments[0], gains), *arguments[1:])

    with ExitStack() as hooks:
        for part in (part for stack in model.stacks if gains for part in _first_branches(stack)):
            hooks.callback(part.register_forward_pre_hook(scale_inputs).remove)
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


@torch.no_grad()
def probe_outputs(model: Model, probe: WitnessProbe) -> tuple[np.ndarray, float | None, int | None]:
    """Projected logits, mean loss, and how many targets it counts."""
    if probe.training:
        try:
            model.train()
            with DeterministicDropout():
                return random_projection(model, probe, hidden_states(model, probe)).numpy(), None, None
        finally:
            model.eval()
    found = hidden_states(model, probe)
    outputs = random_projection(model, probe, found).numpy()
    batch = None if probe.chunks or probe.gains else with_targets(model, probe.batch)
    if batch is None:
        return outputs, None, None
    loss = model.head.loss(found[0][1], batch)  # type: ignore[operator]
    return outputs, float(loss.mean()), int(loss.count)


def hidden_states(model: Model, probe: WitnessProbe) -> list[tuple[Batch, Tensor]]:
    """Each piece of the input, and its hidden states."""
    cache = model.new_cache(*probe.batch.shape) if probe.chunks else None  # type: ignore[operator]
    pieces = [piece.to(model.device) for piece in probe.pieces()]
    with scaled_branches(model, probe.gains):
        return [(piece, model(piece, cache=cache, want="hidden").hidden) for piece in pieces]


def random_projection(model: Model, probe: WitnessProbe, found: Sequence[tuple[Batch, Tensor]]) -> Tensor:
    """``[outputs, PROJECTIONS]`` in float64, on the CPU: the projected logits of the probe's slots or documents."""
    if probe.at is None:
        logits = [model.head(scaled(hidden, probe.gains), piece.coordinates()) for piece, hidden in found]
        return _project(torch.cat(logits))
    hidden_BTD = scaled(torch.cat([hidden for _, hidden in found], 1), probe.gains)
    seen_SD = torch.cat([row_TD[list(slots)] for row_TD, slots in zip(hidden_BTD, probe.at, strict=True)])
    return _project(model.head(seen_SD.unsqueeze(0))[0])


def scaled(hidden_BTD: Tensor, gains: Sequence[float]) -> Tensor:
    """Each row times its gain, if there are gains."""
    return hidden_BTD * torch.tensor(gains, dtype=hidden_BTD.dtype)[:, None, None] if gains else hidden_BTD


def _project(logits_SV: Tensor) -> Tensor:
    exact_SV = logits_SV.to("cpu", torch.float64)
    size = exact_SV.shape[-1]
    if size <= PROJECTIONS:
        return nn.functional.pad(exact_SV, (0, PROJECTIONS - size))
    bits = splitmix64(np.arange(size))[:, None] >> np.arange(PROJECTIONS, dtype=np.uint64) & np.uint64(1)
    signs_VF = torch.from_numpy(1.0 - 2.0 * bits.astype(np.float64))
    return exact_SV @ signs_VF * size**-0.5


def with_targets(model: Model, batch: Batch) -> Batch | None:
    """``batch`` with targets for the model's head; None where it can have none."""
    assert isinstance(model.config, ModelConfig)
    real, documents = batch.segments != 0, torch.arange(batch.documents)
    match model.config.head:
        case configs.LanguageModelHeadConfig():
            return causal(batch)
        case configs.MaskedLMHeadConfig():
            return batch.with_labels(torch.where(real, batch.tokens, IGNORED))
        case configs.TokenClassificationHeadConfig(num_labels=labels):
            return batch.with_labels(torch.where(real, batch.tokens % labels, IGNORED))
        case configs.SequenceClassificationHeadConfig(num_labels=labels):
            return replace(batch, targets=documents % labels)
        case configs.RegressionHeadConfig(num_outputs=outputs):
            numbers = torch.arange(batch.documents * outputs).view(-1, outputs)
            return replace(batch, targets=(numbers % 7 - 3) / 2)
        case configs.SpanHeadConfig():
            sizes = [size for row in batch.document_lengths for size in row.values()]
            return replace(batch, targets=torch.tensor([[0, size - 1] for size in sizes]))
    return batch if batch.documents % 2 == 0 else None


@torch.no_grad()
def stream_dtypes(model: Model, probe: WitnessProbe) -> tuple[str, ...]:
    """The dtype of the residual stream after each layer, an encoder's first."""
    found: list[str] = []

    def note(_: nn.Module, __: object, x_BTD: Tensor) -> None:
        found.append(str(x_BTD.dtype).removeprefix("torch."))

    with ExitStack() as hooks:
        for block in dict.fromkeys(block for stack in model.stacks for block in stack.layers):
            hooks.callback(block.register_forward_hook(note).remove)
        model(probe.batch, want="hidden")
    return tuple(found)
