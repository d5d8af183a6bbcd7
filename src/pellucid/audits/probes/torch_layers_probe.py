"""How torch's own Transformer layers are called: embeddings in, hidden states out, ``True`` hides."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.batch import Batch
from pellucid.errors import ArgumentError
from pellucid.probe import Capability, Probe, Visibility
from pellucid.visibility import causal as causal_rule
from pellucid.visibility import full

_ENCODERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
_DECODERS = (nn.TransformerDecoder, nn.TransformerDecoderLayer)
_VOCABULARY = 32


def is_torch_layer(target: object) -> bool:
    """Whether :class:`TorchLayersProbe` can call it."""
    return isinstance(target, (*_ENCODERS, *_DECODERS, nn.Transformer))


class TorchLayersProbe(Probe):
    """``nn.TransformerEncoder``, ``nn.TransformerDecoder``, their layers, ``nn.Transformer``.

    These have no vocabulary: 32 random embeddings of their width stand in for one. ``causal`` says with which mask they
    are called; left out, decoders are causal and encoders are not, and an encoder is audited with a causal mask too
    (:meth:`restricted`). ``hint``: ``is_causal=True`` is passed besides the mask.
    """

    capabilities: frozenset[Capability] = frozenset({"padding", "embeddings"})

    def __init__(
        self, module: nn.Module, *, causal: bool | None = None, hint: bool = False, name: str | None = None
    ) -> None:
        if not is_torch_layer(module):
            raise ArgumentError(f"{type(module).__name__} is none of torch's Transformer layers; use TokensProbe")
        self.module: nn.Module = module
        self.vocab_size, self.name = _VOCABULARY, name or type(module).__name__
        self.reads_source = not isinstance(module, _ENCODERS)
        self.causal, self.hint = self.reads_source if causal is None else causal, hint
        self._mask_is_open = causal is None and not self.reads_source
        first = next(m for m in module.modules() if isinstance(m, nn.MultiheadAttention))
        self.batch_first = first.batch_first
        generator = torch.Generator().manual_seed(0)
        self._table_VD = torch.randn(_VOCABULARY, first.embed_dim, generator=generator, dtype=torch.float64)
        rule = causal_rule() if self.causal else full()
        self.rules: tuple[Visibility, ...] = (rule,) * _depth(module)
        if self.reads_source:
            self.capabilities = self.capabilities | {"source"}
            self.source_rules = (full(),) * _depth(getattr(module, "encoder", module))
        self.memory_name = "encoder" if isinstance(module, nn.Transformer) and self.batch_first else None

    def logits(self, batch: Batch) -> Tensor:
        """``[B, T, D]`` hidden states, which are compared as logits would be."""
        x, pads_BT = self._input(batch), batch.segments == 0
        slots = batch.shape[1]
        mask_TT = torch.ones(slots, slots, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        kwargs: dict[str, Any]
        if not self.reads_source:
            name = "src_mask" if isinstance(self.module, nn.TransformerEncoderLayer) else "mask"
            kwargs = {name: mask_TT, "src_key_padding_mask": pads_BT} | ({"is_causal": True} if self.hint else {})
            return self._rows_first(self.module(x, **kwargs))
        assert batch.source is not None
        source, source_pads_BS = self._input(batch.source), batch.source.segments == 0
        kwargs = {"tgt_mask": mask_TT, "tgt_key_padding_mask": pads_BT, "memory_key_padding_mask": source_pads_BS}
        if isinstance(self.module, nn.Transformer):
            return self._rows_first(self.module(source, x, src_key_padding_mask=source_pads_BS, **kwargs))
        return self._rows_first(self.module(x, source, **kwargs))

    def embed(self, batch: Batch) -> Tensor:
        return self._table_VD.to(next(self.module.parameters()))[batch.tokens]

    def with_module(self, module: nn.Module) -> TorchLayersProbe:
        probe = copy.copy(self)
        probe.module = module
        return probe

    def restricted(self) -> dict[str, Probe]:
        """An encoder takes a mask too, which nobody has declared: with a causal one it must be causal."""
        if not self._mask_is_open:
            return {}
        masked = {"with a causal mask": False}
        if "is_causal" in inspect.signature(self.module.forward).parameters:
            masked["with a causal mask and is_causal"] = True
        return {
            case: TorchLayersProbe(self.module, causal=True, hint=hint, name=self.name) for case, hint in masked.items()
        }

    def _input(self, batch: Batch) -> Tensor:
        return self._rows_first(self.embed(batch) if batch.inputs_embeds is None else batch.inputs_embeds)

    def _rows_first(self, x: Tensor) -> Tensor:
        """From the layers' layout to ours, and back."""
        return x if self.batch_first else x.transpose(0, 1)


def _depth(module: nn.Module) -> int:
    """How many layers; of an encoder–decoder, how many in its decoder."""
    layers = getattr(getattr(module, "decoder", module), "layers", None)
    return len(layers) if isinstance(layers, nn.ModuleList) else 1
