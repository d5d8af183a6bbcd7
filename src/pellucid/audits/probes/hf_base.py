"""How transformers models are called: causal LMs, encoders that fill gaps, encoder–decoders.

Nothing is imported from transformers: a model is known by its ``config`` and by what its ``forward`` takes, and
what it can be asked is found by asking (``hf_tries``). Conventions, which are those of the library's users:

* ``attention_mask`` is given where something is padded, and left out where nothing is; asked in the way
  ``ALL_ONES`` it is always given, as tokenizers do.
* ``position_ids`` are given where slots do not say them: to the right of padding and in packs. A cache has to
  know by itself where it goes on, and a model how positions are counted from a mask where it takes no ids.
* Packed documents are told by position ids that start again, without a mask and without a cache.
* Only left-padded prompts go on from a cache.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.audits.probes.hf_cache import HFCache, refuse_gaps
from pellucid.audits.probes.hf_found import Found, remembers, replaced
from pellucid.audits.probes.hf_rules import Kind, looks_back, padded_right, rules_of, text_config
from pellucid.audits.probes.hf_tries import found_in
from pellucid.batch import Batch
from pellucid.errors import InputError, UnsupportedError, one_line
from pellucid.probe import Probe, embeddings_replaced

ALL_ONES = "with an all-ones mask"
POSITIONS = "with position ids given"
IGNORED = -100


class HFProbe(Probe):
    """What the three kinds have in common. ``model`` is any module with a ``config`` that is called like them."""

    kind: Kind = "causal"
    hidden_states = False
    """Whether hidden states are watched because there are no logits."""
    assumes_shift_invariance = True
    """That only distances count is read off the config; nobody promised it."""
    token_argument, mask_argument = "input_ids", "attention_mask"
    position_argument, embeddings_argument = "position_ids", "inputs_embeds"

    def __init__(self, model: nn.Module, name: str | None = None) -> None:
        if not hasattr(model, "config"):
            raise InputError(f"{type(model).__name__} has no config, so it is no transformers model; use TokensProbe")
        self.module: nn.Module = model
        self.name = name or type(model).__name__
        self.takes = frozenset(inspect.signature(model.forward).parameters)
        self.forbidden_tokens = forbidden_tokens(model.config)
        self.vocab_size = int(getattr(text_config(model.config), "vocab_size", 0)) or _rows(model)
        if self.vocab_size - len(self.forbidden_tokens) < 2:  # nothing else is there
            pad = getattr(model.config, "pad_token_id", None)
            self.forbidden_tokens = frozenset({pad} if isinstance(pad, int) and self.vocab_size > 2 else ())
        self._set_rules(model.config)
        self.found = Found()
        self._way = ""
        self.found = found_in(self)
        self.capabilities, self.kernels = self.found.capabilities, self.found.kernels
        self.sides, self.max_length = self.found.sides, self.found.max_length
        self.position_shifting_sides, self.refused = self.found.position_shifting_sides, self.found.refused
        self.shift_allowed = self.kind != "causal" or not looks_back(self.rules) or padded_right(model.config)
        self.vocab_size = min(self.vocab_size, self.found.scores or self.vocab_size)
        given = {ALL_ONES: self.mask_argument, POSITIONS: self.position_argument}
        self.call_modes = tuple(way for way, argument in given.items() if self._can_be_given(argument))
        self.shift_invariant = "positions" in self.capabilities and not remembers(model) and _only_rotates(model.config)

    def logits(self, batch: Batch) -> Tensor:
        with self._embeddings(batch):
            return self.scores_of(self.ask(self.arguments(batch)))

    def scores_of(self, answer: Any) -> Tensor:
        """The logits; of a model without a head its last hidden states, which are watched in their place."""
        for name in ("logits", "last_hidden_state"):
            scores = getattr(answer, name, None)
            if isinstance(scores, Tensor):
                self.hidden_states = name != "logits"
                return scores
        known = ", ".join(answer) if isinstance(answer, dict) else type(answer).__name__
        raise InputError(
            f"{self.name} gives {known or 'nothing'}, but neither logits nor last_hidden_state; audit the model in it"
        )

    def embed(self, batch: Batch) -> Tensor:
        embeddings_BTD: Tensor = self._table(batch.tokens)
        return embeddings_BTD

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """transformers gives a mean. Where it takes a divisor it is asked for the sum, which gives the count too."""
        labels_BT, expected = self.labels(batch)
        arguments = self.arguments(batch)
        with self._embeddings(batch):
            if not self.found.divisor:
                mean = self.ask(arguments, labels=labels_BT).loss
                nothing = mean.nan_to_num(0.0) * 0.0  # the mean over nothing is no number, which says nothing
                return (mean * expected if int(expected) else nothing), expected
            total: Tensor = self.ask(arguments, labels=labels_BT, num_items_in_batch=1).loss
            with torch.no_grad():
                mean = self.ask(arguments, labels=labels_BT).loss
        counted = (total.detach() / mean).round().nan_to_num(0.0)
        return total, torch.where(mean == 0, expected, counted).long()

    def labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What a user hands over, the others ignored, and how many will count: the tokens themselves, or those of the
        next slot for a class whose documentation says that it does not shift them."""
        labels_BT = torch.where(batch.loss_mask, batch.tokens, IGNORED)
        if self.found.shifts:
            return labels_BT, batch.loss_mask[:, 1:].sum()
        return torch.cat([labels_BT[:, 1:], torch.full_like(labels_BT[:, :1], IGNORED)], 1), batch.loss_mask[
            :, 1:
        ].sum()

    def new_cache(self, rows: int, capacity: int) -> HFCache:
        del rows, capacity  # it grows
        return HFCache()

    def extend(self, batch: Batch, cache: Any) -> Tensor:
        real_BS = cache.with_next(batch.token_mask)
        refuse_gaps(self.name, real_BS)
        arguments = self.arguments(batch, cache.slots, batch.token_mask if self.found.local_mask else real_BS)
        if cache.held is not None:
            arguments[self.found.cache_argument] = cache.held
        with self._embeddings(batch):
            answer = self._went_on(arguments, cache)
        cache.held, cache.real = getattr(answer, self.found.cache_attribute), real_BS
        return self.scores_of(answer)

    def _went_on(self, arguments: dict[str, Any], cache: HFCache) -> Any:
        """A model that raises when it is to go on has refused, which is no fault of what it answers."""
        try:
            return self.ask(arguments, use_cache=True)
        except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
            if cache.held is None:
                raise
            raise UnsupportedError(f"{self.name} does not go on from its cache like this: {one_line(error)}") from error

    def attention(self, batch: Batch) -> list[Tensor]:
        with self.kernel("eager"), self._embeddings(batch):
            answer = self.ask(self.arguments(batch), output_attentions=True)
        return [layer for layer in getattr(answer, self.found.attention_attribute) if layer is not None]

    @contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        configs = _configs(self.module)
        before = [config._attn_implementation for config in configs]
        try:
            self.module.set_attn_implementation(name)  # type: ignore[operator]
            yield
        finally:
            for config, implementation in zip(configs, before, strict=True):
                config._attn_implementation_internal = implementation

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        names = ("gradient_checkpointing", "_gradient_checkpointing_func")
        parts = [part for part in self.module.modules() if hasattr(part, names[0])]
        before = [{name: getattr(part, name) for name in names if hasattr(part, name)} for part in parts]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the name is to change
                self.module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            yield
        finally:
            self.module.gradient_checkpointing_disable()  # type: ignore[operator]
            for part, kept in zip(parts, before, strict=True):
                for name, value in kept.items():
                    setattr(part, name, value)

    def call_mode(self, name: str) -> AbstractContextManager[None]:
        return replaced(self, "_way", name)

    def with_module(self, module: nn.Module) -> HFProbe:
        twin = copy.copy(self)
        twin.module = module
        return twin

    # how it is called

    def ask(self, arguments: dict[str, Any], **more: Any) -> Any:
        """The forward; without a cache unless one is asked for."""
        if "use_cache" in self.takes:
            arguments = {"use_cache": False} | arguments
        if "return_dict" in self.takes:
            arguments = {"return_dict": True} | arguments
        with _masks_for_float32(self.module):
            return self.module(**arguments | more)

    def arguments(self, batch: Batch, start: int = 0, real_BS: Tensor | None = None) -> dict[str, Any]:
        """``start`` slots are in a cache already; ``real_BS`` are all of them with these."""
        real_BS = batch.token_mask if real_BS is None else real_BS
        packed = bool((batch.segments > 1).any())
        if packed and "packing" not in self.capabilities and self.found.tried:
            raise UnsupportedError(f"{self.name} cannot be told of several documents in a row; ask one a row")
        arguments: dict[str, Any] = {self.token_argument: self._tokens(batch)}
        hides = not bool(real_BS.all()) and not packed
        if self.mask_argument in self.takes and (hides or self._way == ALL_ONES):
            arguments[self.mask_argument] = real_BS.long()
        slots_T = start + torch.arange(batch.shape[1], device=batch.positions.device)
        told = bool((batch.token_mask & (batch.positions != slots_T)).any())
        if self.found.offset is not None and (told or self._way == POSITIONS):
            arguments[self.position_argument] = batch.positions + self.found.offset
        return arguments

    def _tokens(self, batch: Batch) -> Tensor:
        if self.found.pad is None:
            return batch.tokens
        return torch.where(batch.token_mask, batch.tokens, self.found.pad)

    def _can_be_given(self, argument: str) -> bool:
        return argument in self.takes and (argument != self.position_argument or self.found.offset is not None)

    def _set_rules(self, config: Any) -> None:
        said = rules_of(config, self.kind)
        self.rules, self.rules_declared = said.rules, said.rules_declared

    @property
    def _table(self) -> nn.Module:
        table: nn.Module = self.module.get_input_embeddings()  # type: ignore[operator]
        return table

    def _embeddings(self, batch: Batch) -> Any:
        return nullcontext() if batch.inputs_embeds is None else embeddings_replaced(self._table, batch.inputs_embeds)


def forbidden_tokens(config: Any) -> frozenset[int]:
    """Ids that mean something to the library: pads, ends, masks, image marks."""
    given: set[int] = set()
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        for key, value in vars(part).items():
            if key.endswith(("_token_id", "_token_ids", "_token_index", "_token_idx")) or key == "pad_index":
                given.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(value for value in given if isinstance(value, int) and value >= 0)


@contextmanager
def _masks_for_float32(module: nn.Module) -> Iterator[None]:
    """A float64 copy hides by float32's lowest number: float64's is minus infinity to softmaxes taken in float32."""
    masks, first = sys.modules.get("transformers.masking_utils"), next(module.parameters(), None)
    if masks is None or first is None or first.dtype != torch.float64:
        yield
        return
    table = masks.ALL_MASK_ATTENTION_FUNCTIONS
    before, own = table["eager"], getattr(table, "_local_mapping", {}).get("eager")

    def hidden(*given: Any, dtype: torch.dtype = torch.float32, **named: Any) -> Any:
        return before(*given, dtype=torch.float32 if dtype == torch.float64 else dtype, **named)

    table["eager"] = hidden
    try:
        yield
    finally:
        if own is None:
            del table["eager"]
        else:
            table["eager"] = own


def _rows(model: nn.Module) -> int:
    table = model.get_input_embeddings()  # type: ignore[operator]
    return int(table.weight.shape[0])


def _configs(model: nn.Module) -> list[Any]:
    """Every config in the model that names an attention implementation."""
    held = [getattr(part, "config", None) for part in model.modules()]
    nested = [value for config in held if config is not None for value in vars(config).values()]
    configs = {id(config): config for config in (*held, *nested) if hasattr(config, "_attn_implementation")}
    return list(configs.values())


def _only_rotates(config: Any) -> bool:
    """Whether nothing but differences of positions enters: plain rotary angles."""
    text = text_config(config)
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or not rope:
        return False
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    kinds = {part.get("rope_type", "default") for part in parts}
    if any("expert" in name and type(value) is int and value > 1 for name, value in vars(text).items()):
        return False  # a router turns rounding into another choice
    odd = ("attn_temperature_tuning", "attention_chunk_size", "llama_4_scaling_beta", "position_embedding_type")
    scaled = any("llama_4_scaling_beta" in part for part in parts)
    return (
        kinds <= {"default", "linear", "llama3", "yarn"} and not scaled and not any(getattr(text, n, None) for n in odd)
    )
