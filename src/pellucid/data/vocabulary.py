"""Special tokens, and vocabularies trained with ``tokenizers``: byte-level BPE, byte-level Unigram, and WordPiece.

Byte-level ones write every text and lose nothing. WordPiece follows BERT: control characters go, white space
separates words, CJK characters and punctuation stand alone, and what its alphabet lacks is unknown. Its pieces are
trained as BPE of words whose later characters count as separate characters, so equal texts give equal pieces.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pellucid.errors import DataError
from pellucid.messages import printable

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

Kind = Literal["bpe", "wordpiece", "unigram"]

CONTINUES = "##"
"""How WordPiece marks a piece that does not begin a word."""

_ALPHABET = 1000
_LATER = 0xF0000  # private characters, which the normaliser takes out of texts
_AT_A_TIME = 4096


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


def train_tokenizer(
    kind: Kind, texts: Iterable[str], vocab_size: int, specials: Sequence[str], unknown: str
) -> Backend:
    """A trained backend; ``specials`` get the first ids. WordPiece writes ``unknown`` for what it cannot."""
    if kind not in get_args(Kind):
        raise DataError(f"kind is {kind!r}; choose {', '.join(get_args(Kind))}")
    specials = [*specials, unknown] if kind == "wordpiece" else list(specials)
    for name in specials:
        if len(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(name)) < 2:
            raise DataError(
                f"the special token {name!r} is spelled like ordinary text, which could forge it; "
                f"give it brackets, as in '<|{printable(name)}|>'"
            )
    repeated = next((name for name, times in Counter(specials).items() if times > 1), None)
    if repeated is not None:
        raise DataError(f"the special token {repeated!r} is named twice or is already there; name each once")
    if kind == "wordpiece":
        _refuse_small(vocab_size, 2, "a letter at a word's beginning and inside it", len(specials))
        return _wordpiece(texts, vocab_size, specials, unknown)
    _refuse_small(vocab_size, 256, "the 256 bytes", len(specials))
    return _byte_level(kind, texts, vocab_size, specials)


def _refuse_small(vocab_size: int, pieces: int, what: str, specials: int) -> None:
    if vocab_size < pieces + specials:
        raise DataError(
            f"vocab_size is {vocab_size}, but {what} and {specials} special tokens need {pieces + specials}; "
            f"set vocab_size to {pieces + specials} or more"
        )


def _byte_level(kind: Kind, texts: Iterable[str], vocab_size: int, specials: list[str]) -> Backend:
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
        "special_tokens": specials,
        "show_progress": False,
    }
    backend = Backend(models.BPE() if kind == "bpe" else models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if kind == "bpe":
        backend.train_from_iterator(texts, trainers.BpeTrainer(**settings))
        return backend
    backend.train_from_iterator(texts, trainers.UnigramTrainer(**settings))
    return _trimmed(backend, vocab_size, specials)


def _trimmed(backend: Backend, vocab_size: int, specials: list[str]) -> Backend:
    """A Unigram backend of at most ``vocab_size`` pieces: its trainer may keep more than its ``vocab_size``."""
    parts = json.loads(backend.to_str())
    vocab = parts["model"]["vocab"]
    longer = [number for number, (piece, _) in enumerate(vocab) if len(piece) > 1 and piece not in specials]
    worst = set(sorted(longer, key=lambda number: vocab[number][1])[: max(0, len(vocab) - vocab_size)])
    parts["model"]["vocab"] = [entry for number, entry in enumerate(vocab) if number not in worst]
    return Backend.from_str(json.dumps(parts))


# ---- WordPiece


def _wordpiece(texts: Iterable[str], vocab_size: int, specials: list[str], unknown: str) -> Backend:
    normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    splitter = pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    pieces = _pieces(words, vocab_size - len(specials))
    vocab = {piece: number for number, piece in enumerate([*specials, *pieces])}
    backend = Backend(models.WordPiece(vocab, unk_token=unknown, continuing_subword_prefix=CONTINUES))
    backend.normalizer, backend.pre_tokenizer = normalizer, splitter
    backend.decoder = decoders.WordPiece(prefix=CONTINUES, cleanup=False)
    backend.add_special_tokens(specials)
    return backend


def _pieces(words: Counter[str], size: int) -> list[str]:
    """Up to ``size`` pieces, characters first; a letter inside a word is another than at its beginning."""
    letters: Counter[str] = Counter()
    for word, times in words.items():
        for letter in {word[0], *(CONTINUES + letter for letter in word[1:])}:
            letters[letter] += times
    common = sorted(letters, key=lambda letter: (-letters[letter], letter))[: min(size, _ALPHABET)]
    later = {piece[-1]: chr(_LATER + number) for number, piece in enumerate(common) if len(piece) > 1}
    first = {piece for piece in common if len(piece) == 1}
    spelled = {
        word[0] + "".join(later[letter] for letter in word[1:]): times
        for word, times in words.items()
        if word[0] in first and all(letter in later for letter in word[1:])
    }
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    alphabet = [*first, *later.values()]
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_repeated(spelled), trainer)
    letter_of = {private: letter for letter, private in later.items()}
    by_id = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    return [_written(piece, letter_of) for piece, _ in by_id][:size]


def _written(piece: str, letter_of: dict[str, str]) -> str:
    mark = CONTINUES if piece[0] in letter_of else ""
    return mark + "".join(letter_of.get(letter, letter) for letter in piece)


def _repeated(words: dict[str, int]) -> Iterator[str]:
    """Each word as often as it was found."""
    for word, times in words.items():
        for begin in range(0, times, _AT_A_TIME):
            yield " ".join([word] * min(_AT_A_TIME, times - begin))


def canonicalize(backend: Backend) -> Backend:
    """``backend`` with scores that are read back exactly as they were written.

    The reader in ``tokenizers`` may round the last bit of a long number, so that a Unigram vocabulary, and its digest,
    would change each time it is saved and loaded; nine decimals are read exactly.
    """
    parts = json.loads(backend.to_str())
    vocab = [[piece, round(score, 9)] for piece, score in parts["model"]["vocab"]]
    if vocab == parts["model"]["vocab"]:
        return backend
    parts["model"]["vocab"] = vocab
    return Backend.from_str(json.dumps(parts))
