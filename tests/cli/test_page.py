"""Pages of audits and of runs: what they gather, and that no run fails for a page."""

import json
import math
import os
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

import broken_models
from helpers.browser import drive, needs_chromium
from helpers.tiny import tiny_model
from pellucid.audits import audit, expected_flow
from pellucid.batch import Batch
from pellucid.checkpoints import Checkpoint, load
from pellucid.cli import demo, html_samples
from pellucid.cli.html_report import audit_page, curves, run_page
from pellucid.cli.html_samples import longest, token_view
from pellucid.cli.main import main
from pellucid.models.probe import DecoderProbe
from pellucid.records import Flow, TokenView
from pellucid.training.config import TrainConfig
from pellucid.visibility import causal, full

TEXT = "def f(x): return x\n\ndef g(y): return y + 1\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run, trained by the command line."""
    folder = tmp_path_factory.mktemp("runs")
    for n in range(8):
        (folder / f"{n}.py").write_text(f"import os\n\ndef number_{n}(this):\n    return this + {n}\n" * 12)
    words: dict[str, Any] = {
        "model": {
            "vocab_size": 280,
            "hidden_size": 16,
            "layers": ["causal & window(4)", "causal"],
            "attention": {"num_attention_heads": 2},
            "ffn": {"kind": "dense", "intermediate_size": 16},
        },
        "data": {"source": str(folder / "*.py"), "heldout_fraction": 0.4, "max_length": 32},
        "max_steps": 6,
        "eval_steps": 2,
        "batch_size": 2,
        "num_threads": 1,
    }
    (folder / "small.json").write_text(json.dumps(words))
    assert main(["train", str(folder / "small.json"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def said(page: Path) -> str:
    """The words of a page."""
    body = page.read_text(encoding="utf-8").split("</head>")[1]
    body = re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL)
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", body)))


# ------------------------------------------------------------------------------------------------ audits


def test_the_page_of_an_audit_says_what_leaks(tmp_path: Path) -> None:
    report = audit(broken_models.SeesOneAhead(), checks=["future", "padding"])
    audit_page(tmp_path / "a.html", report)
    words = said(tmp_path / "a.html")
    assert "The audit failed: future" in words
    assert "✗ leak" in words
    assert "row 0, query 0, key 1" in words
    assert "query 0 sees key 1query 0 sees key 2" in words
    assert words.index("Verdicts") < words.index("Who sees whom") < words.index("Token by token")


def test_the_page_of_a_clean_audit_says_so(tmp_path: Path) -> None:
    report = audit(probe=DecoderProbe(tiny_model()), checks=["future"])
    audit_page(tmp_path / "a.html", report)
    assert "The audit passed: 1 checks in" in said(tmp_path / "a.html")
    assert "✗" not in said(tmp_path / "a.html")


def test_a_page_says_what_was_strict(tmp_path: Path) -> None:
    report = audit(broken_models.PoisonedByPads(), checks=["padding"])
    audit_page(tmp_path / "a.html", report)
    assert "The audit passed: 1 checks in" in said(tmp_path / "a.html")
    audit_page(tmp_path / "a.html", report, passed=False)
    assert "The audit failed: padding." in said(tmp_path / "a.html")


# ------------------------------------------------------------------------------------------------ runs


def test_training_leaves_a_page(run: Path) -> None:
    words = said(run / "report.html")
    assert "Training run run" in words
    assert "finished, 6 steps" in words
    for part in ("Loss", "held out, sample", "Learning rate", "Gradient norm", "tokens per second", "A sample text"):
        assert part in words
    assert "model.layers['causal & window(4)', 'causal']" in words.replace("causal()", "causal")
    assert "versions.torch" in words
    assert "def number_" in words.replace("↵", "").replace("·", " ")
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "grad_norm" in line][-1]
    assert f"norm ends at {last['grad_norm']:.4g}" in words
    assert (run / "report.html").stat().st_size < 200_000


def test_a_finished_run_keeps_its_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "report.html").stat().st_mtime_ns
    assert main(["train", str(run), "--resume"]) == 0
    assert "nothing is left to do" in capsys.readouterr().err
    assert (run / "report.html").stat().st_mtime_ns == before
    (run / "report.html").rename(run / "kept.html")
    assert main(["train", str(run), "--resume"]) == 0
    assert f"{run / 'report.html'} shows the run" in capsys.readouterr().err
    assert said(run / "report.html") == said(run / "kept.html")
    (run / "kept.html").unlink()


def test_a_page_that_cannot_be_written_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    os.utime(run / "report.html", (0, 0))
    assert main(["train", str(run), "--resume"]) == 0
    warning = capsys.readouterr().err.splitlines()[1:]
    assert len(warning) == 1
    assert warning[0].startswith(f"warning: no page at {run / 'report.html'}: ")
    (run / "report.html").rmdir()

    def broken(*arguments: object) -> TokenView:
        raise RuntimeError("two\nlines \x1b[2J")

    monkeypatch.setattr(html_samples, "token_view", broken)
    assert main(["train", str(run), "--resume"]) == 0
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"warning: no page at {run / 'report.html'}: two lines \ufffd[2J"
    ]
    assert not (run / "report.html").exists()
    (run / "report.html").write_bytes(kept)


def test_a_run_with_verdicts_and_more(run: Path, tmp_path: Path) -> None:
    report = audit(probe=DecoderProbe(tiny_model()), checks=["future"])
    run_page(tmp_path / "p.html", run, report, [("Completions", ["went on"])], sample=False)
    headings = re.findall("<h2>(.*?)</h2>", (tmp_path / "p.html").read_text(encoding="utf-8"))
    assert headings == ["The run", "Completions", "Curves", "Verdicts", "Who sees whom", "Circumstances"]
    words = said(tmp_path / "p.html")
    assert "went on" in words
    assert "The audit passed" in words


def test_the_demo_adds_its_results() -> None:
    summary = {
        "heldout_bits_per_byte": 1.5,
        "xz_bits_per_byte": 1.9,
        "gzip_bits_per_byte": 2,
        "completions": [{"prompt": "import", "text": " os\n"}],
    }
    against, completions = demo._sections(summary)
    assert against[1][0].rows == (("this model", 1.5), ("xz", 1.9), ("gzip", 2.0))  # type: ignore[union-attr]
    assert completions[1][0].rows == (("import", " os\n"),)  # type: ignore[union-attr]


def test_curves_are_the_log_and_damaged_numbers_are_gaps(tmp_path: Path) -> None:
    steps = [
        {
            "kind": "step",
            "step": 1,
            "loss": 4.0,
            "learning_rate": 0.1,
            "grad_norm": 2.0,
            "num_targets": 100,
            "seconds": 0.5,
        },
        {
            "kind": "step",
            "step": 2,
            "loss": "nan",
            "learning_rate": None,
            "grad_norm": [1],
            "num_targets": 100,
            "seconds": 0,
        },
        {"kind": "step", "step": "x", "loss": True, "learning_rate": "y", "num_targets": 10**400},
        {"kind": "validation", "step": 2, "loss": 3.0, "bits_per_byte": 2.0, "final": False},
        {"kind": "validation", "step": 2, "loss": 2.5, "bits_per_byte": 1.5, "final": True},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in steps))
    found = {record.title: {one.name: one for one in record.curves} for record in curves(file)}
    loss = found["Loss"]
    assert loss["training"].x[:2] == (1.0, 2.0)
    assert loss["training"].y[0] == 4.0
    assert all(map(math.isnan, (*loss["training"].y[1:], loss["training"].x[2])))
    assert (loss["held out, sample"].y, loss["all held out"].y) == ((3.0,), (2.5,))
    assert found["Speed"]["tokens per second"].y[0] == 200
    assert all(map(math.isnan, found["Speed"]["tokens per second"].y[1:]))
    assert "Bits per byte" not in found  # single points are in the table
    assert curves(tmp_path / "nothing.jsonl") == []


# ------------------------------------------------------------------------------------------------ the sample


@pytest.fixture
def loaded(checkpoint: Path) -> Checkpoint:
    return load(checkpoint)


def test_the_view_is_what_the_model_does(loaded: Checkpoint) -> None:
    view = token_view(loaded, TEXT)
    assert loaded.tokenizer is not None
    ids = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(TEXT)][: len(view.tokens)]
    assert "".join(view.tokens[1:]) == loaded.tokenizer.decode(ids[1:])
    probe, request = DecoderProbe(loaded.model), Batch.from_rows([ids])
    may_TT = expected_flow(loaded.model.rules, request)[0]
    assert view.may_see == may_TT.tolist()
    moved_TT, attention_LNTT = torch.tensor(view.moved), torch.tensor(view.attention)
    assert not moved_TT[~may_TT].any()
    assert bool((moved_TT[may_TT] > 0).float().mean() > 0.9)
    assert float(moved_TT.max()) <= 1
    torch.testing.assert_close(attention_LNTT.sum(-1), torch.ones_like(attention_LNTT[..., 0]))
    window_TT = may_TT & (torch.arange(len(ids))[:, None] - torch.arange(len(ids)) < 4)
    assert torch.equal(attention_LNTT[0, 0] > 0, window_TT)
    assert view.layers[0] == "0: causal() & window(4)"
    others = Batch.from_rows([[*ids[:3], token, *ids[4:]] for token in range(probe.vocab_size)])
    with torch.no_grad():
        before_TV, after_VTV = probe.logits(request)[0].softmax(-1), probe.logits(others).softmax(-1)
    want_VT = (after_VTV - before_TV).abs().sum(-1) / 2
    column_T = moved_TT[:, 3].to(want_VT.dtype)
    assert bool((want_VT - column_T).abs().amax(1).min() < 1e-5)  # one of the tokens it could be replaced by


def test_a_model_that_sees_too_much_is_seen_through(loaded: Checkpoint) -> None:
    """One layer lets everything through, the model declares causal."""
    loaded.model.rules = (causal(),) * 3
    loaded.model.layers[1].attention.rule = full()  # type: ignore[union-attr]
    view = token_view(loaded, TEXT)
    count = len(view.tokens)
    assert len(Flow("f", view.may_see, view.moved).leaks) > 0.9 * count * (count - 1) / 2


def test_big_models_get_short_texts(loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest(loaded.model) == 48  # as many as it has positions
    monkeypatch.setattr(html_samples, "_WEIGHTS", 6 * 20**2)
    assert longest(loaded.model) == 20
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    monkeypatch.setattr(html_samples, "_WORK", 100 * parameters)
    assert longest(loaded.model) == 10
    monkeypatch.setattr(html_samples, "_WORK", 1)
    assert longest(loaded.model) == 2


def test_the_text_is_held_out(run: Path) -> None:
    text = html_samples.heldout_text(TrainConfig.from_file(run / "config.yaml"))
    assert text.startswith("def number_")
    assert len(text) == 600


@needs_chromium
def test_the_page_of_a_run_works_on_a_telephone(run: Path, tmp_path: Path) -> None:
    told = drive(
        run / "report.html",
        """
        const all = [...document.querySelectorAll(".words .tok")];
        told.hidden = all.map((token) => { token.click(); return document.querySelectorAll(".words .hid").length; });
        told.leaks = document.querySelectorAll(".words .leak").length;
        told.curves = [...document.querySelectorAll(".curves > svg")].map((svg) => svg.getBoundingClientRect().height);
        """,
        tmp_path,
        size=(360, 740),
    )
    assert (told["heard"], told["fetched"], told["console"], told["leaks"]) == ([], [], [], 0)
    assert told["width"] <= told["inner"] == 360
    count = len(told["hidden"])
    assert told["hidden"] == [count - 1 - query for query in range(count)]
    assert len(told["curves"]) == 5
    assert min(told["curves"]) > 100
