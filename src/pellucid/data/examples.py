"""``TokenStore``: a tokenized corpus, compactly. ``Examples``: its documents with the labels of each, or of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from pellucid.batch import IGNORED
from pellucid.data.corpus import Corpus, Document
from pellucid.data.packing import concat_ranges
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import DataError

Progress = Callable[[int, int], None]
"""Called with the documents and the bytes done so far."""

_CHUNK = 4 << 20
COLUMNS = ("labels", "groups", "types")


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


@dataclass(frozen=True, eq=False)
class Examples:
    """Documents with labels; a :class:`~pellucid.data.Loader` keeps each label with its document.

    ``columns`` (any of labels, groups, types) have one entry a token of ``store``. ``targets`` has one a document,
    as in :class:`~pellucid.data.Batch`. ``source`` has the encoder's input, document for document. ``together``
    neighbours always share a row. Only documents that are not ``whole`` may be cut into pieces. ``label_names``
    are those of the classes, in order.
    """

    store: TokenStore
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    targets: np.ndarray | None = None
    source: TokenStore | None = None
    together: int = 1
    whole: bool = True
    label_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        documents, tokens = len(self.store), len(self.store.tokens)
        for name, column in self.columns.items():
            if name not in COLUMNS:
                raise DataError(f"there is no column {name!r}; choose from {', '.join(COLUMNS)}")
            if column.shape != (tokens,):
                raise DataError(f"{name} has shape {list(column.shape)}, but there are {tokens} tokens; give one each")
        for name, given in (("targets", self.targets), ("source", self.source)):
            if given is not None and len(given) != documents:
                raise DataError(f"{name} has {len(given)} entries, but there are {documents} documents; give one each")
        if documents % self.together:
            raise DataError(f"{documents} documents do not make groups of {self.together}; leave none out")
        if not self.whole and (self.targets is not None or self.source is not None or self.together > 1):
            raise DataError("documents with targets, a source or partners cannot be cut into pieces; set whole")
        if self.whole and not self.store.lengths.all():
            number = int((self.store.lengths == 0).argmax())
            raise DataError(f"document {self.store.name(number)!r} holds no token; leave it out with its label")

    def __len__(self) -> int:
        return len(self.store)

    def digest(self) -> str:
        """SHA-256 over ids, columns, targets and sources."""
        parts = [self.store.digest(), f"{self.together} {self.whole}"]
        arrays = {**self.columns, **({} if self.targets is None else {"targets": self.targets})}
        for name, array in sorted(arrays.items()):
            kind = "<f8" if array.dtype.kind == "f" else "<i8"
            data = hashlib.sha256(array.astype(kind).tobytes()).hexdigest()
            parts.append(f"{name} {kind} {list(array.shape)} {data}")
        parts.append("" if self.source is None else self.source.digest())
        return hashlib.sha256("\n".join(["pellucid examples 1", *parts]).encode()).hexdigest()

    def cut(self, length: int, source_length: int | None = None) -> Examples:
        """Each document down to its first ``length`` tokens, and each source to ``source_length``.

        A span (``targets`` ``[C, 2]``) that is no longer complete becomes :data:`IGNORED`, twice.
        Groups share a row, so each of their documents gets its part of ``length``.
        """
        store, index = _truncated(self.store, length // self.together)
        source = self.source
        if source is not None and source_length is not None:
            source, _ = _truncated(source, source_length)
        targets = self.targets
        if targets is not None and targets.dtype.kind == "i" and targets.ndim == 2:
            lost = targets[:, 1] >= store.lengths
            targets = np.where(lost[:, None], IGNORED, targets)
        columns = {name: column[index] for name, column in self.columns.items()}
        return replace(self, store=store, columns=columns, targets=targets, source=source)


def _truncated(store: TokenStore, length: int) -> tuple[TokenStore, np.ndarray]:
    """The store with documents of at most ``length`` tokens, and which of its tokens are left."""
    if length < 1:
        raise DataError(f"documents cannot be cut to {length} tokens; keep 1 or more")
    sizes = np.minimum(store.lengths, length)
    index, _ = concat_ranges(store.bounds[:-1], sizes)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return replace(store, tokens=store.tokens[index], bounds=bounds), index
