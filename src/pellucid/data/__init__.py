"""Text to ``Batch``: tokenizers, chat templates, corpora, examples, packing, objectives, loader. Knows no model."""

from pellucid.batch import IGNORED, Batch
from pellucid.data.chat import PLAIN, ChatTemplate, encode_chat, encode_prompt
from pellucid.data.corpus import Corpus, Document, open_corpus, split_of
from pellucid.data.examples import Examples, TokenStore
from pellucid.data.loader import Loader
from pellucid.data.objectives import (
    Classification,
    Contrastive,
    MaskedLM,
    MultiStepTarget,
    PrefixLM,
    Regression,
    SequenceToSequence,
    Span,
    SpanCorruption,
    TokenClassification,
    causal,
)
from pellucid.data.packing import pack
from pellucid.data.schemas import (
    ClassificationSchema,
    PromptCompletionSchema,
    QuestionAnsweringSchema,
    RegressionSchema,
    Seq2SeqSchema,
    SimilarityPairSchema,
    TokenClassificationSchema,
    open_examples,
)
from pellucid.data.tokenizer import Tokenizer
from pellucid.data.vocabulary import MASK, sentinels

__all__ = [
    "IGNORED",
    "MASK",
    "PLAIN",
    "Batch",
    "ChatTemplate",
    "Classification",
    "ClassificationSchema",
    "Contrastive",
    "Corpus",
    "Document",
    "Examples",
    "Loader",
    "MaskedLM",
    "MultiStepTarget",
    "PrefixLM",
    "PromptCompletionSchema",
    "QuestionAnsweringSchema",
    "Regression",
    "RegressionSchema",
    "Seq2SeqSchema",
    "SequenceToSequence",
    "SimilarityPairSchema",
    "Span",
    "SpanCorruption",
    "TokenClassification",
    "TokenClassificationSchema",
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
