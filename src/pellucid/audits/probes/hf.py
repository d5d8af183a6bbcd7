"""The three kinds of transformers models, and which of them a model is."""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.audits.probes.hf_base import ALL_ONES, IGNORED, POSITIONS, HFProbe
from pellucid.audits.probes.hf_rules import Kind, rules_of, source_rules_of
from pellucid.batch import Batch

__all__ = ["ALL_ONES", "POSITIONS", "HFCausalProbe", "HFMaskedProbe", "HFProbe", "HFSeq2SeqProbe", "probe_for_hf"]


class HFCausalProbe(HFProbe):
    """A causal language model; labels are shifted inside the model."""


class HFMaskedProbe(HFProbe):
    """An encoder that fills gaps: a label belongs to the slot it stands in."""

    kind: Kind = "masked"
    predicts_from = 0

    def labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.where(batch.loss_mask, batch.tokens, IGNORED), batch.loss_mask.sum()


class HFSeq2SeqProbe(HFProbe):
    """An encoder–decoder: a request's tokens go to the decoder, its source to the encoder.

    A request without a source is asked beside a fixed one. Labels are those of the next slot: the library shifts
    them only to make decoder inputs of them, and here these are given.
    """

    kind: Kind = "seq2seq"
    token_argument, mask_argument = "decoder_input_ids", "decoder_attention_mask"
    position_argument, embeddings_argument = "decoder_position_ids", "decoder_inputs_embeds"

    def embed(self, batch: Batch) -> Tensor:
        table = self.module.get_decoder().get_input_embeddings()  # type: ignore[operator]
        embeddings_BTD: Tensor = table(batch.tokens)
        return embeddings_BTD

    def arguments(self, batch: Batch, start: int = 0, real_BS: Tensor | None = None) -> dict[str, Any]:
        arguments = super().arguments(batch, start, real_BS)
        if batch.inputs_embeds is not None:
            del arguments[self.token_argument]
            arguments[self.embeddings_argument] = batch.inputs_embeds
        source = self._source(batch)
        arguments["input_ids"] = self._tokens(source)
        if source.inputs_embeds is not None:
            del arguments["input_ids"]
            arguments["inputs_embeds"] = source.inputs_embeds
        if "attention_mask" in self.takes and (not bool(source.token_mask.all()) or self._way == ALL_ONES):
            arguments["attention_mask"] = source.token_mask.long()
        return arguments

    def labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().labels(batch)

    def _source(self, batch: Batch) -> Batch:
        if batch.source is not None:
            return batch.source
        free = [token for token in range(self.vocab_size) if token not in self.forbidden_tokens][-4:]
        return Batch.from_rows([free] * batch.shape[0]).to(batch.tokens.device)

    def _set_rules(self, config: Any) -> None:
        super()._set_rules(config)
        source = source_rules_of(config)
        self.source_rules, self.source_rules_declared = source.rules, source.rules_declared
        encoder = self.module.get_encoder()  # type: ignore[operator]
        self.memory_name = next((name for name, part in self.module.named_modules() if part is encoder), None)

    def _embeddings(self, batch: Batch) -> Any:
        del batch  # they are arguments here
        return nullcontext()


def probe_for_hf(model: object, name: str | None = None) -> HFProbe | None:
    """The probe for a transformers model; None for what is none. It is known by what it has, not by its class."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config") or not hasattr(model.config, "to_dict"):
        return None
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        return None
    if "decoder_input_ids" in takes:
        return HFSeq2SeqProbe(model, name)
    return (HFMaskedProbe if _fills_gaps(model) else HFCausalProbe)(model, name)


def _fills_gaps(model: nn.Module) -> bool:
    """By its name, or, where a class has one name for both, by a config that looks both ways."""
    if type(model).__name__.endswith("ForMaskedLM"):
        return True
    auto = sys.modules.get("transformers.models.auto.modeling_auto")
    masked = getattr(auto, "MODEL_FOR_MASKED_LM_MAPPING_NAMES", {})
    sees_ahead = all(rule.lookahead is None for rule in rules_of(model.config, "causal").rules)
    permuted = getattr(model.config, "attn_type", None) == "bi"  # XLNet: a target mapping says what is predicted
    return sees_ahead and (permuted or type(model).__name__ in masked.values())
