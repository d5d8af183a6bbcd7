"""How torch's own Transformer layers are called: embeddings in, hidden states out, ``True`` hides."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.batch import Batch
from pellucid.errors import InputError
from pellucid.probe import Capability, Probe, Visibility
from pellucid.visibility import causal, full

_ENCODERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
_DECODERS = (nn.TransformerDecoder, nn.TransformerDecoderLayer)
_VOCABULARY = 32


def is_torch_layer(target: object) -> bool:
    """Whether :class:`TorchLayersProbe` can call it."""
    return isinstance(target, (*_ENCODERS, *_DECODERS, nn.Transformer))


class TorchLayersProbe(Probe):
    """``nn.TransformerEncoder``, ``nn.TransformerDecoder``, their layers, ``nn.Transformer``.

    These have no vocabulary: 32 random embeddings of their width stand in for one. ``causal`` says with which
    mask they are called; left out, decoders are causal and encoders are not, and :meth:`restricted` are asked besides.
    ``hint``: they are told ``is_causal`` too, beside the mask.
    """

    capabilities: frozenset[Capability] = frozenset({"padding", "embeddings"})

    def __init__(
        self, module: nn.Module, *, causal: bool | None = None, hint: bool = False, name: str | None = None
    ) -> None:
        if not is_torch_layer(module):
            raise InputError(f"{type(module).__name__} is none of torch's Transformer layers; use TokensProbe")
        self.module, self.vocab_size = module, _VOCABULARY
        self.name = name or type(module).__name__
        self.reads_source = not isinstance(module, _ENCODERS)
        self.causal, self.hint = self.reads_source if causal is None else causal, hint
        self._open = causal is None and not self.reads_source
        first = next(m for m in module.modules() if isinstance(m, nn.MultiheadAttention))
        self.rows_first, self.width = first.batch_first, first.embed_dim
        generator = torch.Generator().manual_seed(0)
        self._table_VD = torch.randn(_VOCABULARY, self.width, generator=generator, dtype=torch.float64)
        self.rules: tuple[Visibility, ...] = (self._rule(),) * self._depth(module)
        if self.reads_source:
            self.capabilities = self.capabilities | {"source"}
            self.source_rules = (full(),) * self._depth(getattr(module, "encoder", module))
        self.memory_name = "encoder" if isinstance(module, nn.Transformer) and self.rows_first else None

    def logits(self, batch: Batch) -> Tensor:
        """``[B, T, D]`` hidden states, which an audit watches as it would logits."""
        x, pads_BT = self._entered(self._embedded(batch)), batch.segments == 0
        hidden_TT = torch.ones(batch.shape[1], batch.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mask = hidden_TT if self.causal else None
        if not self.reads_source:
            name = "src_mask" if isinstance(self.module, nn.TransformerEncoderLayer) else "mask"
            hint = {"is_causal": True} if self.hint else {}
            return self._left(self._call(x, **{name: mask}, src_key_padding_mask=pads_BT, **hint))
        source = batch.source
        assert source is not None
        memory, memory_pads_BS = self._entered(self._embedded(source)), source.segments == 0
        told: dict[str, Any] = {"tgt_mask": mask, "tgt_key_padding_mask": pads_BT}
        if isinstance(self.module, nn.Transformer):
            told |= {"src_key_padding_mask": memory_pads_BS}
            return self._left(self._call(memory, x, **told, memory_key_padding_mask=memory_pads_BS))
        return self._left(self._call(x, memory, **told, memory_key_padding_mask=memory_pads_BS))

    def embed(self, batch: Batch) -> Tensor:
        return self._table_VD.to(self._weight)[batch.tokens]

    def with_module(self, module: nn.Module) -> TorchLayersProbe:
        twin = copy.copy(self)
        twin.module = module
        return twin

    def restricted(self) -> dict[str, Probe]:
        """An encoder takes a mask besides, which nobody has declared: handed a causal one it must be causal."""
        if not self._open:
            return {}
        assert self.module is not None
        ways: dict[str, Probe] = {"with a causal mask": self._masked(hint=False)}
        if "is_causal" in inspect.signature(self.module.forward).parameters:
            ways["with a causal mask and is_causal"] = self._masked(hint=True)
        return ways

    def _masked(self, hint: bool) -> TorchLayersProbe:
        assert self.module is not None
        return TorchLayersProbe(self.module, causal=True, hint=hint, name=self.name)

    def _embedded(self, batch: Batch) -> Tensor:
        return self.embed(batch) if batch.inputs_embeds is None else batch.inputs_embeds

    def _call(self, *args: Tensor, **told: Any) -> Tensor:
        assert self.module is not None
        result: Tensor = self.module(*args, **told)
        return result

    def _entered(self, x_BTD: Tensor) -> Tensor:
        return x_BTD if self.rows_first else x_BTD.transpose(0, 1)

    def _left(self, x: Tensor) -> Tensor:
        return x if self.rows_first else x.transpose(0, 1)

    def _rule(self) -> Visibility:
        return causal() if self.causal else full()

    @staticmethod
    def _depth(module: nn.Module) -> int:
        """How many layers; of an encoder–decoder, how many of its decoder."""
        layers = getattr(getattr(module, "decoder", module), "layers", None)
        return len(layers) if isinstance(layers, nn.ModuleList) else 1

    @property
    def _weight(self) -> Tensor:
        assert self.module is not None
        return next(self.module.parameters())
