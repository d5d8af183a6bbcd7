"""The table of known faults says what is so: its checks and broken models exist, and belong together."""

import re
from pathlib import Path

import pytest

from broken_models import BROKEN_MODELS
from pellucid.audits import CHECKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
BY_NAME = {broken.name: broken for broken in BROKEN_MODELS}


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {title}")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


SEEN = rows("Seen from outside")
UNSEEN = rows("Not visible")
LESSONS = rows("The lessons")


def ids(cells: list[list[str]]) -> list[str]:
    return [name for row in cells for name in re.findall(r"\b[BL]\d{2,3}\b", row[0])]


@pytest.mark.parametrize("row", SEEN, ids=lambda row: row[0])
def test_a_fault_that_can_be_seen_has_a_check_and_broken_models_that_it_must_catch(row):
    checks, names = (re.findall(r"`(\w+)`", cell) for cell in row[2:4])
    assert checks
    assert names
    assert set(checks) <= CHECKS.keys()
    assert {BY_NAME[name].check for name in names} <= set(checks)


def test_every_fault_stands_in_one_place():
    found = ids(SEEN) + ids(UNSEEN)
    assert len(found) == len(set(found)) > 90
    assert not set(ids(SEEN)) & set(ids(UNSEEN))


def test_the_lessons_about_masks_are_all_there():
    assert ids(LESSONS) == ["L05", "L20", "L33", *(f"L{number}" for number in range(39, 48))]
    named = {name for row in LESSONS for name in re.findall(r"`(\w+)`", row[1])}
    assert named <= CHECKS.keys() | BY_NAME.keys()
