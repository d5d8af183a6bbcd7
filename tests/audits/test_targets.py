"""What a user types, and what an audit writes for build servers and test suites."""

import json
import subprocess
import sys
import textwrap
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import broken_models
from pellucid.audits import TinyDecoder, audit
from pellucid.audits.junit import write_junit
from pellucid.audits.probes.hf_load import from_folder
from pellucid.audits.resolve_target import from_text
from pellucid.errors import InputError

MINE = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, ahead=0.0):
        super().__init__()
        self.table, self.out, self.ahead = nn.Embedding(9, 8), nn.Linear(8, 9), ahead

    def forward(self, tokens):
        x = self.table(tokens)
        return self.out(x.cumsum(1) + self.ahead * x.sum(1, keepdim=True))

class Needs(nn.Module):
    def __init__(self, width):
        super().__init__()

model = Mine()
number = 3

def make():
    return Mine(ahead=0.1)

def function(tokens):
    return model(tokens)

def breaks():
    raise RuntimeError("boom\\nand more")
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "their_models.py").write_text(MINE)
    (tmp_path / "my-checkpoint").mkdir()
    (tmp_path / "broken_module.py").write_text("import a_package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("their_models", "broken_module"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("name", "passes"), [("model", True), ("Mine", True), ("make", False), ("function", True)])
def test_models_classes_factories_and_functions(mine, name, passes):
    assert audit(from_text(f"their_models:{name}"), checks=["future"]).passed == passes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("their_models", "names nothing that can be audited; give a checkpoint folder"),
        ("their_models:", "names nothing"),
        ("no_such_module:model", "there is no module 'no_such_module'"),
        ("their_models:modle", "their_models has no 'modle'; did you mean 'model'? it has Mine"),
        ("their_models.model", "names nothing that can be audited; did you mean 'their_models:model'?"),
        ("their_models.py", "it is a file: name its folder, or module:attribute such as their_models:make_model"),
        ("my-checkpiont", "did you mean the folder 'my-checkpoint'?"),
        ("their_models:Needs", "cannot be made: TypeError"),
        ("their_models:breaks", "cannot be made: RuntimeError: boom and more; write a factory without arguments"),
        ("broken_module:x", "broken_module cannot be imported: No module named 'a_package_that_is_not_there'"),
    ],
)
def test_what_cannot_be_found_or_made_is_one_line(mine, text, message):
    with pytest.raises(InputError) as caught:
        from_text(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_number_is_no_model(mine):
    with pytest.raises(InputError, match="int cannot be called"):
        audit(from_text("their_models:number"))


def test_a_probe_may_stand_as_its_own_target():
    assert audit(TinyDecoder().probe(), checks=["future"]).passed


def test_junit_counts_and_survives_control_characters(tmp_path):
    probe = broken_models.SeesOneAhead().probe()
    probe.name = "bad \x00 & <name>"
    write_junit(tmp_path / "a.xml", audit(probe=probe, checks=["future", "cross"]))
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert suite.attrib["name"] == "audit of bad \ufffd & <name>"
    assert int(suite.attrib["failures"]) >= 1
    assert int(suite.attrib["skipped"]) == 1
    assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
    failure = suite.find("testcase/failure")
    assert "the output at 0 moves when token 1 is changed" in failure.attrib["message"]


def test_junit_is_strict_when_asked(tmp_path):
    report = audit(broken_models.PoisonedByPads(), checks=["padding"])
    for strict, failures in ((False, 0), (True, 1)):
        write_junit(tmp_path / "a.xml", report, strict=strict)
        assert (int(ElementTree.parse(tmp_path / "a.xml").getroot().attrib["failures"]) > 0) == failures


def test_three_lines_in_somebodys_suite(tmp_path):
    """Run as they would: a pytest of its own, that loads no torch before a test asks."""
    (tmp_path / "test_theirs.py").write_text(
        textwrap.dedent("""
            import sys
            from pellucid.audits import TinyDecoder  # their model

            def test_honest(no_leaks):
                no_leaks(TinyDecoder(), checks=["future"])

            def test_leaking(no_leaks):
                from pellucid.audits import broken
                no_leaks(broken.SeesOneAhead(), checks=["future"])
        """)
    )
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n\ndef test_light(request):\n    assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    light = subprocess.run([*command, "test_nothing.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert light.returncode == 0, light.stdout
    whole = subprocess.run([*command, "test_theirs.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert whole.returncode == 1
    assert "1 failed, 1 passed" in whole.stdout
    assert "the output at 0 moves when token 1 is changed" in whole.stdout


class Late(nn.Module):
    """Answers slowly enough for a budget to matter."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, tokens):
        torch.randn(400, 400, generator=torch.Generator().manual_seed(0)) @ torch.ones(400, 400)
        return self.out(self.table(tokens).cumsum(1))


def test_a_budget_samples_and_then_stops():
    report = audit(Late(), length=200, budget=1e-3)
    skipped = [f for f in report.findings if "the budget of 0.001 s was spent" in f.message]
    assert len(skipped) >= 2
    assert {f.status for f in skipped} == {"not_applicable"}
    assert report.not_run == tuple(f.check for f in skipped)
    assert (report.finished, report.passed_strictly, report.to_dict()["finished"]) == (False, False, False)
    assert [row[1] for row in report.table().rows if row[0] in report.not_run] == ["not run"] * len(skipped)
    whole = audit(Late(), length=40, budget=60, checks=["future"])
    assert (whole.passed, whole.passed_strictly, whole.not_run) == (True, True, ())
    with pytest.raises(InputError, match="budget is 0"):
        audit(Late(), budget=0)


def test_classes_of_transformers_are_built_tiny():
    pytest.importorskip("transformers")
    model = from_text("transformers:GPT2LMHeadModel")
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    report = audit(model, checks=["future", "batch"])
    assert report.verdicts == {"future": "pass", "batch": "pass"}
    with pytest.raises(InputError, match="cannot be built from a tiny config"):
        from_text("transformers:PreTrainedModel")


def test_a_class_is_no_model():
    with pytest.raises(InputError, match="Late is a class; audit an instance of it"):
        audit(Late)


def test_weights_that_hold_nothing_are_refused():
    with pytest.raises(InputError, match="meta device"):
        audit(Late().to("meta"))


def test_a_target_that_ends_the_program_is_a_finding(mine):
    class Exits(Late):
        def forward(self, tokens):
            if tokens.shape[1] > 2:
                raise SystemExit(0)
            return super().forward(tokens)

    assert audit(Exits(), checks=["future"]).verdicts == {"future": "error"}
    (mine / "leaving.py").write_text("import sys\n\ndef make():\n    sys.exit(0)\n")
    with pytest.raises(InputError, match="cannot be made: SystemExit"):
        from_text("leaving:make")


@pytest.fixture
def saved(tmp_path):
    pytest.importorskip("transformers")
    from_text("transformers:GPT2LMHeadModel").save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_a_folder_of_transformers_is_loaded_without_its_code(saved):
    assert audit(from_folder(saved), checks=["future"]).passed
    config = json.loads((saved / "config.json").read_text())
    for changes, message in (
        ({"architectures": ["NoSuchModel"], "auto_map": {"AutoModel": "evil.py--Model"}}, "no such model"),
        ({"architectures": 3}, "names the architecture None"),
        ({"architectures": ["os"]}, "no such model"),
    ):
        (saved / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(InputError, match=message):
            from_folder(saved)
    (saved / "config.json").write_text("[1")
    with pytest.raises(InputError, match="is no JSON"):
        from_folder(saved)
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="cannot be loaded as GPT2LMHeadModel"):
        from_folder(saved)
