"""What each position, or each document, has to predict. The one owner of the shift: no model or loss moves a label.

Every objective is called as ``objective(batch, dice)`` and returns a batch. ``dice`` is the generator that it
draws from; :class:`~pellucid.data.Loader` gives each batch dice that follow from its seed, the batch's number
and the rank. Labels that a batch already has stay as they are.
"""

from pellucid.data.objectives.base import Objective
from pellucid.data.objectives.causal_lm import MultiStepTarget, PrefixLM, SequenceToSequence, causal
from pellucid.data.objectives.masked_lm import MaskedLM
from pellucid.data.objectives.span_corruption import SpanCorruption
from pellucid.data.objectives.supervised import Classification, Contrastive, Regression, Span, TokenLabelling

__all__ = [
    "Classification",
    "Contrastive",
    "MaskedLM",
    "MultiStepTarget",
    "Objective",
    "PrefixLM",
    "Regression",
    "SequenceToSequence",
    "Span",
    "SpanCorruption",
    "TokenLabelling",
    "causal",
]
