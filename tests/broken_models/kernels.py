"""Models of whose attention implementations one goes its own way."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from broken_models.caches import TopLeftAnchor
from broken_models.catalog import caught_by
from broken_models.hf_style import HFStyleDecoder, Layer
from pellucid.audits.broken.tiny_decoder import Slots, TinyDecoder


class _Windowed(TinyDecoder):
    def __init__(self) -> None:
        super().__init__(window=3)


class WindowWiderByOneKernel(_Windowed):
    """The faster kernel counts w keys besides the query."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        seen = super().visible(queries, keys, layer)
        if self.kernel == "plain":
            return seen
        back = queries.positions[:, :, None] - keys.positions[:, None, :]
        same = queries.segments[:, :, None] == keys.segments[:, None, :]
        return seen | (same & (back == 3) & (keys.segments[:, None, :] != 0))


class PackedByOneKernel(TinyDecoder):
    """Documents of a row are kept apart by one kernel only."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        if self.kernel == "plain":
            return super().visible(queries, keys, layer)
        real = (queries.segments[:, :, None] != 0) & (keys.segments[:, None, :] != 0)
        later = queries.segments[:, :, None] > keys.segments[:, None, :]
        return (real & later) | super().visible(queries, keys, layer)


class AnchoredAtTheFirst(TopLeftAnchor):
    """One kernel lays its causal triangle at key 0, where a chunk's queries are the newest of the keys."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return (
            TinyDecoder.visible(self, queries, keys, layer)
            if self.kernel == "plain"
            else super().visible(queries, keys, layer)
        )


class CapLostByOneKernel(HFStyleDecoder):
    """Scores are bent to a cap of 50 by one implementation; the other ignores the cap."""

    def hide(self, scores_BNTT: Tensor, visible_B1TT: Tensor) -> Tensor:
        return super().hide(50 * (scores_BNTT / 50).tanh(), visible_B1TT)


class ScaledOtherwise(HFStyleDecoder):
    """One implementation scales by its own default and not by what the model says."""

    def scale(self) -> float:
        return 0.5 if self.implementation == "eager" else super().scale()


class PaddingLostByOneKernel(HFStyleDecoder):
    """With a mask given, one implementation is called by its causal flag alone."""

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, visible_B1TT: Tensor) -> Tensor:
        if self.implementation == "eager":
            return super().attend(layer, q, k, v, visible_B1TT)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale())


class OneKernelTeachesNothing(HFStyleDecoder):
    """Outputs agree, but through one implementation no gradient reaches the keys."""

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, visible_B1TT: Tensor) -> Tensor:
        return super().attend(layer, q, k if self.implementation == "eager" else k.detach(), v, visible_B1TT)


class OneKernelInHalf(HFStyleDecoder):
    """One implementation computes in bfloat16 whatever it is given."""

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, visible_B1TT: Tensor) -> Tensor:
        if self.implementation == "eager":
            return super().attend(layer, q, k, v, visible_B1TT)
        return super().attend(layer, q.bfloat16(), k.bfloat16(), v.bfloat16(), visible_B1TT).to(q)


BROKEN_MODELS = (
    *caught_by(
        "kernels",
        WindowWiderByOneKernel,
        PackedByOneKernel,
        AnchoredAtTheFirst,
        CapLostByOneKernel,
        ScaledOtherwise,
        PaddingLostByOneKernel,
        OneKernelTeachesNothing,
        OneKernelInHalf,
    ),
)
