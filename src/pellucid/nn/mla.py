"""Multi-head latent attention: keys and values of all heads are made from one short vector a token, which is cached.

Letters here: R rank of the latent, P features of the rotary part, Q of the part without positions, U of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from pellucid.errors import ArgumentError, ShapeError
from pellucid.nn.attend import AttentionOptions, attend, probabilities
from pellucid.nn.attention import LayerContext, options_for
from pellucid.nn.backends.inputs import replace_nonfinite
from pellucid.nn.cache import LayerCache
from pellucid.nn.embedding import zero_padding
from pellucid.nn.positions import Rotary
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates, Rule


class MLA(nn.Module):
    """MLA (DeepSeek-V2, DeepSeek-AI 2024 §2.1; eq. 9–19): low-rank queries, keys and values, and one shared rotary key.

    A head's query and key are ``qk_nope_head_dim`` features without positions, made from the latents, then
    ``qk_rope_head_dim`` features rotated by ``rotary``; that part of the key is the same for all heads.

    A cache stores the latent and the shared key. The explicit form makes every head's keys and values from them, as the
    paper writes it. The absorbed form multiplies queries and outputs instead, and attends to the latents themselves:
    the same numbers from less work where few queries meet many latents.

    Args:
        hidden_size: features of the residual stream.
        q_lora_rank: size of the queries' latent; None makes queries in one step.
        kv_lora_rank: size of the latent of keys and values.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: features of a head.
        norm: ``norm(size)`` makes the norm behind each first step.
        q_a_bias, kv_a_bias, o_bias: a bias on the first steps and on the last.
        options: ``scale`` defaults to ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``, times the
            ``score_multiplier`` of the rotary scaling where it has one (YaRN).
        absorbed: ``"auto"`` takes the absorbed form where a cache is read and it needs fewer multiplications; True and
            False fix it.

    Raises:
        ShapeError: a ``rotary`` for heads of another size.
        ArgumentError: a bias of queries' first step without a ``q_lora_rank``.
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
        q_a_bias: bool = False,
        kv_a_bias: bool = False,
        o_bias: bool = False,
        options: AttentionOptions = AttentionOptions(),  # noqa: B008 - frozen
        absorbed: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__()
        if rotary.head_dim != qk_rope_head_dim:
            raise ShapeError(
                f"qk_rope_head_dim is {qk_rope_head_dim}, but rotary is for heads of {rotary.head_dim}; make them agree"
            )
        if q_a_bias and q_lora_rank is None:
            raise ArgumentError("q_a_bias is true, but without a q_lora_rank there is no such projection; leave it out")
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.rule = rule
        self.rotary = rotary
        qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        scale = qk_head_dim**-0.5 * rotary.scaling.score_multiplier if options.scale is None else options.scale
        self.options = replace(options, scale=scale)
        self.absorbed = absorbed
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, num_heads * qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=q_a_bias)
            self.q_a_norm = norm(q_lora_rank)
            self.q_b_proj = nn.Linear(q_lora_rank, num_heads * qk_head_dim, bias=False)
        self.has_q_lora = q_lora_rank is not None
        self.kv_a_proj = nn.Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=kv_a_bias)
        self.kv_a_norm = norm(kv_lora_rank)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=o_bias)

    @property
    def cache_shapes(self) -> tuple[tuple[int], tuple[int]]:
        """The shape of one slot of a cache: the latent and the shared key."""
        return (self.kv_lora_rank,), (self.qk_rope_head_dim,)

    def forward(self, x_BTD: Float[Tensor, "B T D"], ctx: LayerContext) -> Float[Tensor, "B T D"]:
        """What each token gathers from those that it sees."""
        q_BTNQ, q_BTNP = self._queries(x_BTD, ctx.q_coords)
        latent_BSR, key_BSP = self._latents(x_BTD, ctx.q_coords)
        nonfinite_BS = None
        if ctx.cache is not None:
            (latent_BSR, key_BSP), nonfinite_BS = ctx.cache.append(latent_BSR, key_BSP)
        absorbed = self._absorbs(x_BTD.shape[1], latent_BSR.shape[1], ctx.cache)
        make = self._absorbed if absorbed else self._explicit
        q_BTNH, k_BSKH, v_BSKU = make(q_BTNQ, q_BTNP, latent_BSR, key_BSP, ctx.k_coords)
        if nonfinite_BS is not None and not absorbed:  # a finite latent may make keys and values that are too large
            (k_BSKH, v_BSKU), overflow_BS = replace_nonfinite(k_BSKH, v_BSKU)
            nonfinite_BS = nonfinite_BS if overflow_BS is None else nonfinite_BS | overflow_BS
        out_BTNU = attend(
            q_BTNH,
            k_BSKH,
            v_BSKU,
            rule=self.rule,
            q_coords=ctx.q_coords,
            k_coords=ctx.k_coords,
            bias=ctx.bias,
            nonfinite=nonfinite_BS,
            options=options_for(self),
        )
        if absorbed:
            _, values_NUR = self.up()
            out_BTNU = torch.einsum("btnr,nur->btnu", out_BTNU, values_NUR)
        return self.o_proj(out_BTNU.flatten(-2))

    def weights(self, x_BTD: Float[Tensor, "B T D"], ctx: LayerContext) -> Float[Tensor, "B N T T"]:
        """The attention weights of each head, by the reference path; the weight of a hidden key is exactly 0."""
        coords = ctx.q_coords
        q, k, _ = self._explicit(*self._queries(x_BTD, coords), *self._latents(x_BTD, coords), coords)
        return probabilities(
            q, k, rule=self.rule, q_coords=coords, k_coords=coords, bias=ctx.bias, options=self.options
        )

    def _queries(self, x_BTD: Tensor, coords: Coordinates) -> tuple[Tensor, Tensor]:
        flat = self.q_b_proj(self.q_a_norm(self.q_a_proj(x_BTD))) if self.has_q_lora else self.q_proj(x_BTD)
        heads = flat.unflatten(-1, (self.num_heads, -1))
        q_BTNQ, q_BTNP = heads.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        return q_BTNQ, self.rotary(q_BTNP, coords)

    def _latents(self, x_BTD: Tensor, coords: Coordinates) -> tuple[Tensor, Tensor]:
        latent_BTR, key_BTP = self.kv_a_proj(x_BTD).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        return self.kv_a_norm(latent_BTR), self.rotary(key_BTP.unsqueeze(2), coords).squeeze(2)

    def _explicit(
        self, q_BTNQ: Tensor, q_BTNP: Tensor, latent_BSR: Tensor, key_BSP: Tensor, k_coords: Coordinates
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Every head's keys and values. Padding becomes 0: not even NaN there may reach a matrix's gradient."""
        both = self.kv_b_proj(zero_padding(latent_BSR, k_coords)).unflatten(-1, (self.num_heads, -1))
        k_BSNQ, v_BSNU = both.split([self.qk_nope_head_dim, self.v_head_dim], -1)
        k_BSNP = key_BSP.unsqueeze(2).expand(-1, -1, self.num_heads, -1)
        return torch.cat([q_BTNQ, q_BTNP], -1), torch.cat([k_BSNQ, k_BSNP], -1), v_BSNU

    def _absorbed(
        self, q_BTNQ: Tensor, q_BTNP: Tensor, latent_BSR: Tensor, key_BSP: Tensor, _k_coords: Coordinates
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One key and one value for all heads: the latent, beside the shared key."""
        keys_NQR, _ = self.up()
        q_BTNR = torch.einsum("btnq,nqr->btnr", q_BTNQ, keys_NQR)
        k_BSH = torch.cat([latent_BSR, key_BSP], -1)
        return torch.cat([q_BTNR, q_BTNP], -1), k_BSH.unsqueeze(2), latent_BSR.unsqueeze(2)

    def up(self) -> tuple[Tensor, Tensor]:
        """``kv_b_proj`` for each head: ``[N, Q, R]`` for keys and ``[N, U, R]`` for values."""
        weight_NXR = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        keys_NQR, values_NUR = weight_NXR.split([self.qk_nope_head_dim, self.v_head_dim], 1)
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
