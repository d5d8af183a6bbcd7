"""Multi-head latent attention: keys and values of all heads are made from one short vector a token, which is kept.

Letters here: R rank of the latent, P features of the rotary part, Q of the part without positions, U of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

import torch
from torch import nn

from pellucid.errors import InputError, ShapeError
from pellucid.nn.attend import AttentionOptions, Backend, attend, probabilities
from pellucid.nn.cache import LayerCache
from pellucid.nn.embedding import zero_padding
from pellucid.nn.positions import Rotary
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates, Rule


class MLA(nn.Module):
    """MLA (DeepSeek-V2, DeepSeek-AI 2024 §2.1; eq. 9–19): low-rank queries, keys and values, and one shared rotary key.

    A head's query and key are ``qk_nope_head_dim`` features without positions, made from the latents, then ``qk_rope_head_dim``
    features turned by ``rotary``; that part of the key is the same for all heads. Values have ``v_head_dim`` features.
    ``q_lora_rank=None`` makes queries in one step. ``norm(size)`` makes the norm behind each first step. ``biases`` may name
    the first steps and the last: q_a, kv_a, o. ``scale`` defaults to ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``, times the
    ``score_multiplier`` of the rotary scaling where it has one (YaRN).

    A cache keeps the latent and the shared key. The explicit form makes every head's keys and values from them, as the
    paper writes it. The absorbed form multiplies queries and outputs instead, and attends to the latents themselves:
    the same numbers from less work where few queries meet many latents. ``absorbed="auto"`` takes it where a cache is
    read and it needs fewer multiplications; ``True`` and ``False`` fix it.

    Raises:
        ShapeError: a ``rotary`` for heads of another size.
        InputError: a bias that there is not.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rule: Rule,
        rotary: Rotary,
        norm: Callable[[int], nn.Module],
        biases: Collection[Literal["q_a", "kv_a", "o"]] = (),
        softcap: float | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: Backend = "auto",
        absorbed: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__()
        if rotary.head_dim != qk_rope_head_dim:
            raise ShapeError(
                f"qk_rope_head_dim is {qk_rope_head_dim}, but the rotary turns {rotary.head_dim}; make them agree"
            )
        if unknown := set(biases) - ({"kv_a", "o"} if q_lora_rank is None else {"q_a", "kv_a", "o"}):
            raise InputError(
                f"biases names {sorted(unknown)}, but projections with a bias are kv_a, o and, with a q_lora_rank "
                f"(here {q_lora_rank}), q_a"
            )
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.rule = rule
        self.rotary = rotary
        self.scale = _default_scale(qk_nope_head_dim + qk_rope_head_dim, rotary) if scale is None else scale
        self.softcap = softcap
        self.dropout = dropout
        self.backend: Backend = backend
        self.absorbed = absorbed
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, num_heads * (qk_nope_head_dim + qk_rope_head_dim), bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias="q_a" in biases)
            self.q_a_norm = norm(q_lora_rank)
            self.q_b_proj = nn.Linear(q_lora_rank, num_heads * (qk_nope_head_dim + qk_rope_head_dim), bias=False)
        self.has_q_lora = q_lora_rank is not None
        self.kv_a_proj = nn.Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias="kv_a" in biases)
        self.kv_a_norm = norm(kv_lora_rank)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias="o" in biases)

    @property
    def cache_shapes(self) -> tuple[tuple[int], tuple[int]]:
        """What one slot takes in a cache: the latent and the shared key."""
        return (self.kv_lora_rank,), (self.qk_rope_head_dim,)

    def forward(
        self,
        x_BTD: Float[Tensor, "B T D"],
        queries: Coordinates,
        keys: Coordinates,
        cache: LayerCache | None = None,
        bias: Float[Tensor, "#B #N T S"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """``queries`` say where ``x`` is; ``keys`` the same, or all that the ``cache`` holds once ``x`` is in it.

        ``bias`` is added to scores.
        """
        q_BTNQ, q_BTNP = self._queries(x_BTD, queries)
        latent_BSR, key_BSP = self._latents(x_BTD, queries)
        if cache is not None:
            latent_BSR, key_BSP = cache.append(latent_BSR, key_BSP)
        absorbed = self._absorbs(x_BTD.shape[1], latent_BSR.shape[1], cache)
        make = self._absorbed if absorbed else self._explicit
        q_BTNH, k_BSKH, v_BSKU = make(q_BTNQ, q_BTNP, latent_BSR, key_BSP, keys)
        out_BTNU = attend(
            q_BTNH,
            k_BSKH,
            v_BSKU,
            rule=self.rule,
            q_coords=queries,
            k_coords=keys,
            bias=bias,
            options=AttentionOptions(
                scale=self.scale,
                softcap=self.softcap,
                dropout=self.dropout if self.training else 0.0,
                backend=self.backend,
            ),
        )
        if absorbed:
            _, values_NUR = self.up()
            out_BTNU = torch.einsum("btnr,nur->btnu", out_BTNU, values_NUR)
        return self.o_proj(out_BTNU.flatten(-2))

    def weights(
        self, x_BTD: Float[Tensor, "B T D"], coords: Coordinates, bias: Float[Tensor, "#B #N T T"] | None = None
    ) -> Float[Tensor, "B N T T"]:
        """What each head attends to in ``x``, by the reference path; the weight of what is hidden is exactly 0."""
        q, k, _ = self._explicit(*self._queries(x_BTD, coords), *self._latents(x_BTD, coords), coords)
        return probabilities(
            q,
            k,
            rule=self.rule,
            q_coords=coords,
            k_coords=coords,
            bias=bias,
            options=AttentionOptions(scale=self.scale, softcap=self.softcap),
        )

    def _queries(self, x_BTD: Tensor, coords: Coordinates) -> tuple[Tensor, Tensor]:
        flat = self.q_b_proj(self.q_a_norm(self.q_a_proj(x_BTD))) if self.has_q_lora else self.q_proj(x_BTD)
        q_BTNQ, q_BTNP = flat.unflatten(-1, (self.num_heads, -1)).split(
            [self.qk_nope_head_dim, self.qk_rope_head_dim], -1
        )
        return q_BTNQ, self.rotary(q_BTNP, coords)

    def _latents(self, x_BTD: Tensor, coords: Coordinates) -> tuple[Tensor, Tensor]:
        latent_BTR, key_BTP = self.kv_a_proj(x_BTD).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        return self.kv_a_norm(latent_BTR), self.rotary(key_BTP.unsqueeze(2), coords).squeeze(2)

    def _explicit(
        self, q_BTNQ: Tensor, q_BTNP: Tensor, latent_BSR: Tensor, key_BSP: Tensor, keys: Coordinates
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Every head's keys and values. Padding is silenced: not even NaN there may reach a matrix's gradient."""
        both = self.kv_b_proj(zero_padding(latent_BSR, keys)).unflatten(-1, (self.num_heads, -1))
        k_BSNQ, v_BSNU = both.split([self.qk_nope_head_dim, self.v_head_dim], -1)
        k_BSNP = key_BSP.unsqueeze(2).expand(-1, -1, self.num_heads, -1)
        return torch.cat([q_BTNQ, q_BTNP], -1), torch.cat([k_BSNQ, k_BSNP], -1), v_BSNU

    def _absorbed(
        self, q_BTNQ: Tensor, q_BTNP: Tensor, latent_BSR: Tensor, key_BSP: Tensor, _keys: Coordinates
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One key and one value for all heads: the latent, beside the shared key."""
        keys_NQR, _ = self.up()
        q_BTNR = torch.einsum("btnq,nqr->btnr", q_BTNQ, keys_NQR)
        k_BSH = torch.cat([latent_BSR, key_BSP], -1)
        return torch.cat([q_BTNR, q_BTNP], -1), k_BSH.unsqueeze(2), latent_BSR.unsqueeze(2)

    def up(self) -> tuple[Tensor, Tensor]:
        """``kv_b_proj`` as it is for each head: ``[N, Q, R]`` for keys and ``[N, U, R]`` for values."""
        keys_NQR, values_NUR = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)).split(
            [self.qk_nope_head_dim, self.v_head_dim], 1
        )
        return keys_NQR, values_NUR

    def _absorbs(self, queries: int, keys: int, cache: LayerCache | None) -> bool:
        if self.absorbed != "auto":
            return self.absorbed
        if cache is None:
            return False
        # multiplications a head: making keys and values (or queries and outputs) longer, then attending
        up = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        explicit = keys * up + queries * keys * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
        return queries * up + queries * keys * (2 * self.kv_lora_rank + self.qk_rope_head_dim) < explicit


def _default_scale(size: int, rotary: Rotary) -> float:
    multiplier: float = getattr(rotary.scaling, "score_multiplier", 1.0)
    return size**-0.5 * multiplier
