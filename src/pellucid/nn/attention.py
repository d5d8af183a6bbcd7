"""Grouped self-attention: multi-head, multi-query and everything between, by the number of key/value heads."""

from __future__ import annotations

from torch import nn

from pellucid.nn.attend import Backend, attend, probabilities
from pellucid.nn.cache import LayerCache
from pellucid.nn.norms import RMSNorm
from pellucid.nn.positions import Rotary
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates, Rule


class GroupedAttention(nn.Module):
    """Self-attention with N query heads that share K key/value heads (Ainslie et al. 2023).

    K = N is multi-head attention, K = 1 multi-query attention. ``rule`` says who may see whom in this layer.
    """

    def __init__(
        self,
        size: int,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        rule: Rule,
        rotary: Rotary | None = None,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.rule = rule
        self.head_size = head_size
        self.scale = scale
        self.dropout = dropout
        self.backend: Backend = backend
        self.q_proj = nn.Linear(size, heads * head_size, bias=bias)
        self.k_proj = nn.Linear(size, kv_heads * head_size, bias=bias)
        self.v_proj = nn.Linear(size, kv_heads * head_size, bias=bias)
        self.o_proj = nn.Linear(heads * head_size, size, bias=out_bias)
        self.q_norm: nn.Module = RMSNorm(head_size, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(head_size, eps=norm_eps) if qk_norm else nn.Identity()
        self.rotary = rotary

    def forward(
        self, x_BTD: Float[Tensor, "B T D"], queries: Coordinates, keys: Coordinates, cache: LayerCache | None = None
    ) -> Float[Tensor, "B T D"]:
        q_BTNH, k_BTKH = self._queries_and_keys(x_BTD, queries)
        v_BTKH = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_size))
        k_BSKH, v_BSKH = (k_BTKH, v_BTKH) if cache is None else cache.append(k_BTKH, v_BTKH)
        out_BTNH = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            rule=self.rule,
            queries=queries,
            keys=keys,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return self.o_proj(out_BTNH.flatten(-2))

    def weights(self, x_BTD: Float[Tensor, "B T D"], places: Coordinates) -> Float[Tensor, "B N T T"]:
        """What each head attends to in ``x``, by the reference path; the weight of what is hidden is exactly 0."""
        q_BTNH, k_BTKH = self._queries_and_keys(x_BTD, places)
        return probabilities(q_BTNH, k_BTKH, rule=self.rule, queries=places, keys=places, scale=self.scale)

    def _queries_and_keys(self, x_BTD: Tensor, places: Coordinates) -> tuple[Tensor, Tensor]:
        q_BTNH = self.q_norm(self.q_proj(x_BTD).unflatten(-1, (-1, self.head_size)))
        k_BTKH = self.k_norm(self.k_proj(x_BTD).unflatten(-1, (-1, self.head_size)))
        if self.rotary is None:
            return q_BTNH, k_BTKH
        return self.rotary(q_BTNH, places), self.rotary(k_BTKH, places)
