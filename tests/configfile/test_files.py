"""Reading files: YAML's traps closed, everything hostile refused in one line with its place."""

import json
import time
from pathlib import Path

import pytest

from pellucid.configfile import MAX_BYTES, read_mapping
from pellucid.errors import ConfigError


def write(folder: Path, content: str | bytes, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(folder: Path, content: str | bytes, name: str = "c.yaml") -> str:
    with pytest.raises(ConfigError) as caught:
        read_mapping(write(folder, content, name))
    message = str(caught.value)
    assert "\n" not in message
    assert name in message
    return message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e5", 1e5),
        ("1E+5", 1e5),
        ("-2.5e-3", -2.5e-3),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000_000", 1_000_000),
        ("0x1F", 31),
        ("+7", 7),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("off", "off"),
        ("010", "010"),
        ("12:30:45", "12:30:45"),
        ("2026-01-01", "2026-01-01"),
        ("1e", "1e"),
        ("causal & window(4)", "causal & window(4)"),
        ("'3e-4'", "3e-4"),
        ("[a, 3e-4]", ["a", 3e-4]),
    ],
)
def test_yaml_scalars_are_what_they_look_like(tmp_path: Path, text: str, value: object) -> None:
    got = read_mapping(write(tmp_path, f"key: {text}\n"))["key"]
    assert got == value
    assert type(got) is type(value)


def test_json_by_suffix_and_a_byte_order_mark(tmp_path: Path) -> None:
    assert read_mapping(write(tmp_path, '{"rate": 3e-4, "n": [1]}', "c.json")) == {"rate": 3e-4, "n": [1]}
    assert read_mapping(write(tmp_path, b"\xef\xbb\xbfa: 1\n", "c.yml")) == {"a": 1}
    assert "has no suffix" in refused(tmp_path, "a: 1", "config")
    assert "'.toml'" in refused(tmp_path, "a: 1", "c.toml")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' was already given on line 1"),
        ("a: 1\nb: &x 2\n", "line 2: anchors and aliases"),
        ("a: *x\n", "line 1: anchors and aliases"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1: tags such as"),
        ("a: !!int '3'\n", "line 1: tags such as"),
        ("1: 2\n", "line 1: the key 1 is not text"),
        ("? [a]\n: 2\n", "line 1: the key ['a'] is not text"),
        ("a: b: c\n", "line 1: mapping values are not allowed here"),
        ("ok: 1\na: 'never closed\n", "unexpected end of stream"),
        ("a: 1\n---\nb: 2\n", "line 2: expected a single document"),
        ("a: 1\nb: \x07\n", "line 2: the character"),
        ("a: " + "[" * 100_000, "deeper than 32"),
        ("- " * 5000 + "a", "deeper than 32"),
        ("a: " + "9" * 5000, "5000 digits"),
        ("", "holds nothing"),
        ("- a\n- b\n", "holds a list"),
        ("just words\n", "holds a text"),
        (b"a: 1\nb: \xff\n", "line 2: byte 0xff is not UTF-8"),
        ("a: 1\n" + " " * MAX_BYTES, "larger than"),
    ],
)
def test_refused_yaml(tmp_path: Path, content: str | bytes, said: str) -> None:
    assert said in refused(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": 1, "b": {"x": 1, "x": 2}}', "the key 'x' is given twice"),
        ('{"a": 1,\n}', "line 2"),
        ("[1]", "holds a list"),
        ("3", "holds a number"),
        ("[" * 200_000, "deeper than 32"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "deeper than 32"),
        ('{"a": ' + "9" * 5000 + "}", "c.json"),
    ],
)
def test_refused_json(tmp_path: Path, content: str, said: str) -> None:
    assert said in refused(tmp_path, content, "c.json")


def test_thirty_two_levels_are_read(tmp_path: Path) -> None:
    deep = {"a": json.loads("[" * 31 + "]" * 31)}
    assert read_mapping(write(tmp_path, json.dumps(deep), "c.json")) == deep
    assert read_mapping(write(tmp_path, json.dumps(deep))) == deep


def test_a_file_of_many_values_is_refused_before_it_takes_minutes(tmp_path: Path) -> None:
    start = time.monotonic()
    assert "more than 20000 values" in refused(tmp_path, "a: [" + "1," * 400_000 + "]")
    assert time.monotonic() - start < 10


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_mapping(tmp_path / "none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_mapping(tmp_path / "folder.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_mapping("a\0b.yaml")
