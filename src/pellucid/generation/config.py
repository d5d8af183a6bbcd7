"""What one request asks for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.errors import ConfigError

MOST = 1 << 40
"""The largest number of tokens that can be asked for."""
TokenId = Annotated[int, Field(ge=0, le=1 << 24)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class GenerationConfig(Config):
    """How tokens are chosen and when to stop. The default is greedy: the same request, the same tokens.

    ``repetition_penalty`` comes first. Filters apply in this order, each to what the one before it kept:
    temperature, ``top_k``, ``top_p``, ``min_p``. None of them ever removes the most likely token.
    """

    max_new_tokens: int = Field(default=64, ge=1, le=MOST)
    min_new_tokens: int = Field(default=0, ge=0, le=MOST)
    """So many new tokens must come before one that is of ``stop_token_ids`` or completes a text of ``stop``."""
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    """Each token that the row holds already: its logit is divided by this where positive, multiplied where negative.

    1 changes nothing. Keskar et al. 2019 (CTRL, section 4.1), made to agree for both signs. Padding is never counted.
    """
    penalize_prompt: bool = True
    """Whether tokens of the prompt are penalized like new ones. What an encoder reads is never counted."""
    temperature: float = Field(default=0.0, ge=0)
    """What logits are divided by; 0 takes the most likely token."""
    top_k: int | None = Field(default=None, ge=1, le=MOST)
    """Keep this many most likely tokens (None: all)."""
    top_p: float = Field(default=1.0, ge=0, le=1)
    """Keep the fewest most likely tokens whose probabilities sum to this much."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keep tokens at least this likely, relative to the most likely one."""
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=256)
    """Tokens that end the row; the one that did is the last of the row's tokens and no part of its text."""
    stop: tuple[StopText, ...] = Field(default=(), max_length=64)
    """Texts that end the row; the completion's text is what came before."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Where the request's own random numbers start (None: anywhere). Rows with equal seeds draw equally."""

    @model_validator(mode="after")
    def _agree(self) -> GenerationConfig:
        _refuse_crossed(self.min_new_tokens, self.max_new_tokens)
        return self


class BeamSearchConfig(Config):
    """What a beam search looks for: the ``num_return_sequences`` sequences of the highest score that it meets.

    A sequence ends with a token of ``stop_token_ids`` or after ``max_new_tokens``. Its score is the sum of its new
    tokens' log-probabilities (the stop id's included) divided by a penalty of their number n; the prompt counts in
    neither.
    """

    num_beams: int = Field(default=4, ge=1, le=10_000)
    """How many unfinished sequences of one prompt are kept after each step."""
    num_return_sequences: int = Field(default=1, ge=1, le=10_000)
    """How many finished ones are wanted, at most ``num_beams``."""
    length_penalty: float = Field(default=1.0, ge=-16, le=16)
    """The exponent alpha. Above 0 longer sequences gain, below 0 they lose; 0 compares plain sums."""
    penalty_form: Literal["power", "gnmt"] = "power"
    """``power``: n**alpha (1: the mean). ``gnmt``: ((5 + n) / 6)**alpha (Wu et al. 2016, section 7, equation 14)."""
    max_new_tokens: int = Field(default=64, ge=1, le=MOST)
    min_new_tokens: int = Field(default=0, ge=0, le=MOST)
    """So many new tokens must come before one of ``stop_token_ids``."""
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=256)
    """Tokens that end a sequence; the one that did is the last of its tokens."""

    @model_validator(mode="after")
    def _agree(self) -> BeamSearchConfig:
        _refuse_crossed(self.min_new_tokens, self.max_new_tokens)
        if self.num_return_sequences > self.num_beams:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences}, but num_beams is {self.num_beams}, "
                "raise num_beams"
            )
        return self

    def penalty(self, new: int) -> float:
        """What the sum of ``new`` log-probabilities is divided by."""
        base = float(new) if self.penalty_form == "power" else (5 + new) / 6
        return float(base**self.length_penalty)


def _refuse_crossed(least: int, most: int) -> None:
    if least > most:
        raise ConfigError(f"min_new_tokens is {least}, but max_new_tokens is {most}, raise max_new_tokens")
