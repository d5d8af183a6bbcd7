"""``TokenStore``: a tokenised corpus, compactly. Ten million tokens are forty megabytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pellucid.data.corpus import Corpus, Document
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import DataError

Progress = Callable[[int, int], None]
"""Called with the documents and the bytes done so far."""

_CHUNK = 4 << 20


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Documents as ids: document d is ``tokens[bounds[d] : bounds[d + 1]]``; ``size``: bytes of text."""

    tokens: np.ndarray
    bounds: np.ndarray
    size: int
    _names: tuple[bytes, np.ndarray]

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]], names: Sequence[str] | None = None, *, size: int = 0) -> TokenStore:
        """Keep these documents; ``names`` default to their numbers."""
        arrays = [_ids(number, document) for number, document in enumerate(documents)]
        labels = [str(number) for number in range(len(arrays))] if names is None else names
        if len(labels) != len(arrays):
            raise DataError(f"{len(labels)} names were given for {len(arrays)} documents; give one name each")
        return cls._join(arrays, [label.encode("utf-8") for label in labels], size)

    @classmethod
    def from_corpus(
        cls,
        corpus: Corpus,
        tokenizer: Tokenizer,
        split: str = "train",
        *,
        ends: bool = True,
        progress: Progress | None = None,
    ) -> TokenStore:
        """Tokenise one side of a corpus, some megabytes at a time.

        Each document stands between begin and end; ``ends=False`` leaves both out (for span corruption).
        """
        arrays: list[np.ndarray] = []
        names: list[bytes] = []
        size = 0
        for chunk in _chunks(corpus.documents(split)):
            for ids in tokenizer.encode_many([document.text for document in chunk]):
                arrays.append(np.array(tokenizer.as_document(ids) if ends else ids, dtype=np.int32))
            names += [document.name.encode("utf-8") for document in chunk]
            size += sum(document.size for document in chunk)
            if progress is not None:
                progress(len(arrays), size)
        return cls._join(arrays, names, size)

    @classmethod
    def _join(cls, arrays: list[np.ndarray], names: list[bytes], size: int) -> TokenStore:
        tokens = np.concatenate([np.zeros(0, np.int32), *arrays])
        return cls(tokens, _bounds(map(len, arrays)), size, (b"".join(names), _bounds(map(len, names))))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(self.bounds)

    def document(self, number: int) -> np.ndarray:
        """The ids of one document."""
        return self.tokens[self.bounds[number] : self.bounds[number + 1]]

    def name(self, number: int) -> str:
        """The name of one document."""
        text, bounds = self._names
        return text[bounds[number] : bounds[number + 1]].decode("utf-8")

    def digest(self) -> str:
        """SHA-256 over all ids and where documents begin."""
        whole = hashlib.sha256(b"pellucid tokens 1\n")
        whole.update(self.bounds.astype("<i8").tobytes())
        whole.update(self.tokens.astype("<i4").data)
        return whole.hexdigest()


def _ids(number: int, document: Sequence[int]) -> np.ndarray:
    ids = np.asarray(document, dtype=np.int64)
    if ids.size and not (ids.min() >= 0 and ids.max() < 2**31):
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise DataError(f"document {number} holds the token id {wrong}; ids are 0 … {2**31 - 1}")
    return ids.astype(np.int32)


def _bounds(lengths: Iterable[int]) -> np.ndarray:
    return np.cumsum(np.fromiter(chain([0], lengths), dtype=np.int64))


def _chunks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in lists of a few megabytes: enough for all cores, little to hold."""
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += document.size
        if size >= _CHUNK or len(chunk) >= 4096:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
