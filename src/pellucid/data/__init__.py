"""Text to ``Batch``: tokenizer, chat templates, corpora, packing, objectives, loader. This room knows no model."""

from pellucid.data.batch import IGNORED, Batch
from pellucid.data.chat import PLAIN, ChatTemplate, encode_chat, encode_prompt
from pellucid.data.loader import Loader
from pellucid.data.objectives import causal
from pellucid.data.packing import pack
from pellucid.data.store import TokenStore
from pellucid.data.text import Corpus, Document, open_corpus, split_of
from pellucid.data.tokenizer import Tokenizer

__all__ = [
    "IGNORED",
    "PLAIN",
    "Batch",
    "ChatTemplate",
    "Corpus",
    "Document",
    "Loader",
    "TokenStore",
    "Tokenizer",
    "causal",
    "encode_chat",
    "encode_prompt",
    "open_corpus",
    "pack",
    "split_of",
]
