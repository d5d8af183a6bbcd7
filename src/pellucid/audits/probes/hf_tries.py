"""What a transformers model can be asked, found by asking: what is claimed here has been seen to work.

A capability means that the question can be put, not that the answer is right: that is for the checks.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pellucid.audits.engine.preserve_state import preserve_state
from pellucid.audits.probes.hf_found import (
    Found,
    close,
    described,
    longest,
    on_purpose,
    raised_by,
    remembers,
    replaced,
    sides_taken,
    tried,
    worked,
)
from pellucid.batch import Batch, Side
from pellucid.errors import InputError
from pellucid.probe import Capability

if TYPE_CHECKING:
    from pellucid.audits.probes.hf_base import HFProbe

_CACHES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
_KERNELS = ("eager", "sdpa")


def found_in(probe: HFProbe) -> Found:
    """Ask a few short rows. The model is in eval mode meanwhile, and left as it was."""
    with ExitStack() as stack:
        stack.enter_context(preserve_state(probe.module))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return _Tries(probe).all()


class _Tries:
    def __init__(self, probe: HFProbe) -> None:
        self.probe, self.config = probe, cast(Any, probe.module.config)
        free = [token for token in range(probe.vocab_size) if token not in probe.forbidden_tokens]
        if len(free) < 2:
            raise InputError(f"{probe.name} has {probe.vocab_size} tokens; an audit needs 2 or more")
        self.free, self.max_length = free, longest(probe)
        self.row = self.longest_row(min(6, self.max_length or 6))
        self.can: set[Capability] = set()

    def tokens(self, length: int, start: int = 0) -> list[int]:
        return [self.free[(3 * number + start) % len(self.free)] for number in range(length)]

    def longest_row(self, most: int) -> list[int]:
        """As long as wanted, or as it takes."""
        lengths = range(most, 1, -1)
        taken = (n for n in lengths if raised_by(partial(self.scores, Batch.from_rows([self.tokens(n)]))) is None)
        return self.tokens(next(taken, most))

    def all(self) -> Found:
        probe = self.probe
        plain = self.scores(Batch.from_rows([self.row]))
        said = (type(probe.module).forward.__doc__ or "").replace("*", "")
        shifts = probe.kind == "causal" and "not shifted inside" not in said
        found = Found(scores=0 if probe.hidden_states else plain.shape[-1], max_length=self.max_length, shifts=shifts)
        probe.found = found = replace(found, offset=self.offset(plain))
        if found.offset is not None and self.positions_obeyed():
            self.can.add("positions")
        if probe.mask_argument in probe.takes and "dummy" not in said.partition(f"{probe.mask_argument} (")[2][:300]:
            found = self.padded_sides(found)
            if found.sides:
                self.can.add("padding")
            if "left" in found.sides:
                found = self.padding(found)
            found = replace(found, sides=found.sides or ("right",))
        for name, works in (
            ("packing", self.packs), ("embeddings", self.embeds), ("checkpointing", self.recomputes),
        ):  # fmt: skip
            if worked(works):
                self.can.add(name)  # type: ignore[arg-type]
        if probe.kind == "seq2seq":
            self.can.add("source")
        probe.found = found
        found = self.losses(found)
        probe.found = found
        found = self.caches(found)
        probe.found = found
        found = self.kernels(found)
        probe.found = found = replace(found, capabilities=frozenset(self.can), tried=True)
        return found

    def scores(self, batch: Batch) -> Tensor:
        device = next(self.probe.module.parameters()).device
        scores = self.probe.logits(batch.to(device))
        if scores.dim() != 3 or scores.shape[:2] != batch.tokens.shape:
            raise InputError(
                f"{self.probe.name} gave {tuple(scores.shape)} for {batch.shape[0]} rows of {batch.shape[1]} "
                "tokens; an audit needs one score a token of the vocabulary in every slot"
            )
        return scores

    def offset(self, plain: Tensor) -> int | None:
        """What explicit positions must start from to say what the model assumes by itself."""
        if self.probe.position_argument not in self.probe.takes:
            return None
        pad = getattr(self.config, "pad_token_id", None)
        batch = Batch.from_rows([self.row])
        for offset in (0, pad + 1 if isinstance(pad, int) else 1):
            self.probe.found = Found(offset=offset)
            with self.probe.call_mode("with position ids given"):
                if worked(lambda: close(self.scores(batch), plain)):
                    return offset
        return None

    def positions_obeyed(self) -> bool:
        """Whether gaps between positions change anything."""
        batch = Batch.from_rows([self.row])
        spread = batch.replace(positions=torch.tensor([[0, 2, 3, 4, 4, 5][: len(self.row)]]))

        def moves() -> bool:
            with self.probe.call_mode("with position ids given"):
                return not close(self.scores(spread), self.scores(batch))

        return (self.max_length is None or self.max_length > 5) and worked(moves)

    def padded_sides(self, found: Found) -> Found:
        """On which sides it takes padding: what raises on purpose refuses; what breaks, the checks report."""
        slots = min(5, len(self.row))
        rows = [self.row[: slots - 1], self.row[:1]]
        said = getattr(self.probe.module, "padding_side", None) or getattr(self.config, "padding_side", None)

        def raised(side: Side) -> str | None:
            batch = Batch.from_rows(rows, side=side, length=slots)
            error = raised_by(partial(self.scores, batch)) if slots > 1 else None
            return described(error) if error is not None and on_purpose(error) else None

        sides, refused = sides_taken(said, raised)
        return replace(found, sides=sides, refused=refused)

    def padding(self, found: Found) -> Found:
        """A class that counts slots itself, or counts by pad ids, is padded as its users must."""
        short, pad = self.row[: max(len(self.row) - 2, 1)], getattr(self.config, "pad_token_id", None)
        alone = self.scores(Batch.from_rows([short]))[0]
        padded = Batch.from_rows([short], side="left", length=len(self.row))
        other = padded.replace(tokens=torch.where(padded.token_mask, padded.tokens, self.free[-1]))
        extra = padded.shape[1] - len(short)

        def answers(batch: Batch, ids: int | None = None) -> Tensor:
            self.probe.found = replace(found, pad=ids)
            return self.scores(batch)[0, extra:]

        if not extra:
            return found
        if worked(lambda: close(answers(padded), alone)):
            third = padded.replace(tokens=torch.where(padded.token_mask, padded.tokens, self.free[-2]))
            same = worked(lambda: close(answers(other), answers(third)))
            by_ids = pad == 0 and same and worked(lambda: not close(answers(other), alone))
            return replace(found, pad=pad) if by_ids else found  # what is no pad is counted, whatever the mask says
        if isinstance(pad, int) and worked(lambda: close(answers(padded, pad), alone)):
            return replace(found, pad=pad)
        told = found.offset is not None or "right" not in found.sides  # then nothing excuses another answer
        if not told and worked(lambda: close(answers(padded, pad), answers(other, pad))):
            # no pad's content moves it: it counts slots
            return replace(
                found, sides=("right",), position_shifting_sides=tuple(side for side in found.sides if side != "right")
            )
        return found

    def packs(self) -> bool:
        """Whether the library looks for documents in the positions of a plain row, in models of attention alone."""
        masks = sys.modules.get("transformers.masking_utils")
        if masks is None or "positions" not in self.can or self.probe.kind != "causal" or remembers(self.probe.module):
            return False
        looked: list[bool] = []
        find = masks.find_packed_sequence_indices

        def watched(*given: Any, **named: Any) -> Any:
            looked.append(True)
            return find(*given, **named)

        with replaced(masks, "find_packed_sequence_indices", watched):
            self.scores(Batch.packed([self.row[:3], self.row[3:]]))
        return bool(looked)

    def embeds(self) -> bool:
        batch = Batch.from_rows([self.row]).to(next(self.probe.module.parameters()).device)
        if self.probe.kind == "seq2seq" and self.probe.embeddings_argument not in self.probe.takes:
            return False
        embeddings_BTD = self.probe.embed(batch)
        plain, same = self.scores(batch), self.scores(batch.replace(inputs_embeds=embeddings_BTD))
        other = self.scores(batch.replace(inputs_embeds=embeddings_BTD.flip(1)))
        return embeddings_BTD.dim() == 3 and close(plain, same) and not close(plain, other)

    def recomputes(self) -> bool:
        if not getattr(self.probe.module, "supports_gradient_checkpointing", False):
            return False
        with self.probe.checkpointing():
            self.scores(Batch.from_rows([self.row]))
        return True

    def losses(self, found: Found) -> Found:
        if "labels" not in self.probe.takes:
            return found
        device = next(self.probe.module.parameters()).device
        batch = Batch.from_rows([self.row]).to(device)

        def works(divisor: bool) -> bool:
            self.probe.found = replace(found, divisor=divisor)
            total, count = self.probe.loss(batch)
            return total.numel() == 1 and bool(total.isfinite()) and int(count) > 0

        def sums() -> bool:
            labels_BT, _ = self.probe.labels(batch)
            arguments = self.probe.arguments(batch)
            one, two = (self.probe.ask(arguments, labels=labels_BT, num_items_in_batch=n).loss for n in (1, 2))
            mean = self.probe.ask(arguments, labels=labels_BT).loss
            return bool(torch.isclose(one, 2 * two)) and not bool(torch.isclose(one, mean))

        if not worked(lambda: works(divisor=False)):
            return found
        self.can.add("loss")
        return replace(found, divisor=worked(sums) and worked(lambda: works(divisor=True)))

    def caches(self, found: Found) -> Found:
        if "use_cache" not in self.probe.takes:
            return found
        batch = Batch.from_rows([self.row]).to(next(self.probe.module.parameters()).device)
        answer = tried(lambda: self.probe.ask(self.probe.arguments(batch), use_cache=True))
        for name in _CACHES:
            held = getattr(answer, name, None) if answer is not None else None
            if held is None or name not in self.probe.takes:
                continue
            self.probe.found = found = replace(found, cache_argument=name, cache_attribute=name)
            if not worked(lambda: self.goes_on(batch)):
                continue
            self.can.update({"cache", "snapshot"})
            if hasattr(held, "reorder_cache"):
                self.can.add("reorder")
            if hasattr(held, "crop"):
                self.can.add("crop")
            if "padding" in self.can and "left" in found.sides and self.goes_on_by_local_mask(found):
                return replace(found, local_mask=True)
            return found
        return found

    def goes_on_by_local_mask(self, found: Found) -> bool:
        """Whether a left-padded row goes on rightly with the mask of the new slots, and not with that of all."""
        batch = Batch.from_rows([self.row[:4], self.row[:3]], side="left", length=5)
        batch = batch.to(next(self.probe.module.parameters()).device)
        plain = self.scores(batch)[:, 3:]

        def answers(local: bool) -> bool:
            self.probe.found = replace(found, local_mask=local)
            cache = self.probe.new_cache(*batch.shape)
            self.probe.extend(batch.part(0, 3), cache)
            steps = [self.probe.extend(batch.part(slot, slot + 1), cache) for slot in (3, 4)]
            return close(torch.cat(steps, 1), plain)

        return not worked(lambda: answers(local=False)) and worked(lambda: answers(local=True))

    def goes_on(self, batch: Batch) -> bool:
        cache = self.probe.new_cache(1, 6)
        self.probe.extend(batch.part(0, 3), cache)
        self.probe.extend(batch.part(3, 4), cache)
        return True

    def kernels(self, found: Found) -> Found:
        able = getattr(self.probe.module, "_can_set_attn_implementation", lambda: False)
        batch = Batch.from_rows([self.row])

        def works(name: str) -> bool:
            with self.probe.kernel(name):
                if getattr(self.config, "_attn_implementation", "") != name:
                    return False
                self.scores(batch)
            return True

        offered = _KERNELS if worked(lambda: bool(able())) else ()
        names = tuple(name for name in offered if worked(partial(works, name)))
        if len(names) > 1:
            self.can.add("kernels")
        for attribute in ("attentions", "decoder_attentions"):
            self.probe.found = replace(found, attention_attribute=attribute)
            if "eager" in names and worked(lambda: self.gives_weights(batch)):
                self.can.add("attention")
                return replace(found, kernels=names, attention_attribute=attribute)
        return replace(found, kernels=names)

    def gives_weights(self, batch: Batch) -> bool:
        layers = self.probe.attention(batch.to(next(self.probe.module.parameters()).device))
        length = batch.shape[1]
        return bool(layers) and all(layer.dim() == 4 and layer.shape[-2:] == (length, length) for layer in layers)
