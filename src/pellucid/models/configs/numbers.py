"""Numbers as configs take them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=1, le=1 << 24)]
Heads = Annotated[int, Field(ge=1, le=1 << 14)]
Whole = Annotated[int, Field(ge=0, le=1 << 24)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
