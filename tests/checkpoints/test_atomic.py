"""Folders and files appear whole or not at all."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pellucid.checkpoints.files import discard_folder, discard_unfinished, new_folder, write_text
from pellucid.errors import CheckpointError


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow past ``size`` bytes: what a full disk does, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_new_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder"
    with new_folder(target) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("words")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "inner" / "file").read_text() == "words"
    assert os.listdir(target.parent) == ["folder"]


@pytest.mark.parametrize("kind", ["file", "empty folder", "dangling link"])
def test_an_existing_target_is_refused_and_kept(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    match kind:
        case "file":
            target.write_text("mine")
        case "empty folder":
            target.mkdir()
        case "dangling link":
            target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="exists already; nothing is overwritten"), new_folder(target):
        pytest.fail("the block must not be entered")
    assert os.path.lexists(target)
    assert os.listdir(tmp_path) == ["target"]


def test_a_target_that_appears_meanwhile_is_refused_and_kept(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(CheckpointError, match="exists already"), new_folder(target):
        target.mkdir()
    assert os.listdir(tmp_path) == ["target"]
    assert not any(target.iterdir())


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "target") as folder:
        (folder / "file").write_bytes(bytes(9 // len(os.listdir(folder))))
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with (
        full_disk(1000),
        pytest.raises(CheckpointError, match=rf"cannot write {target}: File too large; free space"),
        new_folder(target) as folder,
    ):
        (folder / "file").write_bytes(bytes(2000))
    assert not any(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    long = "n" * 256
    for target, words in (
        (tmp_path / "file" / "target", f"{tmp_path}/file is not a folder; choose another place"),
        (tmp_path / "file" / "a" / "b", f"{tmp_path}/file is not a folder; choose another place"),
        (tmp_path / long, "a name in it has 256 bytes, at most 255 are possible; choose a shorter one"),
        (tmp_path / long / "a", "a name in it has 256 bytes, at most 255 are possible; choose a shorter one"),
        (tmp_path / "/".join(["a" * 200] * 30), "the whole path is too long; choose a shorter one"),
    ):
        with pytest.raises(CheckpointError, match=f"cannot write {target}: {words}"), new_folder(target):
            pytest.fail("the block must not be entered")
        assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")
def test_a_place_where_the_system_makes_nothing_is_named() -> None:
    words = "cannot write /proc/target: the system lets no one create anything in /proc; choose another place"
    with pytest.raises(CheckpointError, match=words), new_folder("/proc/target"):
        pytest.fail("the block must not be entered")


@pytest.mark.parametrize("name", ["n" * 250, "n" * 255, "é" * 127, "漢" * 85])
def test_a_name_may_be_as_long_as_names_can_be(tmp_path: Path, name: str) -> None:
    """What is unfinished has a name of its own, which must fit as well."""
    with new_folder(tmp_path / name) as folder:
        assert len(os.fsencode(folder.name)) <= 255
        assert ".unfinished-" in folder.name
    write_text(tmp_path / f"t{name[1:]}", "text")
    assert sorted(os.listdir(tmp_path)) == sorted([name, f"t{name[1:]}"])
    discard_folder(tmp_path / name)
    assert os.listdir(tmp_path) == [f"t{name[1:]}"]


def test_a_way_back_makes_nothing_on_the_way(tmp_path: Path) -> None:
    with new_folder(tmp_path / "zz" / ".." / "zy"):
        pass
    assert os.listdir(tmp_path) == ["zy"]
    (tmp_path / "inner").mkdir()
    (tmp_path / "link").symlink_to("inner")
    with new_folder(tmp_path / "link" / ".." / "zx"):
        pass
    assert sorted(os.listdir(tmp_path)) == ["inner", "link", "zx", "zy"]
    with pytest.raises(CheckpointError, match="does not end in a name"), new_folder(tmp_path / "zz" / ".."):
        pytest.fail("the block must not be entered")


def test_parents_that_were_made_for_nothing_are_gone(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "a" / "b" / "c") as folder:
        assert 1 // len(os.listdir(folder))
    assert os.listdir(tmp_path) == []


def test_text_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "last"
    write_text(path, "first\n")
    write_text(path, "second\n")
    assert path.read_text() == "second\n"
    with full_disk(1000), pytest.raises(CheckpointError, match="cannot write"):
        write_text(path, "x" * 2000)
    assert path.read_text() == "second\n"
    assert os.listdir(tmp_path) == ["last"]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    writer = new_folder(tmp_path / "target")
    (writer.__enter__() / "file").touch()  # and never goes on
    (tmp_path / "other").mkdir()
    assert len(os.listdir(tmp_path)) == 2
    assert len(discard_unfinished(tmp_path)) == 1
    assert os.listdir(tmp_path) == ["other"]


def test_a_discarded_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "file").touch()
    discard_folder(tmp_path / "step")
    assert not any(tmp_path.iterdir())
