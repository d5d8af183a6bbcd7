"""What each position, or each document, has to predict. The one owner of the shift: no model or loss moves a label.

Every objective is called as ``objective(batch, dice)`` and returns a batch. ``dice`` is the generator that it
draws from; :class:`~pellucid.data.Loader` gives each batch dice that follow from its seed, the batch's number
and the rank. Labels that a batch already has stay as they are.
"""

from pellucid.data.objectives.documents import Classification, Contrastive, Regression, Span, TokenLabelling
from pellucid.data.objectives.infill import SpanCorruption
from pellucid.data.objectives.masked import MaskedLM
from pellucid.data.objectives.onward import Ahead, PrefixLM, SequenceToSequence, causal
from pellucid.data.objectives.signature import Objective

__all__ = [
    "Ahead",
    "Classification",
    "Contrastive",
    "MaskedLM",
    "Objective",
    "PrefixLM",
    "Regression",
    "SequenceToSequence",
    "Span",
    "SpanCorruption",
    "TokenLabelling",
    "causal",
]
