"""The probe of any module or function of tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pellucid.audits.engine.layers import stacks
from pellucid.audits.engine.state import preserve_state
from pellucid.audits.engine.target_run import TargetRun
from pellucid.audits.probes.outputs import (
    LabelConvention,
    describe_output,
    factory_hint,
    find_label_convention,
    label_argument,
    logits_in,
    loss_in,
    shape_hint,
)
from pellucid.batch import Batch
from pellucid.errors import ArgumentError, ShapeError, one_line
from pellucid.probe import Capability, Probe, Visibility, embeddings_replaced
from pellucid.visibility import causal


class TokensProbe(Probe):
    """Any ``forward(tokens) -> logits`` ``[B, T] -> [B, T, V]``: a module or a plain function.

    Logits may also be one of several outputs: the one called ``logits``, or the first tensor of three dimensions. Where
    the target takes ``labels``, ``targets`` or ``y`` and returns a loss for them, the loss is audited too.

    Taken for causal unless ``rules`` declare what it is: one for each layer, or one for all. Layers are found where
    they stand in one ``ModuleList``; where they cannot be, one rule is the whole model's. Positions, padding and
    segments cannot be passed to such a target, so they are not audited.
    """

    def __init__(
        self,
        target: Callable[..., object],
        *,
        vocab_size: int | None = None,
        rules: Sequence[Visibility] | None = None,
        max_length: int | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(target):
            raise ArgumentError(f"an audit needs a module or a function of tokens, not {type(target).__name__}")
        self.target, self.max_length = target, max_length
        self.rules, self.rules_declared = (causal(),) if rules is None else tuple(rules), rules is not None
        self.name = name or str(getattr(target, "__name__", type(target).__name__))
        self.module = target if isinstance(target, nn.Module) else None
        parameters = parameters_of(target)
        self._label_name = label_argument(parameters)
        needed = self._label_name is not None and parameters[self._label_name].default is inspect.Parameter.empty
        self._always, self._labels = self._label_name if needed else None, None
        self._embedding, seen = self._first_call(vocab_size is not None)
        self.vocab_size = seen if vocab_size is None else vocab_size
        if len(self.rules) == 1 and self.vocab_size:
            self.rules *= max(len(self._layers()), 1)
        self.capabilities: frozenset[Capability] = frozenset() if self._embedding is None else frozenset({"embeddings"})
        self._labels = self._find_labels()
        if self._labels is not None:
            self.capabilities |= {"loss"}
        elif needed:
            raise ArgumentError(
                f"{self.name} needs {self._label_name} and returns no loss for them, so it is not known what they are; "
                "wrap the call in a function of tokens"
            )

    def logits(self, batch: Batch) -> Tensor:
        with self._embeddings(batch):
            return self._call(batch.tokens, **self._kwargs(batch))

    def embed(self, batch: Batch) -> Tensor:
        result: Tensor = self._table(batch.tokens)
        return result

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self._labels is None:
            return super().loss(batch)
        labels_BT, expected = self._labels.labels(batch)
        with self._embeddings(batch):
            loss = loss_in(self.target(batch.tokens, **self._kwargs(batch), **{self._labels.name: labels_BT}))
        if loss is None:
            raise ShapeError(f"{self.name} returned no loss for {self._labels.name}")
        return self._labels.total(loss.reshape(()), expected), expected

    def with_module(self, module: nn.Module) -> TokensProbe:
        probe = copy.copy(self)
        probe.target = probe.module = module
        return probe

    @property
    def notes(self) -> str:
        """What was found out about how it is called."""
        return "" if self._labels is None else self._labels.describe()

    def _embeddings(self, batch: Batch) -> AbstractContextManager[None]:
        return nullcontext() if batch.inputs_embeds is None else embeddings_replaced(self._table, batch.inputs_embeds)

    def _kwargs(self, batch: Batch) -> dict[str, Any]:
        """What is passed by name, besides the tokens."""
        del batch
        return {}

    def _required_kwargs(self, tokens_BT: Tensor) -> dict[str, Any]:
        """What must be passed besides the tokens."""
        del tokens_BT
        return {}

    def _call(self, tokens_BT: Tensor, **kwargs: Any) -> Tensor:
        if self._always is not None:
            kwargs.setdefault(self._always, tokens_BT.clone())
        result = self.target(tokens_BT, **kwargs)
        logits = logits_in(result, tuple(tokens_BT.shape))
        if logits is None:
            raise ShapeError(
                f"{self.name} returned {describe_output(result)}; an audit needs logits [rows, slots, vocabulary], "
                f"alone, in a tuple or by that name: wrap the call in a function{factory_hint(result)}"
            )
        return logits

    # found out when the probe is made

    def _first_call(self, vocab_known: bool) -> tuple[str | None, int]:
        """The name of the table that reads the tokens, and the size of the vocabulary: seen in a call with two."""
        named = [] if self.module is None else list(self.module.named_modules())
        tables = {name: m for name, m in named if isinstance(m, nn.Embedding)}
        tokens_BT = torch.tensor([[1, 0]], device=self._device)
        readers: set[str] = set()
        with ExitStack() as stack:
            stack.enter_context(preserve_state(self.module))
            stack.enter_context(torch.no_grad())
            for name, table in tables.items():
                hook = partial(_note_reader, readers, name, tokens_BT.clone())
                stack.callback(table.register_forward_hook(hook).remove)
            try:
                size = self._count_logits(tokens_BT)
                self._refuse_swapped_axes()
            except _WrongShapeError as error:
                raise ArgumentError(str(error)) from None
            except Exception as error:  # anybody's code; the audit itself reports what it raises
                if vocab_known:
                    return None, 0
                raise ArgumentError(
                    f"the vocabulary's size cannot be read off {self.name}, which raised "
                    f"{type(error).__name__}: {one_line(error)}; give TokensProbe(target, vocab_size=…)"
                ) from error
        if len(readers) != 1:
            return None, size
        name = readers.pop()
        return name, min(size, tables[name].num_embeddings)

    def _count_logits(self, tokens_BT: Tensor) -> int:
        """The size of the vocabulary. Some score the last slot only unless they are given targets."""
        rows, slots = tokens_BT.shape
        logits = self._call(tokens_BT, **self._required_kwargs(tokens_BT))
        if logits.shape[:2] != tokens_BT.shape and self._label_name is not None and self._always is None:
            self._always = self._label_name
            with suppress(Exception, SystemExit):  # anybody's code: then it stays as it was
                logits = self._call(tokens_BT, **self._required_kwargs(tokens_BT))
            if logits.shape[:2] != tokens_BT.shape:
                self._always = None
        if logits.dim() != 3 or logits.shape[:2] != tokens_BT.shape:
            hint = shape_hint(tuple(logits.shape), rows, slots) or "wrap the call in a function that returns these"
            raise _WrongShapeError(
                f"{self.name} returned {tuple(logits.shape)} for {rows} row of {slots} tokens, but an audit needs "
                f"[{rows}, {slots}, vocabulary]; {hint}"
            )
        return logits.shape[-1]

    def _refuse_swapped_axes(self) -> None:
        """A target that reads ``[slots, rows]`` takes the rows for a text, and each slot for a row of its own."""
        before_BT, after_BT = (torch.tensor([[id, 0, 1], [0, 1, 1]], device=self._device) for id in (1, 0))
        try:
            first, second = (self._call(each, **self._required_kwargs(each)) for each in (before_BT, after_BT))
            moves_BT = (first - second).abs().amax(-1) > 1e-5 * (1 + first.abs().amax())
        except (Exception, SystemExit):  # noqa: BLE001 (anybody's code; the audit itself reports what it raises)
            return
        if moves_BT.tolist() == [[True, False, False], [True, False, False]]:
            raise _WrongShapeError(
                f"{self.name} seems to read [slots, rows]: a token moves the other row in its slot, and no other slot "
                "of its own; give lambda ids: model(ids.T).transpose(0, 1)"
            )

    def _find_labels(self) -> LabelConvention | None:
        if self._label_name is None or self.vocab_size < 2 or any(rule.lookahead != 0 for rule in self.rules):
            return None
        generator = torch.Generator().manual_seed(0)
        tokens_BT = torch.randint(self.vocab_size, (2, 3), generator=generator).to(self._device)
        kwargs = self._required_kwargs(tokens_BT)
        with preserve_state(self.module), torch.no_grad():
            try:
                return find_label_convention(
                    self._label_name,
                    lambda tokens, labels: self.target(tokens, **(kwargs | labels)),
                    lambda tokens: self._call(tokens, **kwargs),
                    tokens_BT,
                )
            except (Exception, SystemExit):  # noqa: BLE001 (anybody's code)
                return None

    def _layers(self) -> tuple[str, ...]:
        """The names of the layers, where there is one stack of them and no other."""
        if self.module is None:
            return ()
        with preserve_state(self.module):
            try:
                found = stacks(TargetRun(self), Batch.from_rows([[1, 0]]))
            except Exception:  # noqa: BLE001 (anybody's code; the audit itself reports what it raises)
                return ()
        return found[0] if len(found) == 1 else ()

    @property
    def _device(self) -> torch.device:
        first = None if self.module is None else next(self.module.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def _table(self) -> nn.Embedding:
        if self._embedding is None:
            raise ArgumentError(
                f"{self.name} has no nn.Embedding that reads the tokens; leave embeddings out of the batch"
            )
        assert self.module is not None
        table = dict(self.module.named_modules())[self._embedding]
        assert isinstance(table, nn.Embedding)
        return table


class _WrongShapeError(ShapeError):
    """Logits of no known shape, or with axes in another order."""


def parameters_of(target: object) -> dict[str, inspect.Parameter]:
    """The parameters of a function or of a module's ``forward``; none where they cannot be read."""
    called = target.forward if isinstance(target, nn.Module) else target
    try:
        return dict(inspect.signature(cast(Callable[..., object], called)).parameters)
    except (TypeError, ValueError):
        return {}


def _note_reader(
    readers: set[str], name: str, tokens_BT: Tensor, module: nn.Module, inputs: tuple[object, ...], output: object
) -> None:
    """A forward hook: the table was handed the very tokens."""
    del module, output
    given = inputs[0] if inputs else None
    if isinstance(given, Tensor) and given.shape == tokens_BT.shape and torch.equal(given.long(), tokens_BT):
        readers.add(name)
