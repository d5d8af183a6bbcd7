"""Scaling of rotary frequencies, for text longer than a model was trained on.

Each kind is a frozen value with three methods: ``frequencies`` (radians a position, float64), ``multiplier`` (what
cosines and sines are multiplied by), and ``changes_angles`` (whether a document that grows from one length to another
changes its frequencies, so that keys rotated before must not be mixed with queries rotated after).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pellucid.errors import ArgumentError, ShapeError
from pellucid.nn.positions.rotary import RopeScaling, frequencies
from pellucid.shapes import Float, Int, Tensor
from pellucid.visibility import Coordinates


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Positions divided by ``factor`` (position interpolation; Chen et al. 2023 §2.3)."""

    factor: float

    def __post_init__(self) -> None:
        _need_positive("factor", self.factor)

    def frequencies(self, size: int, base: float, coordinates: Coordinates) -> Float[Tensor, "pairs"]:
        return frequencies(size, base, coordinates.positions.device) / self.factor


@dataclass(frozen=True)
class PartialScaling(RopeScaling):
    """Only the first ``partial_rotary_factor`` of all pairs rotate, each as if all did (Gemma 4).

    The others keep frequency 0.

    Unlike a partial :class:`~pellucid.nn.positions.Rotary`, partners are those of the whole head, and so are exponents.
    """

    partial_rotary_factor: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        _need_positive("factor", self.factor)
        if not 0 < self.partial_rotary_factor <= 1:
            raise ArgumentError(
                f"partial_rotary_factor is {self.partial_rotary_factor}, but a part above 0 and up to 1 of "
                "the pairs can rotate"
            )

    def check(self, size: int, base: float) -> None:
        if not self._rotating(size):
            raise ShapeError(
                f"partial_rotary_factor is {self.partial_rotary_factor}, but of {size // 2} pairs none would rotate; "
                "make it larger"
            )

    def frequencies(self, size: int, base: float, coordinates: Coordinates) -> Float[Tensor, "pairs"]:
        every = frequencies(size, base, coordinates.positions.device)
        rotates = torch.arange(len(every), device=every.device) < self._rotating(size)
        return torch.where(rotates, every / self.factor, 0.0)

    def _rotating(self, size: int) -> int:
        return int(self.partial_rotary_factor * size // 2)


@dataclass(frozen=True)
class DynamicNTKScaling(RopeScaling):
    """A base that grows with the document past ``original_max_position_embeddings``.

    Slow pairs stretch most, the fastest not at all.

    ``base · (factor · length / original − (factor − 1)) ** (size / (size − 2))`` (bloc97 and emozilla 2023, described
    in Peng et al. 2023 §3.3). The base changes with every token past the original length, so a cache ends there.
    """

    factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _need_positive("factor", self.factor)
        _need_length(self.original_max_position_embeddings)

    def check(self, size: int, base: float) -> None:
        if size < 4:
            raise ShapeError(f"dynamic NTK divides by size - 2, but {size} features are rotated; rotate 4 or more")

    def frequencies(self, size: int, base: float, coordinates: Coordinates) -> Float[Tensor, "B T pairs"]:
        lengths_BT1 = (
            document_lengths(coordinates)[:, :, None].clamp(min=self.original_max_position_embeddings).double()
        )
        growth_BT1 = self.factor * lengths_BT1 / self.original_max_position_embeddings - (self.factor - 1)
        # base ** (-2i / size) with the grown base, by powers of each factor
        shares = 2 * torch.arange((size + 1) // 2, dtype=torch.float64, device=lengths_BT1.device) / (size - 2)
        return frequencies(size, base, lengths_BT1.device) * growth_BT1**-shares

    def table(self, length: int) -> int:
        return max(length, self.original_max_position_embeddings)


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Fast pairs stay, slow ones are divided by ``factor`` (Llama 3.1).

    Fast are those that rotate more than ``high_freq_factor`` times in the original length, slow those that rotate fewer
    than ``low_freq_factor`` times. Between the two the change is linear in the number of turns (reference
    code, ``apply_scaling``).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _need_positive("factor", self.factor)
        _need_length(self.original_max_position_embeddings)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ArgumentError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor is {self.high_freq_factor}; "
                "low_freq_factor must be above 0 and below high_freq_factor"
            )

    def frequencies(self, size: int, base: float, coordinates: Coordinates) -> Float[Tensor, "pairs"]:
        plain = frequencies(size, base, coordinates.positions.device)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """NTK-by-parts with a temperature (YaRN; Peng et al. 2023 §3.2, §3.4).

    Pairs that rotate more than ``beta_fast`` times in the original length stay, fewer than ``beta_slow``: divided by
    ``factor``; between the two the change is linear in the number of the pair, from whole numbers if ``truncate``.

    Cosines and sines are multiplied by ``attention_factor``; left out, by ``m(mscale) / m(mscale_all_dim)`` where both
    are given (DeepSeek-V2's reference code), else by ``m(1)``, with ``m(s) = 0.1 · s · ln(factor) + 1``.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _need_positive("factor", self.factor)
        _need_length(self.original_max_position_embeddings)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ArgumentError(
                f"beta_slow is {self.beta_slow} and beta_fast {self.beta_fast}; make beta_slow the smaller, above 0"
            )
        if self.attention_factor is None and (self.mscale is None) != (self.mscale_all_dim is None):
            raise ArgumentError(
                f"mscale is {self.mscale} and mscale_all_dim is {self.mscale_all_dim}; give both, or neither, or an "
                "attention_factor"
            )

    def check(self, size: int, base: float) -> None:
        if base <= 1:
            raise ArgumentError(f"YaRN needs a base above 1, but the base is {base}")

    def frequencies(self, size: int, base: float, coordinates: Coordinates) -> Float[Tensor, "pairs"]:
        plain = frequencies(size, base, coordinates.positions.device)
        low, high = self._ramp(size, base)
        pairs = torch.arange(len(plain), dtype=torch.float64, device=plain.device)
        stretched = ((pairs - low) / (high - low)).clamp(0, 1)
        return plain * (1 - stretched + stretched / self.factor)

    def multiplier(self, coordinates: Coordinates) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._m(1.0)
        return self._m(self.mscale) / self._m(self.mscale_all_dim)

    @property
    def score_multiplier(self) -> float:
        """What DeepSeek's latent attention multiplies its softmax scale by: ``m(mscale_all_dim) ** 2``, or 1."""
        return 1.0 if self.mscale_all_dim is None else self._m(self.mscale_all_dim) ** 2

    def _m(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _ramp(self, size: int, base: float) -> tuple[float, float]:
        """The numbers of the pairs that rotate ``beta_fast`` and ``beta_slow`` times in the original length."""

        def pair(turns: float) -> float:
            return size * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        return low, high + 0.001 if low == high else high


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """One divisor a pair: ``short_factor`` up to the original length, ``long_factor`` past it (LongRoPE).

    Ding et al. 2024 §3.2. The table is chosen by the length of each document, not by the room in a cache. Cosines and
    sines are multiplied by ``attention_factor``: a number, or one for each table ``(short, long)``; left out, it is
    ``sqrt(1 + ln(factor) / ln(original_max_position_embeddings))``, where text may be ``factor`` times longer.
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_max_position_embeddings: int
    attention_factor: float | tuple[float, float] | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "short_factor", tuple(map(float, self.short_factor)))
        object.__setattr__(self, "long_factor", tuple(map(float, self.long_factor)))
        if isinstance(self.attention_factor, list):
            object.__setattr__(self, "attention_factor", tuple(self.attention_factor))
        _need_length(self.original_max_position_embeddings)
        for divisor in (*self.short_factor, *self.long_factor):
            _need_positive("a divisor of short_factor or long_factor", divisor)
        if self.attention_factor is None and (self.factor is None or self.original_max_position_embeddings < 2):
            raise ArgumentError(
                f"attention_factor is None, factor {self.factor} and original_max_position_embeddings "
                f"{self.original_max_position_embeddings}; give "
                "attention_factor, or factor and an original_max_position_embeddings above 1"
            )

    def check(self, size: int, base: float) -> None:
        if not len(self.short_factor) == len(self.long_factor) == size // 2:
            raise ShapeError(
                f"LongRope has {len(self.short_factor)} short and {len(self.long_factor)} long divisors, but {size} "
                f"rotated features are {size // 2} pairs; give one divisor a pair"
            )

    def frequencies(self, size: int, base: float, coordinates: Coordinates) -> Float[Tensor, "B T pairs"]:
        device = coordinates.positions.device
        plain = frequencies(size, base, device)
        short, long = (
            torch.tensor(x, dtype=torch.float64, device=device) for x in (self.short_factor, self.long_factor)
        )
        return torch.where(self._is_long(coordinates), plain / long, plain / short)

    def multiplier(self, coordinates: Coordinates) -> float | Float[Tensor, "B T 1"]:
        match self.attention_factor:
            case None:
                assert self.factor is not None
                stretch = max(self.factor, 1.0)
                return math.sqrt(1 + math.log(stretch) / math.log(self.original_max_position_embeddings))
            case (short, long):
                is_long = self._is_long(coordinates)
                return torch.where(is_long, float(long), float(short)).double()
            case number:
                return float(number)

    def table(self, length: int) -> int:
        return int(length > self.original_max_position_embeddings)

    def _is_long(self, coordinates: Coordinates) -> Tensor:
        return document_lengths(coordinates)[:, :, None] > self.original_max_position_embeddings


def _need_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentError(f"{name} is {value}, but a finite number above 0 is needed")


def _need_length(value: int) -> None:
    if value < 1:
        raise ArgumentError(f"original_max_position_embeddings is {value}, but a model was trained on at least 1 token")


def document_lengths(coordinates: Coordinates) -> Int[Tensor, "B T"]:
    """For each slot, how long its document is as far as these coordinates reach: its last position plus one.

    A document that continues a cache counts its past, because its positions do. Padding counts as a document of
    its own, and its numbers mean nothing.
    """
    return coordinates.cached("document lengths", lambda: _lengths(coordinates))


def _lengths(coordinates: Coordinates) -> Tensor:
    order_BT = coordinates.segments.argsort(stable=True, dim=1)
    segments_BT = coordinates.segments.gather(1, order_BT)
    first_B1 = torch.zeros_like(segments_BT[:, :1])
    document_BT = torch.cat([first_B1, (segments_BT.diff(dim=1) != 0).cumsum(1)], 1)
    ends_BT = (coordinates.positions + 1).gather(1, order_BT)
    longest_BT = torch.zeros_like(ends_BT).scatter_reduce(1, document_BT, ends_BT, "amax", include_self=False)
    return torch.empty_like(ends_BT).scatter(1, order_BT, longest_BT.gather(1, document_BT))
