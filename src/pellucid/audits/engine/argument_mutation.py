"""What a module is handed by its probe (masks, labels, positions, embeddings), before and after it answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.state import same_tensor
from pellucid.batch import Batch

_KEPT = re.compile(r"cache(?!_position)|past|kv|mems|(^|_)state$|^states$|inference_params", re.IGNORECASE)
_FILLED = re.compile(
    r"out|hidden|state|mem|attentions|collect|record|aux", re.IGNORECASE
)  # lists that are to be filled
_DEPTH = 4
Change = Callable[[dict[str, Any]], dict[str, Any]]
OtherCall = tuple[AbstractContextManager[None], Callable[[Batch], Any], Batch, Change | None]


@contextmanager
def watched(
    module: nn.Module | None, *, containers: bool = True, change: Change | None = None
) -> Iterator[dict[str, None]]:
    """While inside, calls of the module are watched: in order, the names of the arguments that it wrote into.

    Caches and states, which are there to be written into, are known by their names and left out; so are lists and
    mappings that are named as if outputs were to be put into them (all of them, without ``containers``). ``change``
    gives other arguments in place of those handed over by name.
    """
    written: dict[str, None] = {}
    if module is None or isinstance(module, torch.jit.ScriptModule):  # a script takes no hooks
        yield written
        return
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def before(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        given = kwargs if change is None else change(kwargs)
        named = {
            name: value for name, value in _named(part, args, given).items() if _is_looked_at(name, value, containers)
        }
        kept.append((named, {name: _copied(value, _DEPTH) for name, value in named.items()}))
        return None if change is None else (args, given)

    def after(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        del part, args, kwargs, output
        named, copies = kept.pop()
        for name, was in copies.items():
            written.update(dict.fromkeys(_differences(was, named[name], name)))

    handles = (
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    )
    try:
        yield written
    finally:
        for handle in handles:
            handle.remove()


def _is_looked_at(name: str, value: object, containers: bool) -> bool:
    if _KEPT.search(name):
        return False
    return isinstance(value, Tensor) or (containers and not _FILLED.search(name))


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; those without a name by their number."""
    try:
        signature = inspect.signature(module.forward)
        named = dict(signature.bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
        if parameter.kind is parameter.VAR_POSITIONAL:
            named |= {f"{name}[{number}]": value for number, value in enumerate(named.pop(name, ()))}
    return named


def _copied(value: Any, depth: int) -> Any:
    """Tensors and what is in plain containers, so that it can be compared later; other things are themselves."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if depth and isinstance(value, Mapping):
        return {key: _copied(item, depth - 1) for key, item in value.items() if not _KEPT.search(str(key))}
    if depth and isinstance(value, list | tuple):
        return [_copied(item, depth - 1) for item in value]
    return value


def _differences(was: Any, now: Any, name: str) -> Iterator[str]:
    """The places below ``name`` that hold something else than before."""
    if isinstance(was, Tensor):
        if not same_tensor(was, now.detach() if isinstance(now, Tensor) else now):
            yield name
    elif isinstance(was, dict) and isinstance(now, Mapping):
        if was.keys() != {key for key in now if not _KEPT.search(str(key))}:
            yield name
        for key in was.keys() & now.keys():
            yield from _differences(was[key], now[key], f"{name}[{key!r}]")
    elif isinstance(was, list) and isinstance(now, list | tuple):
        if len(was) != len(now):
            yield name
        for number, (before, after) in enumerate(zip(was, now, strict=False)):
            yield from _differences(before, after, f"{name}[{number}]")
    elif type(was) is not type(now) or (isinstance(was, int | float | str) and was != now and was == was):
        yield name


def other_calls(context: AuditContext, batch: Batch) -> Iterator[OtherCall]:
    """Call mode, method, request and change of arguments (see :func:`watched`): what ``batch`` alone does not show."""
    probe, nothing = context.probe, nullcontext()
    others = [Batch.from_rows([context.tokens(5)])]
    others += [Batch.from_rows(context.rows(), side=s) for s in context.one_sided[1:] if context.can("padding")]
    others += [Batch.packed(context.rows())] if context.can("packing") else []
    yield from ((nothing, probe.logits, other, None) for other in others)
    yield from ((probe.call_mode(mode), probe.logits, batch, None) for mode in probe.call_modes)
    if context.can("embeddings"):
        given = batch.replace(inputs_embeds=context.native.embed(batch))
        yield nothing, probe.logits, given, None
        yield nothing, probe.logits, batch, partial(_with_embeddings, context, given)
    if context.can("loss"):
        yield nothing, probe.loss, others[0], _every_token_a_label


def _with_embeddings(context: AuditContext, given: Batch, handed: dict[str, Any]) -> dict[str, Any]:
    """Embeddings in place of the token ids, where the module takes both by name."""
    tokens = getattr(context.probe, "token_argument", "input_ids")
    embeddings = getattr(context.probe, "embeddings_argument", "inputs_embeds")
    taken = inspect.signature(context.probe.module.forward).parameters  # type: ignore[union-attr]
    if tokens not in handed or embeddings not in taken:
        return handed
    return {**{name: value for name, value in handed.items() if name != tokens}, embeddings: given.inputs_embeds}


def _every_token_a_label(handed: dict[str, Any]) -> dict[str, Any]:
    """As many callers do it: the ids themselves are the labels, the first of them too."""
    ids, labels = handed.get("input_ids"), handed.get("labels")
    same = isinstance(ids, Tensor) and isinstance(labels, Tensor) and ids.shape == labels.shape
    return {**handed, "labels": ids.clone()} if same and isinstance(ids, Tensor) else handed
