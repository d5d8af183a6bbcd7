"""The names of special tokens: ours, and those by which other tokenizers know them."""

from __future__ import annotations

import re
from collections.abc import Mapping

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
"""The special tokens of a tokenizer trained here: a document's start, its end, and padding."""
MASK, UNKNOWN = "<|mask|>", "<|unknown|>"
"""What hides a token, and what stands for a word that WordPiece cannot write."""

USUAL_NAMES = (
    (BEGIN, "<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>", "[CLS]"),
    (END, "</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "[SEP]"),
    (PAD, "<pad>", "[PAD]"),
    (MASK, "<mask>", "[MASK]"),
    (UNKNOWN, "<unk>", "[UNK]"),
)
"""What begin, end, padding, mask and unknown are called, in the order of preference."""

_SENTINEL = re.compile(r"<\|span_([0-9]{1,6})\|>|<extra_id_([0-9]{1,6})>")


def sentinels(count: int) -> tuple[str, ...]:
    """Names of ``count`` special tokens for span corruption.

    >>> sentinels(2)
    ('<|span_0|>', '<|span_1|>')
    """
    return tuple(f"<|span_{number}|>" for number in range(count))


def in_order(special_ids: Mapping[str, int]) -> tuple[int, ...]:
    """The ids of those that are sentinels, by their numbers."""
    found = ((_SENTINEL.fullmatch(name), id_) for name, id_ in special_ids.items())
    return tuple(id_ for _, id_ in sorted((int(match[1] or match[2]), id_) for match, id_ in found if match))
