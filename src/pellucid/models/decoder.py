"""The decoder-only Transformer: each token is made from what its layers' rules let it see."""

from __future__ import annotations

from collections.abc import Callable

from pellucid.models.model import Model
from pellucid.nn.cache import ContiguousCache
from pellucid.nn.positions import Rotary


class Decoder(Model):
    """Tokens in, a distribution over the next token out, for every position at once."""

    def new_cache(self, rows: int, capacity: int) -> ContiguousCache:
        """An empty cache for ``rows`` rows of up to ``capacity`` slots (padding takes slots too)."""
        return ContiguousCache(
            shapes=[block.attention.cache_shapes for block in self.layers],  # type: ignore[union-attr, misc]
            rows=rows,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
            crosses=self.changes_angles,
        )

    @property
    def changes_angles(self) -> Callable[[int, int], bool] | None:
        """Whether a document that grows from one length to another changes the angles of keys that a cache holds.

        None: whatever the lengths, it does not.
        """
        turning = [part for part in self.layers.modules() if isinstance(part, Rotary) and part.scaling.by_length]
        if not turning:
            return None
        return lambda before, after: any(part.changes_angles(before, after) for part in turning)
