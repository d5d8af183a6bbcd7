"""What a transformers model supports, found by calling it: what is claimed here has been seen to work.

A capability means that a model can be called so, not that the answer is right: that is for the checks.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pellucid.audits.engine.compare import is_refusal, unless_it_raises
from pellucid.audits.engine.state import preserve_state
from pellucid.audits.probes.hf_probe import (
    ALL_ONES,
    POSITIONS,
    HFCapabilities,
    HFCausalProbe,
    HFMaskedProbe,
    HFProbe,
    HFSeq2SeqProbe,
    is_recurrent,
)
from pellucid.audits.probes.hf_rules import looks_back, only_rotates, padded_right, rules_of, text_config
from pellucid.audits.probes.trial import (
    attribute_set,
    close,
    error_text,
    raised_by,
    supported_sides,
    works,
)
from pellucid.batch import Batch, Side
from pellucid.errors import ArgumentError
from pellucid.probe import Capability


def probe_for_hf(model: object, name: str | None = None) -> HFProbe | None:
    """The probe for a transformers model; None for what is none. It is known by what it has, not by its class.

    A few short rows are run through it, in eval mode; it is left as it was.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config") or not hasattr(model.config, "to_dict"):
        return None
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        return None
    kind = HFSeq2SeqProbe if "decoder_input_ids" in takes else HFMaskedProbe if _is_masked(model) else HFCausalProbe
    probe = kind(model, name)
    with ExitStack() as stack:
        stack.enter_context(preserve_state(probe.module))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        CapabilityDetector(probe).detect()
    return probe


def _is_masked(model: nn.Module) -> bool:
    """By its name, or, where a class has one name for both, by a config that looks both ways."""
    if type(model).__name__.endswith("ForMaskedLM"):
        return True
    auto = sys.modules.get("transformers.models.auto.modeling_auto")
    masked = getattr(auto, "MODEL_FOR_MASKED_LM_MAPPING_NAMES", {})
    sees_ahead = all(rule.lookahead is None for rule in rules_of(model.config, "causal").rules)
    permuted = getattr(model.config, "attn_type", None) == "bi"  # XLNet: a target mapping says what is predicted
    return sees_ahead and (permuted or type(model).__name__ in masked.values())


class CapabilityDetector:
    """Tries one capability after the other; what works is set on the probe, by which the next is tried."""

    def __init__(self, probe: HFProbe) -> None:
        self.probe, self.config = probe, cast(Any, probe.module.config)
        self.device = next(probe.module.parameters()).device
        self.free = [token for token in range(probe.vocab_size) if token not in probe.forbidden_tokens]
        if len(self.free) < 2:
            raise ArgumentError(f"{probe.name} has {probe.vocab_size} tokens; an audit needs 2 or more")
        self.max_length = self.num_positions()
        self.row = self.longest_row(min(6, self.max_length or 6))
        self.batch = Batch.from_rows([self.row]).to(self.device)
        self.can: set[Capability] = set()

    @property
    def found(self) -> HFCapabilities:
        return self.probe.detected

    def update(self, **changes: Any) -> None:
        self.probe.detected = replace(self.found, **changes)

    def trial(self, **changes: Any) -> AbstractContextManager[None]:
        """While inside, this is taken to be so."""
        return attribute_set(self.probe, "detected", replace(self.found, **changes))

    def num_positions(self) -> int | None:
        """The rows of the table of learned positions. Computed positions have no limit."""
        names = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_seq_len")
        given = [getattr(text_config(self.config), name, None) for name in names]
        limit = next((value for value in given if isinstance(value, int) and value > 0), None)
        words = unless_it_raises(lambda: self.probe.module.get_input_embeddings(), None)  # type: ignore[operator]
        for name, part in self.probe.module.named_modules():
            of_other_media = any(word in name for word in ("audio", "vision", "visual", "image"))
            if not isinstance(part, nn.Embedding) or part is words or of_other_media or limit is None:
                continue
            if "inusoid" not in type(part).__name__ and limit <= part.num_embeddings <= limit + 4:
                pad = part.padding_idx if part.num_embeddings == limit else None
                return limit if pad is None else limit - pad - 1  # counted from behind the pad id
        return None

    def longest_row(self, most: int) -> list[int]:
        """As long as wanted, or as it takes."""
        rows = [[self.free[3 * number % len(self.free)] for number in range(length)] for length in range(most, 0, -1)]
        taken = (row for row in rows[:-1] if raised_by(partial(self.scores, Batch.from_rows([row]))) is None)
        return next(taken, rows[0])

    def scores(self, batch: Batch) -> Tensor:
        scores = self.probe.logits(batch.to(self.device))
        if scores.dim() != 3 or scores.shape[:2] != batch.tokens.shape:
            raise ArgumentError(
                f"{self.probe.name} returned {tuple(scores.shape)} for {batch.shape[0]} rows of {batch.shape[1]} "
                "tokens; an audit needs the scores of the vocabulary in every slot"
            )
        return scores

    def detect(self) -> None:
        probe, plain = self.probe, self.scores(self.batch)
        doc = (type(probe.module).forward.__doc__ or "").replace("*", "")
        shifts = probe.kind == "causal" and "not shifted inside" not in doc
        self.update(position_offset=self.position_offset(plain), shifts_labels=shifts)
        if self.found.position_offset is not None and works(self.obeys_positions):
            self.can.add("positions")
        if probe.mask_argument in probe.takes and "dummy" not in doc.partition(f"{probe.mask_argument} (")[2][:300]:
            self.detect_padding()
        if works(self.packs):
            self.can.add("packing")
        if works(self.takes_embeddings):
            self.can.add("embeddings")
        if works(self.recomputes):
            self.can.add("checkpointing")
        if probe.kind == "seq2seq":
            self.can.add("source")
        self.detect_loss()
        self.detect_cache()
        self.detect_kernels()
        self.update(complete=True)
        probe.capabilities, probe.max_length = frozenset(self.can), self.max_length
        probe.shift_allowed = probe.kind != "causal" or not looks_back(probe.rules) or padded_right(self.config)
        rotates = only_rotates(self.config) and not is_recurrent(probe.module)
        probe.shift_invariant = "positions" in self.can and rotates
        if not probe.hidden_states:
            probe.vocab_size = min(probe.vocab_size, plain.shape[-1])
        modes = [ALL_ONES] if probe.mask_argument in probe.takes else []
        probe.call_modes = tuple(modes if self.found.position_offset is None else [*modes, POSITIONS])

    def position_offset(self, plain: Tensor) -> int | None:
        """From where explicit positions have to start to say what the model assumes by itself."""
        if self.probe.position_argument not in self.probe.takes:
            return None
        pad = getattr(self.config, "pad_token_id", None)
        for offset in (0, pad + 1 if isinstance(pad, int) else 1):
            with self.trial(position_offset=offset), self.probe.call_mode(POSITIONS):
                if works(lambda: close(self.scores(self.batch), plain)):
                    return offset
        return None

    def obeys_positions(self) -> bool:
        """Whether gaps between positions change anything."""
        if self.max_length is not None and self.max_length <= 5:
            return False
        positions_BT = torch.tensor([[0, 2, 3, 4, 4, 5][: len(self.row)]], device=self.device)
        spread = self.batch.replace(positions=positions_BT)
        with self.probe.call_mode(POSITIONS):
            return not close(self.scores(spread), self.scores(self.batch))

    def detect_padding(self) -> None:
        """On which sides it takes padding: what raises on purpose refuses; what breaks, the checks report."""
        slots = min(5, len(self.row))
        rows = [self.row[: slots - 1], self.row[:1]]

        def raised(side: Side) -> str | None:
            batch = Batch.from_rows(rows, side=side, length=slots)
            error = raised_by(partial(self.scores, batch)) if slots > 1 else None
            return error_text(error) if error is not None and is_refusal(error) else None

        setting = getattr(self.probe.module, "padding_side", None) or getattr(self.config, "padding_side", None)
        sides, refused = supported_sides(setting, raised)
        self.probe.sides, self.probe.refused = sides or ("right",), refused
        if sides:
            self.can.add("padding")
        if "left" in sides:
            self.detect_pad_token()

    def detect_pad_token(self) -> None:
        """A class that counts slots itself, or counts by pad ids, is padded as its users must."""
        short, pad = self.row[: max(len(self.row) - 2, 1)], getattr(self.config, "pad_token_id", None)
        extra = len(self.row) - len(short)
        if not extra:
            return
        alone = self.scores(Batch.from_rows([short]))[0]
        padded = Batch.from_rows([short], side="left", length=len(self.row))

        def answer(filler: int = 0, pad_token: int | None = None) -> Tensor:
            tokens_BT = torch.where(padded.token_mask, padded.tokens, filler)
            with self.trial(pad_token=pad_token):
                return self.scores(padded.replace(tokens=tokens_BT))[0, extra:]

        if works(lambda: close(answer(), alone)):
            same = works(lambda: close(answer(self.free[-1]), answer(self.free[-2])))
            if pad == 0 and same and works(lambda: not close(answer(self.free[-1]), alone)):
                self.update(pad_token=pad)  # what is no pad is counted, whatever the mask says
        elif isinstance(pad, int) and works(lambda: close(answer(0, pad), alone)):
            self.update(pad_token=pad)
        elif self.found.position_offset is not None or "right" not in self.probe.sides:
            return  # then nothing excuses another answer
        elif works(lambda: close(answer(0, pad), answer(self.free[-1], pad))):  # no pad's content: it counts slots
            self.probe.position_shifting_sides = tuple(side for side in self.probe.sides if side != "right")
            self.probe.sides = ("right",)

    def packs(self) -> bool:
        """Whether the library looks for documents in the positions of a plain row, in models of attention alone."""
        masks, kind = sys.modules.get("transformers.masking_utils"), self.probe.kind
        if masks is None or "positions" not in self.can or kind != "causal" or is_recurrent(self.probe.module):
            return False
        looked: list[bool] = []
        find = masks.find_packed_sequence_indices

        def watched(*args: Any, **kwargs: Any) -> Any:
            looked.append(True)
            return find(*args, **kwargs)

        with attribute_set(masks, "find_packed_sequence_indices", watched):
            self.scores(Batch.packed([self.row[:3], self.row[3:]]))
        return bool(looked)

    def takes_embeddings(self) -> bool:
        if self.probe.kind == "seq2seq" and self.probe.embeddings_argument not in self.probe.takes:
            return False
        embeddings_BTD, plain = self.probe.embed(self.batch), self.scores(self.batch)
        same, other = (
            self.scores(self.batch.replace(inputs_embeds=x)) for x in (embeddings_BTD, embeddings_BTD.flip(1))
        )
        return embeddings_BTD.dim() == 3 and close(plain, same) and not close(plain, other)

    def recomputes(self) -> bool:
        if not getattr(self.probe.module, "supports_gradient_checkpointing", False):
            return False
        with self.probe.checkpointing():
            self.scores(self.batch)
        return True

    def detect_loss(self) -> None:
        if "labels" not in self.probe.takes:
            return

        def has_loss(sums_loss: bool) -> bool:
            with self.trial(sums_loss=sums_loss):
                total, count = self.probe.loss(self.batch)
            return total.numel() == 1 and bool(total.isfinite()) and int(count) > 0

        def divides() -> bool:
            arguments = self.probe.arguments(self.batch) | {"labels": self.probe.labels(self.batch)[0]}
            one, two = (self.probe.call(arguments, num_items_in_batch=n).loss for n in (1, 2))
            mean = self.probe.call(arguments).loss
            return bool(torch.isclose(one, 2 * two)) and not bool(torch.isclose(one, mean))

        if works(lambda: has_loss(sums_loss=False)):
            self.can.add("loss")
            self.update(sums_loss=works(divides) and works(lambda: has_loss(sums_loss=True)))

    def detect_cache(self) -> None:
        if "use_cache" not in self.probe.takes:
            return
        output = unless_it_raises(lambda: self.probe.call(self.probe.arguments(self.batch), use_cache=True), None)
        for name in ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states"):
            state = getattr(output, name, None)
            if state is None or name not in self.probe.takes:
                continue
            self.update(cache_name=name)
            if not works(self.continues):
                continue
            self.can.update({"cache", "snapshot"})
            if hasattr(state, "reorder_cache"):
                self.can.add("reorder")
            if hasattr(state, "crop"):
                self.can.add("crop")
            if "padding" in self.can and "left" in self.probe.sides:
                by_all, by_new = (partial(self.continues_padded, local_mask=local) for local in (False, True))
                self.update(local_mask=not works(by_all) and works(by_new))
            return

    def continues(self) -> bool:
        cache = self.probe.new_cache(1, 6)
        self.probe.extend(self.batch.part(0, 3), cache)
        self.probe.extend(self.batch.part(3, 4), cache)
        return True

    def continues_padded(self, local_mask: bool) -> bool:
        """Whether a left-padded row is continued rightly with the mask of the new slots, or with that of all."""
        batch = Batch.from_rows([self.row[:4], self.row[:3]], side="left", length=5).to(self.device)
        plain = self.scores(batch)[:, 3:]
        with self.trial(local_mask=local_mask):
            cache = self.probe.new_cache(*batch.shape)
            self.probe.extend(batch.part(0, 3), cache)
            steps = [self.probe.extend(batch.part(slot, slot + 1), cache) for slot in (3, 4)]
        return close(torch.cat(steps, 1), plain)

    def detect_kernels(self) -> None:
        def runs(name: str) -> bool:
            with self.probe.kernel(name):
                if getattr(self.config, "_attn_implementation", "") != name:
                    return False
                self.scores(self.batch)
            return True

        switches = getattr(self.probe.module, "_can_set_attn_implementation", lambda: False)
        offered = ("eager", "sdpa") if works(lambda: bool(switches())) else ()
        self.probe.kernels = tuple(name for name in offered if works(partial(runs, name)))
        if len(self.probe.kernels) > 1:
            self.can.add("kernels")
        for name in ("attentions", "decoder_attentions"):
            with self.trial(attention_name=name):
                given = "eager" in self.probe.kernels and works(self.returns_weights)
            if given:
                self.can.add("attention")
                self.update(attention_name=name)
                return

    def returns_weights(self) -> bool:
        layers, slots = self.probe.attention(self.batch), self.batch.shape[1]
        return bool(layers) and all(layer.dim() == 4 and layer.shape[-2:] == (slots, slots) for layer in layers)
