"""Position biases: what is added to attention scores, as a function of where query and key are.

Each is called with the coordinates of queries and keys and gives ``[B or 1, N, T, S]``: 1 where the host knows that
all rows have the same positions. Nothing here knows about visibility; hidden scores are selected away by the rule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from pellucid.errors import ArgumentError, ShapeError
from pellucid.shapes import Float, Int, Tensor
from pellucid.visibility import Coordinates


class RelativeBias(nn.Embedding):
    """One learned number a head for each bucket of distances (T5; Raffel et al. 2020 §2.1, mesh_tensorflow's code).

    Half of the buckets are one distance each; the others grow with its logarithm up to ``max_distance``, from where
    on all share the last. ``bidirectional`` keeps the second half of the buckets for keys ahead; without it all
    buckets look back, and keys ahead share the bucket of distance 0. ``weight`` is ``[num_buckets, num_heads]``.

    The buckets are made once for a pair of coordinates; the bias is part of the graph and stored nowhere. Layers that
    share a table share the *result*: call this once a forward and pass it to each ``attend(…, bias=bias)``.
    """

    def __init__(self, num_heads: int, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128) -> None:
        one_way = num_buckets // 2 if bidirectional else num_buckets
        if one_way < 2 or (bidirectional and num_buckets % 2):
            need = "an even number of 4 or more" if bidirectional else "2 or more"
            raise ShapeError(
                f"num_buckets is {num_buckets}, but {'bidirectional' if bidirectional else 'one-way'} biases need "
                f"{need}"
            )
        if max_distance <= one_way // 2:
            raise ShapeError(
                f"max_distance is {max_distance}, but the first {one_way // 2} distances have buckets of their own; "
                f"make it above {one_way // 2}"
            )
        super().__init__(num_buckets, num_heads, _weight=torch.zeros(num_buckets, num_heads))
        self.bidirectional = bidirectional
        self.max_distance = max_distance
        self.single = one_way // 2
        self.bounds = _bounds(self.single, one_way - self.single, max_distance)

    def forward(  # type: ignore[override]
        self, queries: Coordinates, keys: Coordinates, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "b N T S"]:
        """The bias of each head for each pair, in ``dtype`` (the table's own if left out)."""
        bias_bTSN = super().forward(self.buckets(queries, keys))
        return bias_bTSN.permute(0, 3, 1, 2).to(self.weight.dtype if dtype is None else dtype)

    def buckets(self, queries: Coordinates, keys: Coordinates) -> Int[Tensor, "b T S"]:
        """The row of the table that each pair reads."""
        key = ("buckets", self.bidirectional, self.num_embeddings, self.max_distance)
        return _once(queries, keys, key, lambda: self._bucket(_distances(queries, keys)))

    def _bucket(self, ahead_bTS: Tensor) -> Tensor:
        distance = ahead_bTS.abs() if self.bidirectional else (-ahead_bTS).clamp(min=0)
        bounds = _constant(tuple(self.bounds), distance.dtype, distance.device)
        grown = self.single + torch.bucketize(distance, bounds, right=True)
        bucket = torch.where(distance < self.single, distance, grown)
        if self.bidirectional:
            bucket = bucket + (ahead_bTS > 0) * (self.num_embeddings // 2)
        return bucket.int()

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.embedding_dim}, bidirectional={self.bidirectional}, num_buckets={self.num_embeddings}, "
            f"max_distance={self.max_distance}"
        )


def _bounds(single: int, grown: int, max_distance: int) -> tuple[int, ...]:
    """The first distance of each grown bucket but the first, in whole numbers, so that no rounding moves one.

    Bucket ``single + k`` begins at the smallest n with ``log(n / single) / log(max / single) · grown >= k``.
    """

    def reaches(n: int, k: int) -> bool:
        return n**grown * single**k >= max_distance**k * single**grown

    candidates = range(single, max_distance + 1)
    return tuple(single + bisect_left(candidates, True, key=lambda n: reaches(n, k)) for k in range(1, grown))


class Alibi(nn.Module):
    """``−slope · |i − j|`` for query i and key j, one fixed slope a head (ALiBi; Press et al. 2022 §3).

    Among the keys that a causal query sees this is the paper's ``slope · (j − i)``; without causality it is the same
    on both sides. For n a power of two the slopes are ``2 ** (−alibi_bias_max · h / n)``, h = 1 … n; for other n
    those of the power below, followed by every second one of the power above (the paper's code, ``get_slopes``). They
    are not trained.
    """

    def __init__(self, num_heads: int, *, alibi_bias_max: float = 8.0) -> None:
        super().__init__()
        if num_heads < 1:
            raise ShapeError(f"num_heads is {num_heads}, but a slope is for one head or more")
        if not alibi_bias_max > 0:
            raise ArgumentError(f"alibi_bias_max is {alibi_bias_max}, but must be above 0; the paper's is 8")
        self.num_heads = num_heads
        self.alibi_bias_max = alibi_bias_max
        self.slopes = _slopes(num_heads, alibi_bias_max)

    def forward(
        self, queries: Coordinates, keys: Coordinates, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "b N T S"]:
        """The bias of each head for each pair, in ``dtype`` (float32 if left out); made once for both coordinates."""
        chosen = torch.float32 if dtype is None else dtype
        return _once(
            queries, keys, ("alibi", self.slopes, chosen), lambda: self._bias(_distances(queries, keys), chosen)
        )

    def _bias(self, ahead_bTS: Tensor, dtype: torch.dtype) -> Tensor:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        slopes_N11 = _constant(self.slopes, exact, ahead_bTS.device)[:, None, None]
        return (slopes_N11 * (-ahead_bTS.abs())[:, None].to(exact)).to(dtype)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, alibi_bias_max={self.alibi_bias_max}"


def _slopes(num_heads: int, most: float) -> tuple[float, ...]:
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-most * h / power) for h in range(1, power + 1)]
    between = [2.0 ** (-most * (h - 0.5) / power) for h in range(1, num_heads - power + 1)]
    return tuple(slopes + between)


def _distances(queries: Coordinates, keys: Coordinates) -> Int[Tensor, "b T S"]:
    """How far ahead of the query each key is (negative: behind), from positions."""
    if queries.shape[0] != keys.shape[0]:
        raise ShapeError(f"queries have {queries.shape[0]} rows and keys {keys.shape[0]}; give both for the same rows")
    rows = slice(0, 1) if _alike(queries) and _alike(keys) else slice(None)
    return keys.positions[rows, None, :] - queries.positions[rows, :, None]


def _alike(coordinates: Coordinates) -> bool:
    """Whether the host knows that all rows have the same positions."""
    layout = None if torch.compiler.is_compiling() else coordinates.layout
    return layout is not None and layout.kind == "full" and len({run.first for run in layout.runs}) == 1


def _once(queries: Coordinates, keys: Coordinates, name: Hashable, make: Callable[[], Tensor]) -> Any:
    # the keys are kept beside the result, so that their id means them as long as it is a key here
    result, _ = queries.cached((name, id(keys)), lambda: (make(), None if keys is queries else keys))
    return result


def _constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``numbers`` as a tensor, moved to ``device`` once and not in every pass."""
    if torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=dtype, device=device)
    return _moved(numbers, dtype, device)


@lru_cache(maxsize=64)
def _moved(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # what is kept must serve training too
        return torch.tensor(numbers, dtype=dtype, device=device)
