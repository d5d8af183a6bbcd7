"""``pellucid audit``: targets, rules of one's own, reports for machines and people."""

import json
import sys
from xml.etree import ElementTree

import pytest

from pellucid.cli.main import main

MODEL = """
import torch
from torch import nn
from broken_models.layers import Stack, WindowsSwapped

class Leaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.out(x - x.mean(1, keepdim=True))

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids, src_key_padding_mask, flag=None):
        causal = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        causal = causal | src_key_padding_mask[:, None, :]
        causal = causal & ~torch.eye(ids.shape[1], dtype=torch.bool)
        return self.out(self.layer(self.table(ids), src_mask=causal.repeat_interleave(2, 0)))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "audited_by_name.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("audited_by_name", None)


def test_a_leak_is_exit_1_and_written_everywhere(folder, capsys):
    command = ["audit", "audited_by_name:Leaks", "--checks", "future", "--json", "--junit", "a.xml", "--html", "a.html"]
    assert main(command) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["passed"], told["verdicts"], told["length"]) == (False, {"future": "leak"}, 24)
    assert int(ElementTree.parse("a.xml").getroot().attrib["failures"]) >= 1
    page = (folder / "a.html").read_text()
    assert "row 0, query 0, key 1" in page
    assert "<svg" in page


def test_it_is_held_to_the_rule_that_is_asked_for(folder, capsys):
    target = ["audit", "audited_by_name:Stack", "--checks", "window,future"]
    assert main(target) == 0
    assert "(sequences of up to 24 tokens" in capsys.readouterr().out
    assert main([*target, "--expect", "causal & window(3); causal; causal & window(3)"]) == 0
    assert main([*target, "--expect", "causal & window(2); causal; causal & window(3)"]) == 1
    assert "blocks.0 lets token 0 through to query 2" in capsys.readouterr().out
    assert main(["audit", "audited_by_name:WindowsSwapped", "--checks", "window"]) == 1


def test_an_audit_whose_budget_was_spent_is_not_a_pass(folder, capsys):
    command = ["audit", "audited_by_name:Stack", "--checks", "future,trace,dropout", "--budget", "1e-6"]
    assert main(command) == 1  # nothing was shown at all
    told = capsys.readouterr().out
    assert "3 of 3 checks not run, the budget was spent: future, trace, dropout" in told
    assert told.count("not run  ") >= 3


def test_what_is_left_of_an_unfinished_audit_is_told(folder, capsys, monkeypatch):
    from pellucid.audits.engine.context import AuditContext

    asked = iter([False, True])
    monkeypatch.setattr(AuditContext, "spent", property(lambda self: next(asked)))
    command = ["audit", "audited_by_name:Stack", "--checks", "future,trace", "--budget", "60"]
    assert main(command) == 0
    assert "unfinished: nothing leaked so far (" in capsys.readouterr().out
    for more, code in ((["--json"], 0), (["--json", "--strict"], 1)):
        asked = iter([False, True])
        assert main([*command, *more]) == code
        told = json.loads(capsys.readouterr().out)
        assert (told["finished"], told["not_run"]) == (False, ["trace"])


def test_it_says_how_the_target_was_called(folder, capsys):
    assert main(["audit", "audited_by_name:Stack", "--checks", "determinism"]) == 0
    assert "called by TokensProbe (embeddings); for what is missing there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["audited_by_name:Stack", "--expect", "causal; causal"], "Stack has 3 layers; give 1 or 3"),
        (["audited_by_name:Leaks", "--expect", "causal; causal"], "has 1 layers; give 1"),
        (["audited_by_name:Stack", "--expect", "casual"], "casual"),
        (["audited_by_name:Stock"], "audited_by_name has no 'Stock'"),
        (["no_such_folder"], "names nothing that can be audited"),
        (["audited_by_name:Stack", "--budget", "0"], "budget is 0"),
        (["audited_by_name:Stack", "--length", "1"], "--length"),
        (["audited_by_name:Stack", "--junit", "no/such/folder/a.xml", "--checks", "trace"], "a.xml"),
    ],
)
def test_bad_usage_is_exit_2(folder, capsys, command, said):
    assert main(["audit", *command]) == 2
    assert said in capsys.readouterr().err


def test_a_probe_is_begun_from_a_signature(folder, capsys):
    assert main(["audit", "audited_by_name:Masked", "--write-probe", "my_probe.py"]) == 0
    assert "pellucid audit my_probe:make_probe" in capsys.readouterr().out
    text = (folder / "my_probe.py").read_text()
    for line in (
        "            ids=batch.tokens,",
        "            src_key_padding_mask=batch.segments == 0,  # True hides",
        '    capabilities = frozenset({"padding"})  # what the call below obeys',
        "    vocab_size = 9",
        "    return ModelProbe(Masked())",
    ):
        assert line in text.splitlines()
    assert main(["audit", "my_probe:make_probe", "--checks", "future,padding,batch"]) == 0
    sys.modules.pop("my_probe")
    assert main(["audit", "audited_by_name:Masked", "--write-probe", "my_probe.py"]) == 2  # it is there
    assert main(["audit", "audited_by_name:Masked", "--write-probe", "my-probe.txt"]) == 2
