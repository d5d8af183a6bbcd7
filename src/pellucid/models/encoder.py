"""The encoder-only Transformer: every token of a document is made from all of them."""

from __future__ import annotations

from pellucid.batch import Batch
from pellucid.errors import UnsupportedError
from pellucid.models.model import Model
from pellucid.nn.cache import ContiguousCache
from pellucid.visibility import Coordinates


class Encoder(Model):
    """Tokens in, a vector for each out, and what the head makes of them."""

    def placed(self, batch: Batch, cache: ContiguousCache | None) -> tuple[Coordinates, Coordinates]:
        if cache is not None:
            raise UnsupportedError("an encoder sees its whole document at once and keeps no cache; leave cache out")
        return super().placed(batch, None)
