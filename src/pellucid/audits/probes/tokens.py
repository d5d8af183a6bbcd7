"""Ready probes for common signatures."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pellucid.audits.engine.deviation import TargetRun
from pellucid.audits.engine.layers import stacks
from pellucid.audits.engine.preserve_state import preserve_state
from pellucid.audits.probes.labels import Labels, label_argument, labels_of
from pellucid.audits.probes.outputs import described, factory_hint, logits_in, loss_in, shape_hint
from pellucid.batch import Batch
from pellucid.errors import InputError, ShapeError, one_line
from pellucid.probe import Capability, Probe, Visibility, embeddings_replaced
from pellucid.visibility import causal


class TokensProbe(Probe):
    """Any ``forward(tokens) -> logits`` ``[B, T] -> [B, T, V]``: a module or a plain function.

    What it returns may also hold these: as ``logits`` by name, or as its first tensor of three dimensions. Where it
    takes ``labels``, ``targets`` or ``y`` and gives a loss for them, it is asked for the loss.

    Taken for causal unless ``rules`` declare what it is: one for each layer, or one for all. Layers are told from
    outside where they stand in one ``ModuleList``; where they cannot be, one rule is the whole model's. Positions,
    padding and segments cannot be given to such a target, so it is not asked about them.
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
            raise InputError(f"an audit needs a module or a function of tokens, not {type(target).__name__}")
        self.target, self.max_length = target, max_length
        self.rules, self.rules_declared = (causal(),) if rules is None else tuple(rules), rules is not None
        self.name = name or str(getattr(target, "__name__", type(target).__name__))
        self.module = target if isinstance(target, nn.Module) else None
        parameters = _parameters(target)
        self._label_name = label_argument(parameters)
        needed = self._label_name is not None and parameters[self._label_name].default is inspect.Parameter.empty
        self._always, self._labels = self._label_name if needed else None, None
        self._embedding, seen = self._try_out(vocab_size is not None)
        self.vocab_size = seen if vocab_size is None else vocab_size
        if len(self.rules) == 1 and self.vocab_size:
            self.rules *= max(len(self._layers()), 1)
        self.capabilities: frozenset[Capability] = frozenset() if self._embedding is None else frozenset({"embeddings"})
        self._labels = self._try_labels()
        if self._labels is not None:
            self.capabilities |= {"loss"}
        elif needed:
            raise InputError(
                f"{self.name} needs {self._label_name} and gives no loss for them, so it is not known what they are; "
                "wrap the call in a function of tokens"
            )

    def logits(self, batch: Batch) -> Tensor:
        given = self._given(batch)
        if batch.inputs_embeds is None:
            return self._called(batch.tokens, **given)
        with self._with(batch.inputs_embeds):
            return self._called(batch.tokens, **given)

    def _with(self, embeddings_BTD: Tensor) -> AbstractContextManager[None]:
        return embeddings_replaced(self._token_embedding, embeddings_BTD)

    def _given(self, batch: Batch) -> dict[str, Any]:
        """What the target is told by name, beside the tokens."""
        del batch
        return {}

    def embed(self, batch: Batch) -> Tensor:
        result: Tensor = self._token_embedding(batch.tokens)
        return result

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self._labels is None:
            return super().loss(batch)
        labels_BT, expected = self._labels.of(batch)
        given = self._given(batch) | {self._labels.name: labels_BT}
        replaced = nullcontext() if batch.inputs_embeds is None else self._with(batch.inputs_embeds)
        with replaced:
            loss = loss_in(self.target(batch.tokens, **given))
        if loss is None:
            raise ShapeError(f"{self.name} gave no loss for {self._labels.name}")
        return self._labels.total(loss.reshape(()), expected), expected

    def with_module(self, module: nn.Module) -> TokensProbe:
        probe = copy.copy(self)
        probe.target = probe.module = module
        return probe

    @property
    def said(self) -> str:
        """What was found out about how it is called."""
        return "" if self._labels is None else self._labels.describe()

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

    def _called(self, tokens_BT: Tensor, **given: Any) -> Tensor:
        if self._always is not None:
            given.setdefault(self._always, tokens_BT.clone())
        result = self.target(tokens_BT, **given)
        logits = logits_in(result, tuple(tokens_BT.shape))
        if logits is None:
            raise ShapeError(
                f"{self.name} returned {described(result)}; an audit needs logits [rows, slots, vocabulary], alone, "
                f"in a tuple or by that name: wrap the call in a function{factory_hint(result)}"
            )
        return logits

    def _tried(self, tokens_BT: Tensor) -> int:
        """The size of the vocabulary. Some score the last slot only unless they are given targets."""
        rows, slots = tokens_BT.shape
        logits = self._called(tokens_BT, **self._try_arguments(tokens_BT))
        if logits.shape[:2] != tokens_BT.shape and self._label_name is not None and self._always is None:
            self._always = self._label_name
            with suppress(Exception, SystemExit):  # anybody's code: then it stays as it was
                logits = self._called(tokens_BT, **self._try_arguments(tokens_BT))
            if logits.shape[:2] != tokens_BT.shape:
                self._always = None
        if logits.dim() != 3 or logits.shape[:2] != tokens_BT.shape:
            hint = shape_hint(tuple(logits.shape), rows, slots) or "wrap the call in a function that returns these"
            raise _WrongShapeError(
                f"{self.name} gave {tuple(logits.shape)} for {rows} row of {slots} tokens, but an audit needs "
                f"[{rows}, {slots}, vocabulary]; {hint}"
            )
        return logits.shape[-1]

    def _refuse_swapped(self) -> None:
        """A target that reads ``[slots, rows]`` takes the rows for a text, and each slot for a row of its own."""
        before_BT, after_BT = (torch.tensor([[id, 0, 1], [0, 1, 1]], device=self._device) for id in (1, 0))
        try:
            first, second = (self._called(each, **self._try_arguments(each)) for each in (before_BT, after_BT))
            moves_BT = (first - second).abs().amax(-1) > 1e-5 * (1 + first.abs().amax())
        except (Exception, SystemExit):  # noqa: BLE001 (anybody's code; the audit itself reports what it raises)
            return
        if moves_BT.tolist() == [[True, False, False], [True, False, False]]:
            raise _WrongShapeError(
                f"{self.name} seems to read [slots, rows]: a token moves the other row in its slot, and no other slot "
                "of its own; give lambda ids: model(ids.T).transpose(0, 1)"
            )

    def _try_labels(self) -> Labels | None:
        if self._label_name is None or self.vocab_size < 2 or any(rule.lookahead != 0 for rule in self.rules):
            return None
        generator = torch.Generator().manual_seed(0)
        tokens_BT = torch.randint(self.vocab_size, (2, 3), generator=generator).to(self._device)
        given = self._try_arguments(tokens_BT)
        with preserve_state(self.module), torch.no_grad():
            try:
                return labels_of(
                    self._label_name,
                    lambda tokens, labels: self.target(tokens, **(given | labels)),
                    lambda tokens: self._called(tokens, **given),
                    tokens_BT,
                )
            except (Exception, SystemExit):  # noqa: BLE001 (anybody's code)
                return None

    def _try_arguments(self, tokens_BT: Tensor) -> dict[str, Any]:
        """What has to be given besides the tokens."""
        del tokens_BT
        return {}

    @property
    def _device(self) -> torch.device:
        first = None if self.module is None else next(self.module.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def _token_embedding(self) -> nn.Embedding:
        if self._embedding is None:
            raise InputError(
                f"{self.name} has no nn.Embedding that reads the tokens; leave embeddings out of the request"
            )
        assert self.module is not None
        table = self.module.get_submodule(self._embedding)
        assert isinstance(table, nn.Embedding)
        return table

    def _try_out(self, known: bool) -> tuple[str | None, int]:
        """The table that reads the tokens, by name, and the vocabulary's size: seen by asking for two."""
        named = [] if self.module is None else list(self.module.named_modules())
        tables = {name: m for name, m in named if isinstance(m, nn.Embedding)}
        tokens_BT = torch.tensor([[1, 0]], device=self._device)
        readers: set[str] = set()
        with ExitStack() as stack:
            stack.enter_context(preserve_state(self.module))
            stack.enter_context(torch.no_grad())
            for name, table in tables.items():
                hook = partial(_note, readers, name, tokens_BT.clone())
                stack.callback(table.register_forward_hook(hook).remove)
            try:
                size = self._tried(tokens_BT)
                self._refuse_swapped()
            except _WrongShapeError as error:
                raise InputError(str(error)) from None
            except Exception as error:  # anybody's code; the audit itself reports what it raises
                if known:
                    return None, 0
                raise InputError(
                    f"the vocabulary's size cannot be read off {self.name}, which raised "
                    f"{type(error).__name__}: {one_line(error)}; give TokensProbe(target, vocab_size=…)"
                ) from error
        if len(readers) != 1:
            return None, size
        name = readers.pop()
        return name, min(size, tables[name].num_embeddings)


class _WrongShapeError(ShapeError):
    """Logits of no known shape, or with axes in another order."""


def _parameters(target: object) -> dict[str, inspect.Parameter]:
    called = target.forward if isinstance(target, nn.Module) else target
    try:
        return dict(inspect.signature(cast(Callable[..., object], called)).parameters)
    except (TypeError, ValueError):
        return {}


def _note(
    readers: set[str],
    name: str,
    tokens_BT: Tensor,
    module: nn.Module,
    inputs: tuple[object, ...],
    output: object,
) -> None:
    """A forward hook: the table was handed the very tokens."""
    del module, output
    given = inputs[0] if inputs else None
    if isinstance(given, Tensor) and given.shape == tokens_BT.shape and torch.equal(given.long(), tokens_BT):
        readers.add(name)
