"""Ready probes for common signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.audits.method.care import left_as_found
from pellucid.audits.method.layers import stacks
from pellucid.audits.method.measure import Run
from pellucid.errors import InputError, ShapeError, one_line
from pellucid.probe import Capability, Probe, Request, Visibility, embeddings_replaced
from pellucid.visibility import causal


class TokensProbe(Probe):
    """Any ``forward(tokens) -> logits`` ``[B, T] -> [B, T, V]``: a module or a plain function.

    What it returns may also be an object whose ``.logits`` are these.

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
        self.rules, self.declared = (causal(),) if rules is None else tuple(rules), rules is not None
        self.name = name or str(getattr(target, "__name__", type(target).__name__))
        self.module = target if isinstance(target, nn.Module) else None
        self._embedding, seen = self._try_out(vocab_size is not None)
        self.vocab_size = seen if vocab_size is None else vocab_size
        if len(self.rules) == 1 and self.vocab_size:
            self.rules *= max(len(self._layers()), 1)
        self.capabilities: frozenset[Capability] = frozenset() if self._embedding is None else frozenset({"embeddings"})

    def logits(self, request: Request) -> Tensor:
        given = self._given(request)
        if request.embeddings is None:
            return self._called(request.tokens, **given)
        with embeddings_replaced(self._token_embedding, request.embeddings):
            return self._called(request.tokens, **given)

    def _given(self, request: Request) -> dict[str, Any]:
        """What the target is told by name, beside the tokens."""
        del request
        return {}

    def embed(self, request: Request) -> Tensor:
        result: Tensor = self._token_embedding(request.tokens)
        return result

    def over(self, module: nn.Module) -> TokensProbe:
        probe = type(self)(
            module, vocab_size=self.vocab_size, rules=self.rules, max_length=self.max_length, name=self.name
        )
        probe.declared = self.declared
        return probe

    def _layers(self) -> tuple[str, ...]:
        """The names of the layers, where there is one stack of them and no other."""
        if self.module is None:
            return ()
        with left_as_found(self.module):
            try:
                found = stacks(Run(self), Request.from_rows([[1, 0]]))
            except Exception:  # noqa: BLE001 (anybody's code; the audit itself reports what it raises)
                return ()
        return found[0] if len(found) == 1 else ()

    def _called(self, tokens_BT: Tensor, **given: Any) -> Tensor:
        result = self.target(tokens_BT, **given)
        logits = result if isinstance(result, Tensor) else getattr(result, "logits", None)
        if not isinstance(logits, Tensor):
            raise ShapeError(
                f"{self.name} returned {type(result).__name__}; an audit needs a tensor [rows, slots, "
                "vocabulary] or an object whose .logits is one: wrap the call in a function"
            )
        return logits

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
            stack.enter_context(left_as_found(self.module))
            stack.enter_context(torch.no_grad())
            for name, table in tables.items():
                hook = partial(_note, readers, name, tokens_BT.clone())
                stack.callback(table.register_forward_hook(hook).remove)
            try:
                size = self._called(tokens_BT, **self._try_arguments(tokens_BT)).shape[-1]
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
