"""Documents and the corpora they come from: read again and again, in one order, split by name for good."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from pellucid.data.records import BUILT_IN, File, find, python_source, read
from pellucid.errors import ArgumentError, DataError
from pellucid.messages import printable

Source = str | os.PathLike[str] | Sequence["str | os.PathLike[str] | Document"]

SPLITS = ("train", "heldout", "all")

HELDOUT_FRACTION = 1 / 64
"""The default fraction of a corpus that is held out from training."""


@dataclass(frozen=True)
class Document:
    """A text and its name: a file's relative path with forward slashes, with ``:line`` for a record in it."""

    name: str
    text: str

    @cached_property
    def size(self) -> int:
        """Bytes of the text in UTF-8."""
        return len(self.text.encode("utf-8"))


class _Summary(NamedTuple):
    documents: int
    size: int
    skipped: tuple[str, ...]
    digest: str


def split_of(name: str, fraction: float = HELDOUT_FRACTION) -> Literal["train", "heldout"]:
    """On which side a document lies: decided by SHA-256 of its name alone, for good."""
    number = int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "big")
    return "heldout" if number < fraction * 2**64 else "train"


def check_split(split: object) -> None:
    """Refuse what is no side of a corpus."""
    if split not in SPLITS:
        raise ArgumentError(f"split is {split!r}; choose train, heldout or all")


def open_corpus(source: Source, *, text_field: str = "text", heldout_fraction: float = HELDOUT_FRACTION) -> Corpus:
    """The corpus that ``source`` means.

    ``source`` is ``"python-source"`` (the running Python's standard library), a file, a glob pattern
    (``**`` reaches into subfolders), or a sequence of these and of :class:`Document`. ``.jsonl`` and
    ``.parquet`` files hold one document a record, in ``text_field``; any other file is one document.
    Names are relative to the folder that all named sources share. A file meant twice is read once.
    What exists is checked here; what is in it, on reading.
    """
    if not 0 <= heldout_fraction <= 1:
        raise ArgumentError(f"heldout_fraction is {heldout_fraction!r}; give a fraction between 0 and 1")
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not sources:
        raise DataError("the list of sources is empty; name a file, a pattern or python-source")
    files: list[File] = []
    documents: list[Document] = []
    named: list[tuple[Path, list[Path]]] = []
    for item in sources:
        if isinstance(item, Document):
            documents.append(item)
        elif item == BUILT_IN:
            files += python_source()
        else:
            named.append(_find(item))
    if named:
        base = os.path.commonpath([folder for folder, _ in named])
        paths = {Path(os.path.abspath(path)) for _, found in named for path in found}
        files += [File(path, printable(Path(os.path.relpath(path, base)).as_posix())) for path in paths]
    distinct = {file.path: file for file in files}
    ordered = sorted(distinct.values(), key=lambda file: (file.name, file.path))
    what = ", ".join(printable(item.name if isinstance(item, Document) else item) for item in sources[:3])
    more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
    return Corpus(tuple(ordered), tuple(documents), text_field, heldout_fraction, what + more)


def _find(item: str | os.PathLike[str]) -> tuple[Path, list[Path]]:
    try:
        return find(item)
    except DataError as error:
        if difflib.get_close_matches(str(item), [BUILT_IN], cutoff=0.8):
            raise DataError(f"there is no corpus {printable(item)!r}; did you mean {BUILT_IN!r}?") from error
        raise


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, read from their files each time; see :func:`open_corpus`.

    ``len``, ``size``, ``skipped`` and ``digest`` read everything once and remember.
    """

    files: tuple[File, ...] = field(repr=False)
    given: tuple[Document, ...] = field(repr=False)
    text_field: str
    heldout_fraction: float
    source: str

    def documents(self, split: str = "train") -> Iterator[Document]:
        """The documents of ``split``, one in memory at a time; a split without any is an error."""
        check_split(split)
        return self._documents(split)

    def _documents(self, split: str) -> Iterator[Document]:
        documents = size = 0
        for name, text in self._records(split):
            if text is not None:
                document = Document(name, text)
                documents += 1
                size += document.size
                yield document
        if not documents:
            raise DataError(self._nothing_in(split))
        if not size:
            raise DataError(f"the {documents} documents of {self.source} are all empty; name files that hold text")

    def _records(self, split: str) -> Iterator[tuple[str, str | None]]:
        def wanted(name: str) -> bool:
            return split == "all" or split_of(name, self.heldout_fraction) == split

        for file in self.files:
            yield from read(file, self.text_field, wanted)
        yield from ((given.name, given.text) for given in self.given if wanted(given.name))

    def _nothing_in(self, split: str) -> str:
        if split == "all":
            return f"{self.source} holds no document at all; name files that hold text"
        return (
            f"no document of {self.source} falls into the {split} split (by name, heldout_fraction "
            f"{self.heldout_fraction:g}); change heldout_fraction, give more files, or give the held-out text "
            "as a corpus of its own"
        )

    @cached_property
    def _summary(self) -> _Summary:
        whole = hashlib.sha256(b"pellucid corpus 1\n")
        documents = size = 0
        skipped = []
        for name, text in self._records("all"):
            if text is None:
                skipped.append(name)
                continue
            data, label = text.encode("utf-8"), name.encode("utf-8")
            whole.update(b"%d %d\n" % (len(label), len(data)))
            whole.update(label)
            whole.update(hashlib.sha256(data).digest())
            documents += 1
            size += len(data)
        return _Summary(documents, size, tuple(skipped), whole.hexdigest())

    def __len__(self) -> int:
        """How many documents there are in all."""
        return self._summary.documents

    def __bool__(self) -> bool:
        """A corpus is always true, even when empty, without reading it."""
        return True

    @property
    def size(self) -> int:
        """Bytes of all documents in UTF-8."""
        return self._summary.size

    @property
    def skipped(self) -> tuple[str, ...]:
        """Files of the built-in corpus that were left out because they are not UTF-8."""
        return self._summary.skipped

    def digest(self) -> str:
        """SHA-256 over every name, size and content, in order."""
        return self._summary.digest
