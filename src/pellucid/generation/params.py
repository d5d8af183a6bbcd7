"""What one request asks for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.errors import ConfigError

TokenId = Annotated[int, Field(ge=0)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class GenerationParams(Config):
    """How tokens are chosen and when to stop. The default is greedy: the same request, the same tokens.

    Filters apply in this order, each to what the one before it kept: temperature, ``top_k``, ``top_p``,
    ``min_p``. None of them ever removes the most likely token.
    """

    max_new_tokens: int = Field(default=64, ge=1)
    min_new_tokens: int = Field(default=0, ge=0)
    """So many new tokens must come before one that is of ``stop_ids`` or completes a text of ``stop``."""
    temperature: float = Field(default=0.0, ge=0)
    """What logits are divided by; 0 takes the most likely token."""
    top_k: int | None = Field(default=None, ge=1)
    """Keep this many most likely tokens (None: all)."""
    top_p: float = Field(default=1.0, ge=0, le=1)
    """Keep the fewest most likely tokens whose probabilities sum to this much."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keep tokens at least this likely, relative to the most likely one."""
    stop_ids: tuple[TokenId, ...] = Field(default=(), max_length=256)
    """Tokens that end the row; the one that did is the last of the row's tokens and no part of its text."""
    stop: tuple[StopText, ...] = Field(default=(), max_length=64)
    """Texts that end the row; the completion's text is what came before."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Where the request's own random numbers start (None: anywhere). Rows with equal seeds draw equally."""

    @model_validator(mode="after")
    def _agree(self) -> GenerationParams:
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {self.min_new_tokens}, but max_new_tokens is {self.max_new_tokens}, "
                "raise max_new_tokens"
            )
        return self
