"""Text to ``Batch``: tokenizers, chat templates, corpora, examples, packing, objectives, loader. Knows no model."""

from pellucid.batch import IGNORED, Batch
from pellucid.data.chat import PLAIN, ChatTemplate, encode_chat, encode_prompt
from pellucid.data.examples import open_examples
from pellucid.data.forms import Alike, Answered, Labelled, Paired, Prompted, Scored, Tagged
from pellucid.data.labelled import Examples
from pellucid.data.loader import Loader
from pellucid.data.objectives import (
    Ahead,
    Classification,
    Contrastive,
    MaskedLM,
    PrefixLM,
    Regression,
    SequenceToSequence,
    Span,
    SpanCorruption,
    TokenLabelling,
    causal,
)
from pellucid.data.packing import pack
from pellucid.data.special import MASK, sentinels
from pellucid.data.store import TokenStore
from pellucid.data.text import Corpus, Document, open_corpus, split_of
from pellucid.data.tokenizer import Tokenizer

__all__ = [
    "IGNORED",
    "MASK",
    "PLAIN",
    "Ahead",
    "Alike",
    "Answered",
    "Batch",
    "ChatTemplate",
    "Classification",
    "Contrastive",
    "Corpus",
    "Document",
    "Examples",
    "Labelled",
    "Loader",
    "MaskedLM",
    "Paired",
    "PrefixLM",
    "Prompted",
    "Regression",
    "Scored",
    "SequenceToSequence",
    "Span",
    "SpanCorruption",
    "Tagged",
    "TokenLabelling",
    "TokenStore",
    "Tokenizer",
    "causal",
    "encode_chat",
    "encode_prompt",
    "open_corpus",
    "open_examples",
    "pack",
    "sentinels",
    "split_of",
]
