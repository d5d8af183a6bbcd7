"""Data for small jobs, made of the Python source code on this machine: ``python examples/stdlib_jobs.py jobs``.

Writes three files of records for ``pellucid train``:

``docstrings.jsonl``  the text of a docstring and the package it comes from  (masked-lm.yaml, classifier.yaml)
``tokens.jsonl``      the tokens of a few lines and the kind of each         (tagger.yaml)
``names.jsonl``       the body of a function and its name                    (names.yaml)
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import keyword
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pellucid.data.corpus import Document, open_corpus

PACKAGES = 8
"""So many packages, those with the most docstrings, are told apart."""

LINES = 4
"""Lines of source code in one record of the tagger."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, help="source files to read; left out, all of them")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    files = list(open_corpus("python-source").documents("all"))
    files = files[:: max(len(files) // asked.files, 1)] if asked.files else files
    trees = [(file, tree) for file in files if (tree := _parsed(file.text)) is not None]
    write(asked.folder / "docstrings.jsonl", _of_the_largest([r for f, t in trees for r in docstrings(f, t)]))
    write(asked.folder / "tokens.jsonl", [record for file, _ in trees[::4] for record in token_kinds(file.text)])
    write(asked.folder / "names.jsonl", [record for file, tree in trees for record in names(file.text, tree)])


def docstrings(file: Document, tree: ast.Module) -> Iterator[Record]:
    """Every docstring of some length, and the top-level package or module that holds it."""
    package = Path(file.name).parts[0].removesuffix(".py")
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= 40:
                yield {"text": text[:600], "label": package}


def token_kinds(text: str) -> Iterator[Record]:
    """Some lines at a time: what stands there, and what Python calls it; names are keywords, callees or others."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return
    words: list[str] = []
    tags: list[str] = []
    lines = 0
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        if token.string.strip() and len(token.string) <= 40:
            words.append(" " + token.string)
            tags.append(_kind(token, after))
        lines += token.type in (tokenize.NEWLINE, tokenize.NL)
        if lines == LINES:
            if len(words) > 3:
                yield {"words": words, "tags": tags}
            words, tags, lines = [], [], 0


def names(text: str, tree: ast.Module) -> Iterator[Record]:
    """The body of each function that is not tiny, and its name in words."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and not node.name.startswith("__") and len(node.body) > 1:
            body = textwrap.dedent("\n".join(lines[node.body[0].lineno - 1 : node.end_lineno]))
            yield {"source": body[:400], "target": node.name.strip("_").replace("_", " ")}


def write(path: Path, records: list[Record]) -> None:
    """One JSON object a line, each record once."""
    lines = dict.fromkeys(json.dumps(record) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{path}: {len(lines)} records")


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _of_the_largest(records: list[Record]) -> list[Record]:
    largest = {name for name, _ in Counter(record["label"] for record in records).most_common(PACKAGES)}
    return [record for record in records if record["label"] in largest]


def _kind(token: tokenize.TokenInfo, after: tokenize.TokenInfo | None) -> str:
    if token.type != tokenize.NAME:
        return tokenize.tok_name[token.type].lower()
    if keyword.iskeyword(token.string):
        return "keyword"
    return "callee" if after is not None and after.string == "(" else "name"


if __name__ == "__main__":
    main()
