"""Text to ``Batch``: tokenizer, corpora, packing, objectives, loader. This room knows no model."""

from pellucid.data.batch import IGNORED, Batch
from pellucid.data.loader import Loader
from pellucid.data.objectives import causal
from pellucid.data.packing import pack
from pellucid.data.store import TokenStore
from pellucid.data.text import Corpus, Document, open_corpus, split_of
from pellucid.data.tokenizer import Tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "Corpus",
    "Document",
    "Loader",
    "TokenStore",
    "Tokenizer",
    "causal",
    "open_corpus",
    "pack",
    "split_of",
]
