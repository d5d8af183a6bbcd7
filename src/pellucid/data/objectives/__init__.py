"""What each position, or each document, has to predict. The one owner of the shift: no model or loss moves a label.

Every objective is called as ``objective(batch, generator)`` and returns a batch. ``generator`` is all that it draws
from; :class:`~pellucid.data.Loader` gives each batch one that follows from its seed, the batch's number and the rank.
Labels that a batch already has stay as they are.
"""

from pellucid.data.objectives.causal_lm import MultiStepTarget, Objective, PrefixLM, SequenceToSequence, causal
from pellucid.data.objectives.denoising import MaskedLM, SpanCorruption
from pellucid.data.objectives.supervised import Classification, Contrastive, Regression, Span, TokenClassification

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
    "TokenClassification",
    "causal",
]
