"""Corpora: which documents, in which order, on which side; and one clear line for what is wrong."""

import json
import os
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pellucid.data import Document, open_corpus, records, split_of
from pellucid.errors import ArgumentError, DataError, UnsupportedError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"b.txt": "bee\r\n", "a.txt": "ä", "sub/c.txt": "sea", "sub/d.md": "dee"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path


def names(corpus, split="all") -> list[str]:
    return [document.name for document in corpus.documents(split)]


def fails(source, match: str, kind=DataError, split="all", **settings) -> None:
    with pytest.raises(kind, match=match) as caught:
        list(open_corpus(source, **settings).documents(split))
    assert "\n" not in str(caught.value)


# ---- what a source means


def test_one_file_keeps_its_bytes(folder: Path) -> None:
    (document,) = open_corpus(folder / "b.txt").documents("all")
    assert (document.name, document.text, document.size) == ("b.txt", "bee\r\n", 5)
    assert Document("x", "ä").size == 2


def test_globs_are_sorted_and_named_relative_to_their_fixed_part(folder: Path) -> None:
    corpus = open_corpus(f"{folder}/**/*.txt")
    assert names(corpus) == ["a.txt", "b.txt", "sub/c.txt"]
    assert names(corpus) == names(corpus)
    assert (len(corpus), corpus.size) == (3, 10)
    assert names(open_corpus(f"{folder}/*/c.txt")) == ["sub/c.txt"]


def test_lists_share_a_base_and_read_no_file_twice(folder: Path) -> None:
    corpus = open_corpus([f"{folder}/sub/*", folder / "sub" / "c.txt", folder / "a.txt", Document("mine", "x")])
    assert names(corpus) == ["a.txt", "sub/c.txt", "sub/d.md", "mine"]
    assert names(open_corpus([folder / "a.txt", f"{folder}/sub/../*.txt"])) == ["a.txt", "b.txt"]


def test_a_name_with_brackets_is_a_file_if_there_is_one(folder: Path) -> None:
    (folder / "x[1].txt").write_text("one")
    assert names(open_corpus(folder / "x[1].txt")) == ["x[1].txt"]


def test_links_that_go_round_list_a_file_once(folder: Path) -> None:
    (folder / "sub" / "loop").symlink_to(folder)
    assert names(open_corpus(f"{folder}/**/*.txt")) == ["a.txt", "b.txt", "sub/c.txt"]


@pytest.mark.skipif(sys.platform != "linux", reason="file names as bytes")
def test_file_names_that_do_not_print_are_escaped(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/bad\xff\n.txt", "w") as file:
        file.write("text")
    assert names(open_corpus(f"{tmp_path}/*.txt")) == ["bad\\udcff\\n.txt"]


def test_python_source() -> None:
    corpus = open_corpus("python-source")
    listed = {file.name for file in corpus.files}
    assert {"json/decoder.py", "os.py", "asyncio/__init__.py"} <= listed
    assert not any("site-packages" in name or "__pycache__" in name for name in listed)
    root = Path(sysconfig.get_path("stdlib"))
    text = {d.name: d.text for d in corpus.documents("all") if d.name in ("os.py", "json/decoder.py")}
    assert text["os.py"].encode() == (root / "os.py").read_bytes()
    assert len(corpus) + len(corpus.skipped) == len(listed)
    heldout = names(corpus, "heldout")
    assert 0.01 < len(heldout) / len(corpus) < 0.06
    assert sorted([*heldout, *names(corpus, "train")]) == names(corpus)


def test_python_source_leaves_out_links_packages_and_bad_files(tmp_path, monkeypatch) -> None:
    for name in ("good.py", "site-packages/no.py", "p/dist-packages/no.py", "p/__pycache__/no.py", "p/in.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "bad.py").write_bytes(b"# \xe9\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "good.py")
    (tmp_path / "linked").symlink_to(tmp_path / "p")
    monkeypatch.setattr(records.sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = open_corpus("python-source")
    assert names(corpus) == ["good.py", "p/in.py"]
    assert corpus.skipped == ("bad.py",)
    monkeypatch.setattr(records.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    fails("python-source", "no .py file lies below")


# ---- the split


def test_the_split_is_the_same_for_ever() -> None:
    heldout = ("concurrent/futures/process.py", "51", "55", "178")
    train = ("copyreg.py", "json/decoder.py", "os.py", "a.txt", "æ/好.jsonl:17", "0")
    assert {split_of(name) for name in heldout} == {"heldout"}
    assert {split_of(name) for name in train} == {"train"}
    assert sum(split_of(str(n)) == "heldout" for n in range(200)) == 3


@pytest.mark.parametrize(("share", "train", "heldout"), [(0.0, 100, 0), (1.0, 0, 100), (0.5, None, None)])
def test_split_shares(share: float, train: int | None, heldout: int | None) -> None:
    corpus = open_corpus([Document(str(n), "x") for n in range(100)], heldout_fraction=share)
    sides = [split_of(str(n), share) for n in range(100)]
    assert 35 < sides.count("train") < 65 if train is None else sides.count("train") == train
    for side in ("train", "heldout"):
        if side in sides:
            assert names(corpus, side) == [str(n) for n in range(100) if sides[n] == side]
        else:
            with pytest.raises(DataError, match=f"no document of .* falls into the {side} split .* heldout_fraction"):
                names(corpus, side)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_impossible_shares_are_refused(share: float) -> None:
    with pytest.raises(ArgumentError, match="heldout_fraction is"):
        open_corpus("python-source", heldout_fraction=share)


def test_unknown_split(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="split is 'test'; choose train, heldout or all"):
        open_corpus(folder / "a.txt").documents("test")


# ---- digest


def test_the_digest_sees_names_contents_and_borders() -> None:
    def digest(*documents: tuple[str, str]) -> str:
        return open_corpus([Document(*document) for document in documents]).digest()

    one = digest(("a", "xy"), ("b", "z"))
    assert one == digest(("a", "xy"), ("b", "z"))
    others = [
        digest(("a", "x"), ("b", "yz")),
        digest(("a", "xy"), ("c", "z")),
        digest(("b", "z"), ("a", "xy")),
    ]
    assert len({one, *others}) == 4


# ---- what can be wrong


def test_what_is_not_there(tmp_path: Path) -> None:
    fails(tmp_path / "none.txt", "cannot read .*none.txt: No such file")
    fails(f"{tmp_path}/*.txt", "no file matches .*; check")
    fails("python-sauce", "did you mean 'python-source'")
    fails("nothing-like-it", "the built-in corpus is called python-source")
    fails([], "list of sources is empty")
    fails("a\0b", "cannot be a path|cannot read")


def test_directories_and_pipes(tmp_path: Path) -> None:
    fails(tmp_path, r"is a directory; name .* pattern such as '.*\*\*/\*\.txt'")
    os.mkfifo(tmp_path / "pipe")
    fails(tmp_path / "pipe", "is not a regular file")


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin1"))
    fails(tmp_path / "latin.txt", "latin.txt is not UTF-8: byte 0xef at offset 2; .*iconv")


def test_a_file_that_vanishes_between_listing_and_reading(folder: Path) -> None:
    (folder / "e.jsonl").write_text('{"text": "x"}\n')
    for name in ("b.txt", "e.jsonl"):
        corpus = open_corpus(f"{folder}/*.*")
        (folder / name).unlink()
        with pytest.raises(DataError, match=rf"{name} was listed but has vanished"):
            names(corpus)
        (folder / name).write_text('{"text": "x"}')


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch) -> None:
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    fails(folder / "a.txt", "cannot read .*a.txt: Permission denied; make it readable")


def test_empty_corpora(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.jsonl").write_text("\n \n")
    fails(tmp_path / "empty.txt", r"documents? of .*empty.txt.* all empty")
    fails(tmp_path / "empty.jsonl", "holds no document at all")


# ---- JSON lines


def jsonl(path: Path, *lines: object) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_json_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", "\ufeff", {"text": "one\r\n"}, "\n", {"id": 7, "text": ""}, '{"text": "last"}')
    documents = list(open_corpus(path).documents("all"))
    assert documents == [
        Document("x.jsonl:1", "one\r\n"),
        Document("x.jsonl:3", ""),
        Document("x.jsonl:4", "last"),
    ]
    path = jsonl(tmp_path / "y.jsonl", *({"body": str(n)} for n in range(100)))
    corpus = open_corpus(path, text_field="body", heldout_fraction=0.25)
    assert names(corpus, "heldout") == [name for name in names(corpus) if split_of(name, 0.25) == "heldout"]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"text": ', "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('"just a string"', "line 2 holds a str, not an object"),
        ("7", "line 2 holds a int, not an object"),
        ('{"body": "x", "id": 1}', "line 2 has no field 'text'; .*: body, id"),
        ('{"text": null}', "line 2: field 'text' is null, not text; leave such records out"),
        ('{"text": "ab\\ud800"}', r"line 2: character 2 is the lone surrogate U\+D800"),
    ],
)
def test_a_bad_line_is_named_by_number(tmp_path: Path, line: str, match: str) -> None:
    fails(jsonl(tmp_path / "x.jsonl", {"text": "fine"}, line), rf"x\.jsonl, {match}")


def test_undecodable_and_endless_lines(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    fails(path, "x.jsonl is not UTF-8: byte 0xff at offset 24")
    monkeypatch.setattr(records, "_LARGEST_LINE", 10)
    fails(path, "line 1 is longer than")


# ---- Parquet


def parquet(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet(tmp_path: Path, kind) -> None:
    path = parquet(tmp_path / "x.parquet", text=pa.array(["one", "zwei ä", ""], pa.string()).cast(kind), n=[1, 2, 3])
    documents = list(open_corpus(path).documents("all"))
    assert documents == [Document(f"x.parquet:{n}", t) for n, t in enumerate(["one", "zwei ä", ""], 1)]


def test_parquet_splits_by_row_over_chunks(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", text=[str(n) for n in range(600)])
    corpus = open_corpus(path, heldout_fraction=0.5)
    heldout = {d.name: d.text for d in corpus.documents("heldout")}
    assert heldout == {f"x.parquet:{n + 1}": str(n) for n in range(600) if f"x.parquet:{n + 1}" in heldout}
    assert len(heldout) + len(names(corpus, "train")) == 600


def test_bad_parquet(tmp_path: Path) -> None:
    fails(parquet(tmp_path / "a.parquet", body=["x"], n=[1]), "a.parquet has no field 'text'; .*: body, n")
    fails(parquet(tmp_path / "b.parquet", text=[1]), "field 'text' holds int64, not text")
    fails(parquet(tmp_path / "c.parquet", text=["x", None]), "row 2: field 'text' is null")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nonsense PAR1")
    fails(tmp_path / "d.parquet", "d.parquet is not a whole Parquet file")
    bad = pa.array([b"ok", b"\xff"], pa.binary()).view(pa.string())
    fails(parquet(tmp_path / "e.parquet", text=bad), "row 2: byte 0 is not UTF-8")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    path = parquet(tmp_path / "x.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    fails(path, r"needs pyarrow; pip install 'pellucid\[data\]'", UnsupportedError)
