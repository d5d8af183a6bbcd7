"""How transformers models are called: causal language models, masked ones, encoder–decoders.

Nothing is imported from transformers: a model is known by its ``config`` and the arguments of its ``forward``, and
what it supports is found by calling it (``hf_detect``). The conventions are those of the library's users:

* ``attention_mask`` is passed where something is padded, and left out where nothing is; in the call mode ``ALL_ONES``
  it is always passed, as tokenizers do.
* ``position_ids`` are passed where slots do not imply them: to the right of padding and in packed rows. A cache has to
  know by itself where it continues, and a model how to count positions from a mask where it takes no ids.
* Packed documents are marked by position ids that start again, without a mask and without a cache.
* Only left-padded prompts are continued from a cache.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.audits.probes.hf_rules import (
    Kind,
    forbidden_tokens,
    rules_of,
    source_rules_of,
    text_config,
)
from pellucid.audits.probes.trial import attribute_set
from pellucid.batch import Batch
from pellucid.errors import ArgumentError, UnsupportedError, one_line
from pellucid.probe import Probe, embeddings_replaced

ALL_ONES = "with an all-ones mask"
POSITIONS = "with position ids given"
IGNORED = -100


@dataclass(frozen=True)
class HFCapabilities:
    """By which arguments a model does what it can, as far as ``hf_detect`` has found out (then it is ``complete``).

    Attributes:
        position_offset: what is added to positions; None where the model takes none.
        pad_token: stands in padded slots of a class that counts positions by the ids themselves.
        sums_loss: the loss can be had as a sum.
        shifts_labels: labels are shifted inside.
        cache_name: the argument for the cache, and the attribute of the output that holds it.
        local_mask: with a cache the mask is that of the new slots only, as recurrent classes take it.
        attention_name: the attribute of the output that holds attention weights.
    """

    position_offset: int | None = None
    pad_token: int | None = None
    sums_loss: bool = False
    shifts_labels: bool = True
    cache_name: str = ""
    local_mask: bool = False
    attention_name: str = ""
    complete: bool = False


@dataclass(eq=False)
class HFCache:
    """``state`` is the model's own cache, None before the first tokens; ``mask`` (``[B, S]``) marks tokens in it."""

    state: Any = None
    mask: Tensor | None = None

    @property
    def length(self) -> int:
        """Slots in use."""
        return 0 if self.mask is None else self.mask.shape[1]

    def with_next(self, mask_BT: Tensor, name: str) -> Tensor:
        """The mask of all slots so far and the next ones; padding between tokens of one row is refused."""
        mask_BS = mask_BT if self.mask is None else torch.cat([self.mask, mask_BT], 1)
        started_BS, continued_BS = mask_BS.cumsum(1) > 0, mask_BS.flip(1).cumsum(1).flip(1) > 0
        if bool((started_BS & continued_BS & ~mask_BS).any()):
            raise UnsupportedError(f"{name} continues left-padded prompts only; pad on the left")
        return mask_BS

    def reorder(self, index_B: Tensor) -> None:
        assert self.mask is not None
        self.state.reorder_cache(index_B)
        self.mask = self.mask[index_B]

    def crop(self, keep: int) -> None:
        """transformers takes the number of tokens to remove, as a negative number."""
        remove = min(self.length - keep if keep >= 0 else -keep, self.length)
        if remove <= 0 or self.mask is None:
            return
        try:
            self.state.crop(-remove)
        except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
            reason = str(error).partition(".")[0] or type(error).__name__
            raise UnsupportedError(f"the cache cannot be cropped: {reason}") from error
        self.mask = self.mask[:, : self.length - remove]

    def snapshot(self) -> HFCache:
        return copy.deepcopy(self)


class HFProbe(Probe):
    """What the three kinds have in common. ``model`` is any module with a ``config`` that is called like them.

    Made by :func:`~pellucid.audits.probes.hf_detect.probe_for_hf`, which finds out what the model supports.
    """

    kind: Kind = "causal"
    hidden_states = False
    """Whether hidden states stand in for logits."""
    assumes_shift_invariance = True
    """That only distances count is read off the config; the model does not declare it."""
    token_argument, mask_argument = "input_ids", "attention_mask"
    position_argument, embeddings_argument = "position_ids", "inputs_embeds"

    def __init__(self, model: nn.Module, name: str | None = None) -> None:
        if not hasattr(model, "config"):
            raise ArgumentError(
                f"{type(model).__name__} has no config, so it is no transformers model; use TokensProbe"
            )
        self.module: nn.Module = model
        self.name = name or type(model).__name__
        self.takes = frozenset(inspect.signature(model.forward).parameters)
        self.forbidden_tokens = forbidden_tokens(model.config)
        self.vocab_size = int(getattr(text_config(model.config), "vocab_size", 0)) or self._table.weight.shape[0]  # type: ignore[index,assignment]
        if self.vocab_size - len(self.forbidden_tokens) < 2:  # nothing else is there
            pad = getattr(model.config, "pad_token_id", None)
            self.forbidden_tokens = frozenset({pad} if isinstance(pad, int) and self.vocab_size > 2 else ())
        declared = rules_of(model.config, self.kind)
        self.rules, self.rules_declared = declared.rules, declared.rules_declared
        self.detected = HFCapabilities()
        self._call_mode = ""

    def logits(self, batch: Batch) -> Tensor:
        with self._embeddings(batch):
            return self.scores_of(self.call(self.arguments(batch)))

    def scores_of(self, output: Any) -> Tensor:
        """The logits; of a model without a head its last hidden states, which are compared in their place."""
        for name in ("logits", "last_hidden_state"):
            scores = getattr(output, name, None)
            if isinstance(scores, Tensor):
                self.hidden_states = name != "logits"
                return scores
        known = ", ".join(output) if isinstance(output, dict) else type(output).__name__
        raise ArgumentError(
            f"{self.name} returns {known or 'nothing'}, but neither logits nor last_hidden_state; audit the model in it"
        )

    def embed(self, batch: Batch) -> Tensor:
        embeddings_BTD: Tensor = self._table(batch.tokens)
        return embeddings_BTD

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """transformers returns a mean. Where it takes a divisor, the sum is computed, which gives the count too."""
        labels_BT, expected = self.labels(batch)
        arguments = self.arguments(batch)
        with self._embeddings(batch):
            if not self.detected.sums_loss:
                mean = self.call(arguments, labels=labels_BT).loss
                nothing = mean.nan_to_num(0.0) * 0.0  # the mean over nothing is no number
                return (mean * expected if int(expected) else nothing), expected
            total: Tensor = self.call(arguments, labels=labels_BT, num_items_in_batch=1).loss
            with torch.no_grad():
                mean = self.call(arguments, labels=labels_BT).loss
        counted = (total.detach() / mean).round().nan_to_num(0.0)
        return total, torch.where(mean == 0, expected, counted).long()

    def labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The labels that a user passes, and how many will count: the tokens themselves, or those of the next slot for
        a class whose documentation says that it does not shift them."""
        labels_BT, count = torch.where(batch.loss_mask, batch.tokens, IGNORED), batch.loss_mask[:, 1:].sum()
        if not self.detected.shifts_labels:
            labels_BT = torch.cat([labels_BT[:, 1:], torch.full_like(labels_BT[:, :1], IGNORED)], 1)
        return labels_BT, count

    def new_cache(self, rows: int, capacity: int) -> HFCache:
        del rows, capacity  # it grows
        return HFCache()

    def extend(self, batch: Batch, cache: HFCache) -> Tensor:
        mask_BS = cache.with_next(batch.token_mask, self.name)
        mask = batch.token_mask if self.detected.local_mask else mask_BS
        arguments = self.arguments(batch, cache.length, mask)
        if cache.state is not None:
            arguments[self.detected.cache_name] = cache.state
        try:
            with self._embeddings(batch):
                output = self.call(arguments, use_cache=True)
        except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
            if cache.state is None:
                raise
            raise UnsupportedError(f"{self.name} does not continue from its cache here: {one_line(error)}") from error
        cache.state, cache.mask = getattr(output, self.detected.cache_name), mask_BS
        return self.scores_of(output)

    def attention(self, batch: Batch) -> list[Tensor]:
        with self.kernel("eager"), self._embeddings(batch):
            output = self.call(self.arguments(batch), output_attentions=True)
        return [layer for layer in getattr(output, self.detected.attention_name) if layer is not None]

    @contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        parts = [getattr(part, "config", None) for part in self.module.modules()]
        nested = [value for config in parts if config is not None for value in vars(config).values()]
        configs = {id(each): each for each in (*parts, *nested) if hasattr(each, "_attn_implementation")}
        before = [(config, config._attn_implementation) for config in configs.values()]
        try:
            self.module.set_attn_implementation(name)  # type: ignore[operator]
            yield
        finally:
            for config, implementation in before:
                config._attn_implementation_internal = implementation

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        names = ("gradient_checkpointing", "_gradient_checkpointing_func")
        parts = [part for part in self.module.modules() if hasattr(part, names[0])]
        before = [(part, name, getattr(part, name)) for part in parts for name in names if hasattr(part, name)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the name is to change
                self.module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            yield
        finally:
            self.module.gradient_checkpointing_disable()  # type: ignore[operator]
            for part, name, value in before:
                setattr(part, name, value)

    def call_mode(self, name: str) -> AbstractContextManager[None]:
        return attribute_set(self, "_call_mode", name)

    def with_module(self, module: nn.Module) -> HFProbe:
        probe = copy.copy(self)
        probe.module = module
        return probe

    # how it is called

    def call(self, arguments: dict[str, Any], **more: Any) -> Any:
        """The forward pass; without a cache unless ``more`` wants one."""
        defaults = {"use_cache": False, "return_dict": True}
        arguments = {name: value for name, value in defaults.items() if name in self.takes} | arguments
        with _masks_for_float32(self.module):
            return self.module(**arguments | more)

    def arguments(self, batch: Batch, start: int = 0, token_mask: Tensor | None = None) -> dict[str, Any]:
        """``start`` slots are in a cache already; ``token_mask`` marks the tokens among them and these."""
        mask_BS = batch.token_mask if token_mask is None else token_mask
        packed = bool((batch.segments > 1).any())
        if packed and "packing" not in self.capabilities and self.detected.complete:
            raise UnsupportedError(f"{self.name} cannot take several documents in a row; give one a row")
        arguments: dict[str, Any] = {self.token_argument: self._tokens(batch)}
        hides = not bool(mask_BS.all()) and not packed
        if self.mask_argument in self.takes and (hides or self._call_mode == ALL_ONES):
            arguments[self.mask_argument] = mask_BS.long()
        slots_T = start + torch.arange(batch.shape[1], device=batch.positions.device)
        moved = bool((batch.token_mask & (batch.positions != slots_T)).any())
        if self.detected.position_offset is not None and (moved or self._call_mode == POSITIONS):
            arguments[self.position_argument] = batch.positions + self.detected.position_offset
        return arguments

    def _tokens(self, batch: Batch) -> Tensor:
        if self.detected.pad_token is None:
            return batch.tokens
        return torch.where(batch.token_mask, batch.tokens, self.detected.pad_token)

    @property
    def _table(self) -> nn.Module:
        table: nn.Module = self.module.get_input_embeddings()  # type: ignore[operator]
        return table

    def _embeddings(self, batch: Batch) -> AbstractContextManager[None]:
        return nullcontext() if batch.inputs_embeds is None else embeddings_replaced(self._table, batch.inputs_embeds)


class HFCausalProbe(HFProbe):
    """A causal language model; labels are shifted inside the model."""


class HFMaskedProbe(HFProbe):
    """An encoder that fills gaps: a label belongs to the slot it stands in."""

    kind: Kind = "masked"
    predicts_from = 0

    def labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.where(batch.loss_mask, batch.tokens, IGNORED), batch.loss_mask.sum()


class HFSeq2SeqProbe(HFProbe):
    """An encoder–decoder: the tokens go to the decoder, the source to the encoder; without a source, a fixed one.

    Labels are those of the next slot: the library shifts them only to make decoder inputs, which are given here.
    """

    kind: Kind = "seq2seq"
    token_argument, mask_argument = "decoder_input_ids", "decoder_attention_mask"
    position_argument, embeddings_argument = "decoder_position_ids", "decoder_inputs_embeds"

    def __init__(self, model: nn.Module, name: str | None = None) -> None:
        super().__init__(model, name)
        source = source_rules_of(model.config)
        self.source_rules, self.source_rules_declared = source.rules, source.rules_declared
        encoder = model.get_encoder()  # type: ignore[operator]
        self.memory_name = next((name for name, part in model.named_modules() if part is encoder), None)

    def embed(self, batch: Batch) -> Tensor:
        table = self.module.get_decoder().get_input_embeddings()  # type: ignore[operator]
        embeddings_BTD: Tensor = table(batch.tokens)
        return embeddings_BTD

    def arguments(self, batch: Batch, start: int = 0, token_mask: Tensor | None = None) -> dict[str, Any]:
        arguments = super().arguments(batch, start, token_mask)
        if batch.inputs_embeds is not None:
            del arguments[self.token_argument]
            arguments[self.embeddings_argument] = batch.inputs_embeds
        source = batch.source
        if source is None:
            free = [token for token in range(self.vocab_size) if token not in self.forbidden_tokens][-4:]
            source = Batch.from_rows([free] * batch.shape[0]).to(batch.tokens.device)
        if source.inputs_embeds is None:
            arguments["input_ids"] = self._tokens(source)
        else:
            arguments["inputs_embeds"] = source.inputs_embeds
        if "attention_mask" in self.takes and (not bool(source.token_mask.all()) or self._call_mode == ALL_ONES):
            arguments["attention_mask"] = source.token_mask.long()
        return arguments

    def _embeddings(self, batch: Batch) -> AbstractContextManager[None]:
        del batch  # they are arguments here
        return nullcontext()


def is_recurrent(module: nn.Module) -> bool:
    """Whether something besides attention carries tokens on: recurrences and convolutions take no positions."""
    if any(isinstance(part, nn.Conv1d) for part in module.modules()):
        return True
    words = ("mamba", "recurrent", "linear_attention", "conv", "hybrid", "compress")
    kinds = getattr(text_config(module.config), "layer_types", None) or ()
    return any(word in str(kind) for kind in kinds for word in words)


@contextmanager
def _masks_for_float32(module: nn.Module) -> Iterator[None]:
    """A float64 copy hides by float32's lowest number: float64's is minus infinity to softmaxes taken in float32."""
    masks, first = sys.modules.get("transformers.masking_utils"), next(module.parameters(), None)
    if masks is None or first is None or first.dtype != torch.float64:
        yield
        return
    table = masks.ALL_MASK_ATTENTION_FUNCTIONS
    before, own = table["eager"], getattr(table, "_local_mapping", {}).get("eager")

    def float32_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
        return before(*args, dtype=torch.float32 if dtype == torch.float64 else dtype, **kwargs)

    table["eager"] = float32_mask
    try:
        yield
    finally:
        if own is None:
            del table["eager"]
        else:
            table["eager"] = own
