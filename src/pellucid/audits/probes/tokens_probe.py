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
    call_hint,
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
from pellucid.visibility import causal, full

_LENGTHS = (2, 8, 16, 24, 32, 64, *range(3, 64), 128, 256)  # tokens of the first call, tried in this order
_VECTORS = 32  # different vectors where a target takes no tokens


class TokensProbe(Probe):
    """Any ``forward(tokens) -> logits`` ``[B, T] -> [B, T, V]``: a module or a plain function.

    Logits may also be one of several outputs: the one called ``logits``, or the first tensor of three dimensions; one
    number for each token will do, and so will one output ``[B, C]`` for each row, as classifiers have. A module that
    takes vectors in place of tokens is given 32 random ones, one for each token of a vocabulary of their own. Where the
    target takes ``labels``, ``targets`` or ``y`` and returns a loss for them, the loss is audited too.

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
        self._vectors: Tensor | None = None
        self.known_length = 2
        """A number of tokens that it takes."""
        self.pooled, self._undeclared = False, rules is None
        """Whether there is one output for a whole row, which then stands at each of its tokens."""
        self._embedding, seen = self._first_call(vocab_size is not None)
        self.vocab_size = seen if vocab_size is None else vocab_size
        if len(self.rules) == 1 and self.vocab_size:
            self.rules *= max(len(self._layers()), 1)
        embeds = self._embedding is not None or self._vectors is not None
        self.capabilities: frozenset[Capability] = frozenset({"embeddings"} if embeds else ())
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
            return self._call(self._input(batch), **self._kwargs(batch))

    def embed(self, batch: Batch) -> Tensor:
        result: Tensor = self._input(batch) if self._vectors is not None else self._table(batch.tokens)
        return result

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self._labels is None:
            return super().loss(batch)
        labels_BT, expected = self._labels.labels(batch)
        with self._embeddings(batch):
            loss = loss_in(self.target(self._input(batch), **self._kwargs(batch), **{self._labels.name: labels_BT}))
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
        found = [] if self._labels is None else [self._labels.describe()]
        if self.pooled:
            found.append("its one output for each row is compared, so who sees whom within a row is not")
        if self._vectors is not None:
            found.append(f"its inputs are taken to be vectors of {self._vectors.shape[1]} numbers")
        return "; ".join(found)

    def _embeddings(self, batch: Batch) -> AbstractContextManager[None]:
        if batch.inputs_embeds is None or self._vectors is not None:
            return nullcontext()
        return embeddings_replaced(self._table, batch.inputs_embeds)

    def _input(self, batch: Batch) -> Tensor:
        """The tokens, or the vectors that stand for them."""
        if self._vectors is None:
            return batch.tokens
        if batch.inputs_embeds is not None:
            return batch.inputs_embeds
        first = None if self.module is None else next(self.module.parameters(), None)
        return self._vectors.to(batch.tokens.device)[batch.tokens].to(self._vectors if first is None else first)

    def _kwargs(self, batch: Batch) -> dict[str, Any]:
        """What is passed by name, besides the tokens."""
        del batch
        return {}

    def _required_kwargs(self, tokens_BT: Tensor) -> dict[str, Any]:
        """What must be passed besides the tokens."""
        del tokens_BT
        return {}

    def _call(self, input: Tensor, **kwargs: Any) -> Tensor:
        """``input`` are tokens ``[B, T]``, or vectors ``[B, T, D]``."""
        if self._always is not None:
            kwargs.setdefault(self._always, input.clone())
        result = self.target(input, **kwargs)
        logits = logits_in(result, tuple(input.shape[:2]))
        rows, slots = input.shape[:2]
        if self.pooled and logits is not None and logits.dim() < 3:
            logits = logits.reshape(rows, 1, -1).expand(-1, slots, -1)
        elif logits is not None and logits.is_floating_point() and logits.shape == (rows, slots):
            logits = logits[..., None]  # one number for each token
        if logits is None:
            raise ShapeError(
                f"{self.name} returned {describe_output(result)}; an audit needs logits [rows, slots, vocabulary], "
                f"alone, in a tuple or by that name: wrap the call in a function{factory_hint(result)}"
            )
        return logits

    # found out when the probe is made

    def _first_call(self, vocab_known: bool) -> tuple[str | None, int]:
        """The name of the table that reads the tokens, and the size of the vocabulary: seen in a call with a few.

        Targets that take no short rows, or multiples of some number only, are called with longer ones.
        """
        raised: list[Exception] = []
        with preserve_state(self.module), torch.no_grad():
            for slots in _LENGTHS:
                try:
                    tokens_BT = torch.tensor([([1, 0] * slots)[:slots]], device=self._device)
                    found = self._table_and_size(tokens_BT)
                    self.known_length = slots
                    return found
                except _WrongShapeError as error:
                    raise ArgumentError(str(error)) from None
                except Exception as error:  # noqa: BLE001 (anybody's code; the audit itself reports what it raises)
                    raised.append(error)
            if self._takes_vectors():
                return None, _VECTORS
            if vocab_known:
                return None, 0
        raise ArgumentError(
            f"{self.name} cannot be called with token ids [1, {_LENGTHS[0]}]: it raised {type(raised[0]).__name__}: "
            f"{one_line(raised[0])}; {call_hint(raised[0])}"
        ) from raised[0]

    def _table_and_size(self, tokens_BT: Tensor) -> tuple[str | None, int]:
        named = [] if self.module is None else list(self.module.named_modules())
        tables = {name: m for name, m in named if isinstance(m, nn.Embedding)}
        readers: set[str] = set()
        with ExitStack() as stack:
            for name, table in tables.items():
                hook = partial(_note_reader, readers, name, tokens_BT.clone())
                stack.callback(table.register_forward_hook(hook).remove)
            size = self._count_logits(tokens_BT)
            self._refuse_swapped_axes()
        if len(readers) != 1:
            return None, size
        name = readers.pop()
        rows = tables[name].num_embeddings
        return name, rows if size == 1 or self.pooled else min(size, rows)

    def _takes_vectors(self) -> bool:
        """Whether it takes vectors as long as one of its first parts does: a series of numbers, or hidden states."""
        sizes = [
            getattr(part, name, None)
            for part in (() if self.module is None else self.module.modules())
            for name in ("in_features", "in_channels", "input_size", "embed_dim")
        ]
        widths = dict.fromkeys(size for size in sizes if isinstance(size, int))
        generator = torch.Generator().manual_seed(0)
        for width in list(widths)[:8]:
            self._vectors = torch.randn(_VECTORS, width, generator=generator, dtype=torch.float64)
            with suppress(Exception, SystemExit):
                rows = [Batch.from_rows([list(range(slots))]).to(self._device) for slots in (8, 12)]
                if all(self.logits(batch).shape[:2] == batch.shape for batch in rows):
                    return True
        self._vectors = None
        return False

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
        if logits.dim() == 3 and logits.shape[2] == 1:  # one for each token, or two for the row
            with suppress(Exception, SystemExit):
                longer_BT = torch.cat([tokens_BT, tokens_BT], 1)
                longer = self._call(longer_BT, **self._required_kwargs(longer_BT))
                logits = longer if longer.dim() == 2 else logits
        if logits.shape == (rows,):
            logits = logits[:, None]
        one_a_row = logits.dim() == 2 and logits.shape[0] == rows and not self._is_vocabulary(logits.shape[1])
        if one_a_row and self._undeclared:
            self.pooled, self.rules, self.shift_allowed = True, (full(),), True
            return logits.shape[1]
        if logits.dim() != 3 or logits.shape[:2] != tokens_BT.shape:
            hint = shape_hint(tuple(logits.shape), rows, slots) or "wrap the call in a function that returns these"
            raise _WrongShapeError(
                f"{self.name} returned {tuple(logits.shape)} for {rows} row of {slots} tokens, but an audit needs "
                f"[{rows}, {slots}, vocabulary]; {hint}"
            )
        return logits.shape[-1]

    def _is_vocabulary(self, size: int) -> bool:
        """Whether so many outputs are scores of tokens, those of one slot only."""
        modules = () if self.module is None else self.module.modules()
        tables = [part.num_embeddings for part in modules if isinstance(part, nn.Embedding)]
        return not tables or any(size >= rows for rows in tables)

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
