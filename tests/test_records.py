"""Records are plain values."""

import json
import math
import subprocess
import sys

import pytest

from pellucid.errors import ArgumentError, ShapeError
from pellucid.records import Figure, Finding, Location, Table, number, worst


def test_where_reads_well():
    assert str(Location(2, 5, 7)) == "row 2, query 5, key 7"
    assert str(Location(2, 5, 7, 1)) == "row 2, query 5, key 7 of row 1"
    assert str(Location(0)) == "row 0"


def test_the_worst_finding_is_the_verdict():
    statuses = ["not_applicable", "pass", "fragile", "error", "leak"]
    findings = tuple(Finding("check", status, "said") for status in statuses)
    for count, status in enumerate(statuses, 1):
        assert worst(findings[:count]) == worst(findings[:count][::-1]) == status
    assert worst(()) == "not_applicable"
    assert [finding.failed for finding in findings] == [False, False, False, True, True]


def test_everything_goes_into_json():
    finding = Finding("future", "leak", "it moved", "tokens", Location(0, 1, 2), math.inf, "by float64")
    table = Table("t", ("a", "b"), ((1, math.nan), ("x", None)))
    figure = Figure("f", "<svg/>", "below")
    told = json.loads(json.dumps([finding.to_dict(), table.to_dict(), figure.to_dict()], allow_nan=False))
    assert told[0]["size"] == "inf"
    assert told[0]["where"] == {"row": 0, "query": 1, "key": 2, "key_row": None}
    assert told[1]["rows"] == [[1, "nan"], ["x", None]]
    assert told[2] == {"title": "f", "svg": "<svg/>", "caption": "below"}
    assert number(0.25) == 0.25


def test_bad_records_are_refused():
    with pytest.raises(ArgumentError, match="status is 'fine'; choose one of pass, leak"):
        Finding("future", "fine", "")
    with pytest.raises(ShapeError, match="row 1 of table 't' has 1 cells, but the table has 2 columns"):
        Table("t", ("a", "b"), ((1, 2), (3,)))


def test_records_need_no_torch():
    code = "import sys, pellucid.records; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
