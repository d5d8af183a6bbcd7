"""``pellucid chat`` with a model whose positions are few."""

import io
import sys
from pathlib import Path

import pytest

from pellucid import generation
from pellucid.checkpoints import Checkpoint, load, save
from pellucid.cli.main import main
from pellucid.models.build import build

Captured = pytest.CaptureFixture[str]
CUT = "(replies are cut at the model's 48 positions)\n"


def chat(monkeypatch: pytest.MonkeyPatch, said: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    return main(["chat", *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(prompt, its tokens, new tokens asked for) of each reply."""
    found: list[tuple[str, int, int]] = []
    original = generation.stream

    def listening(speaker: Checkpoint, ids: list[list[int]], params: generation.GenerationConfig) -> object:
        assert speaker.tokenizer is not None
        found.append((speaker.tokenizer.decode(ids[0], skip_special=False), len(ids[0]), params.max_new_tokens))
        return original(speaker, ids, params)

    monkeypatch.setattr(generation, "stream", listening)
    return found


def test_replies_end_where_the_positions_do(
    checkpoint: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, int, int]]
) -> None:
    """The default of 200 new tokens does not fit 48 positions: each turn is answered, and it is said once."""
    assert chat(monkeypatch, "x\ny\nz\n", str(checkpoint), "--temperature", "0") == 0
    captured = capsys.readouterr()
    assert captured.err.count(CUT) == 1
    assert "error" not in captured.err
    assert "(the oldest turns were dropped)" in captured.err
    assert captured.out.count("\n") >= 3
    assert len(asked) == 3
    for number, (prompt, length, new) in enumerate(asked):
        assert new == 48 - length >= 12
        assert prompt.endswith(f"User: {'xyz'[number]}\nAssistant:")
    assert all(prompt.startswith("<|begin|>User: ") for prompt, _, _ in asked)


def test_what_fits_is_not_cut(
    checkpoint: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, int, int]]
) -> None:
    assert chat(monkeypatch, "x\n", str(checkpoint), "--temperature", "0", "--max-new-tokens", "5") == 0
    assert [new for _, _, new in asked] == [5]
    assert capsys.readouterr().err == ""


def test_a_long_line_gets_the_room_that_is_left(
    checkpoint: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, int, int]]
) -> None:
    """A single turn is never forgotten; with room for a few tokens it gets these."""
    assert chat(monkeypatch, "#" * 22 + "\n", str(checkpoint), "--temperature", "0") == 0
    ((_, length, new),) = asked
    assert new == 48 - length < 12
    assert capsys.readouterr().err == CUT


def test_a_chat_in_which_nothing_could_be_answered_ends_with_2(
    checkpoint: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "word " * 60 + "\n"
    assert chat(monkeypatch, long + long, str(checkpoint)) == 2
    assert capsys.readouterr().err.count("error: prompt 0 has ") == 2
    assert chat(monkeypatch, long + "x\n", str(checkpoint), "--max-new-tokens", "2") == 0
    assert chat(monkeypatch, "", str(checkpoint)) == 0


@pytest.mark.usefixtures("capsys")
def test_a_model_without_a_table_is_asked_for_all(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, int, int]]
) -> None:
    loaded = load(checkpoint)
    config = loaded.model.config.model_copy(update={"position": {"kind": "rope"}})
    save(tmp_path / "a", build(config, seed=1), tokenizer=loaded.tokenizer)
    assert chat(monkeypatch, "x\n", str(tmp_path / "a"), "--max-new-tokens", "60") == 0
    assert [new for _, _, new in asked] == [60]
