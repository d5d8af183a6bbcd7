"""What each position has to predict. The one owner of the shift: neither model nor loss moves a label."""

from __future__ import annotations

import torch

from pellucid.data.batch import IGNORED, Batch


def causal(batch: Batch) -> Batch:
    """``batch`` with the next token as each position's label.

    ``labels[b, t]`` is the token in slot t+1 where that is the next position of the same document, and
    :data:`IGNORED` elsewhere: at a document's last token and at padding. What is padding, segments say and
    ids do not, so a true end token counts even where padding has the same id. Labels already given stay.

    >>> causal(Batch.packed([[5, 8, 2], [7, 9]], length=6)).labels.tolist()
    [[8, 2, -100, 9, -100, -100]]
    """
    if batch.labels is not None:
        return batch
    here, ahead = slice(None, -1), slice(1, None)
    segments, positions = batch.segments, batch.positions
    goes_on = (segments[:, here] == segments[:, ahead]) & (segments[:, here] != 0)
    goes_on &= positions[:, ahead] == positions[:, here] + 1
    labels = torch.full_like(batch.tokens, IGNORED)
    labels[:, here] = torch.where(goes_on, batch.tokens[:, ahead], IGNORED)
    return batch.with_labels(labels)
