"""The verbs on a small checkpoint: what they print, and how they refuse."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pellucid import generation
from pellucid.checkpoints import Checkpoint, load, save
from pellucid.cli import common
from pellucid.cli.main import main
from pellucid.generation import BeamSearchConfig, GenerationConfig, generate, generate_n_best
from pellucid.models.build import build
from pellucid.models.model import Decoder

Captured = pytest.CaptureFixture[str]


def refused(capsys: Captured, *arguments: str, code: int = 2) -> str:
    assert main(list(arguments)) == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    return captured.err


# ------------------------------------------------------------------------------------------------ generate


def test_generate_prints_the_prompt_and_what_follows(checkpoint: Path, capsys: Captured) -> None:
    (expected,) = generate(load(checkpoint), ["def f"], max_new_tokens=8)
    for extra in ([], ["--no-cache"]):
        assert main(["generate", str(checkpoint), "def f", "--max-new-tokens", "8", *extra]) == 0
        assert capsys.readouterr().out == f"def f{expected.text}\n"


def test_generate_as_json_takes_every_option(checkpoint: Path, capsys: Captured) -> None:
    options = {"max_new_tokens": 9, "temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    options["repetition_penalty"] = 1.3
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["generate", str(checkpoint), "def", "x", *flags, "--stop", "zz", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = generate(load(checkpoint), ["def", "x"], stop=("zz",), **options)
    assert [{"prompt": p, **c.to_dict()} for p, c in zip(["def", "x"], expected, strict=True)] == found
    assert set(found[0]) == {"prompt", "text", "tokens", "logprobs", "finish_reason"}


def test_generate_with_beams(checkpoint: Path, capsys: Captured) -> None:
    here = str(checkpoint)
    flags = ["--max-new-tokens", "5", "--num-beams", "3", "--length-penalty", "0.7"]
    options = {"max_new_tokens": 5, "num_beams": 3, "length_penalty": 0.7}
    found = generate_n_best(load(checkpoint), ["def", "x"], BeamSearchConfig(num_return_sequences=2, **options))
    assert main(["generate", here, "def", "x", *flags, "--num-return-sequences", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"prompt": prompt, "rank": rank, **row[rank - 1].to_dict()}
        for prompt, row in zip(["def", "x"], found, strict=True)
        for rank in (1, 2)
    ]
    assert main(["generate", here, "def", "x", *flags, "--num-return-sequences", "2"]) == 0
    expected = [
        "".join(f"{c.score:9.4f}  {p}{c.text}\n" for c in row) for p, row in zip(["def", "x"], found, strict=True)
    ]
    assert capsys.readouterr().out == f"{expected[0]}\n{expected[1]}\n"
    assert main(["generate", here, "def", *flags]) == 0
    assert capsys.readouterr().out == f"def{found[0][0].text}\n"


def test_generate_answers_what_an_encoder_decoder_reads(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    """The answer alone is printed: it does not go on from the text."""
    base, folder = load(checkpoint), tmp_path / "translator"
    config = base.model.config.model_copy(update={"family": "encoder_decoder"})
    save(folder, build(config, seed=1), tokenizer=base.tokenizer)
    loaded = load(folder)
    drawn, started = (generate(loaded, ["def f"], max_new_tokens=4, start_id=start)[0] for start in (None, 9))
    assert main(["generate", str(folder), "def f", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == f"{drawn.text}\n"
    assert main(["generate", str(folder), "def f", "--max-new-tokens", "4", "--start-id", "9"]) == 0
    assert capsys.readouterr().out == f"{started.text}\n"
    assert main(["generate", str(folder), "def f", "--max-new-tokens", "4", "--num-beams", "2"]) == 0
    assert capsys.readouterr().out == generate(loaded, ["def f"], max_new_tokens=4, num_beams=2)[0].text + "\n"


def test_generate_refuses_options_that_nothing_would_hear(checkpoint: Path, capsys: Captured) -> None:
    here = str(checkpoint)
    said = refused(capsys, "generate", here, "x", "--num-beams", "2", "--top-p", "1.0")
    assert "--top-p is for sampling, and --num-beams 2 searches" in said
    assert "--stop is for sampling" in refused(capsys, "generate", here, "x", "--num-beams", "2", "--stop", "a")
    assert "--num-return-sequences is for a beam search; give --num-beams too" in refused(
        capsys, "generate", here, "x", "--num-return-sequences", "1"
    )
    assert "num_return_sequences is 3, but num_beams is 2" in refused(
        capsys, "generate", here, "x", "--num-beams", "2", "--num-return-sequences", "3"
    )
    assert "start_id is 0, but a Decoder begins with its prompt" in refused(
        capsys, "generate", here, "x", "--start-id", "0"
    )


def test_generate_reads_a_prompt_from_standard_input(
    checkpoint: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("def g"))
    assert main(["generate", str(checkpoint), "-", "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("def g")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert "standard input is not utf-8" in refused(capsys, "generate", str(checkpoint), "-")


def test_generate_refuses_in_one_line(checkpoint: Path, without_tokenizer: Path, capsys: Captured) -> None:
    here = str(checkpoint)
    said = refused(capsys, "generate", here, "def f" * 40)
    assert "the model has positions for 48" in said
    assert "top_p is 1.5, but must be at most 1" in refused(capsys, "generate", here, "x", "--top-p", "1.5")
    assert "top_p is nan" in refused(capsys, "generate", here, "x", "--top-p", "nan")
    assert "does not exist" in refused(capsys, "generate", here + "-not", "x")
    assert "no tokenizer" in refused(capsys, "generate", str(without_tokenizer), "x")
    assert "cannot be encoded" in refused(capsys, "generate", here, "a\udcff")


def test_ctrl_c_in_a_verb_is_one_line_and_130(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pellucid.checkpoints.load", interrupted)
    assert main(["generate", "anything", "x"]) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"


def test_a_terminal_is_not_commanded_by_a_model() -> None:
    assert common.printable("a\x1b[2Jb\r\n\tc é漢\x07\x9b") == "a\ufffd[2Jb\ufffd\n\tc é漢\ufffd\ufffd"


# ---------------------------------------------------------------------------------------------------- chat


def chat(monkeypatch: pytest.MonkeyPatch, said: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    return main(["chat", *arguments])


def prompts_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that chats will ask for, special tokens spelt out."""
    prompts: list[str] = []
    original = generation.stream

    def listening(speaker: Checkpoint, ids: list[list[int]], *rest: object) -> object:
        assert speaker.tokenizer is not None
        prompts.append(speaker.tokenizer.decode(ids[0], skip_special=False))
        return original(speaker, ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(generation, "stream", listening)
    return prompts


def test_chat_replies_to_each_turn_and_ends_at_exit(
    checkpoint: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "x\n\n  \n/exit\nnever read\n"
    assert chat(monkeypatch, said, str(checkpoint), "--max-new-tokens", "4", "--temperature", "0") == 0
    captured = capsys.readouterr()
    loaded = load(checkpoint)
    stop = ("\nUser: ",)
    (reply,) = generate(loaded, ["User: x\nAssistant:"], max_new_tokens=4, temperature=0.0, stop=stop)
    assert captured.out == reply.text.lstrip() + "\n"
    assert captured.err == ""


def test_chat_keeps_the_transcript_and_drops_the_oldest_turns_when_it_must(
    checkpoint: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(monkeypatch)
    said = "x\ny\nz\n"
    assert chat(monkeypatch, said, str(checkpoint), "--max-new-tokens", "2", "--temperature", "0") == 0
    assert prompts[0] == "<|begin|>User: x\nAssistant:"
    assert prompts[1].startswith("<|begin|>User: x\nAssistant: ")
    assert prompts[1].endswith("<|end|>\nUser: y\nAssistant:")
    assert "(the oldest turns were dropped)" in capsys.readouterr().err
    assert prompts[-1].startswith("<|begin|>User: y\nAssistant: ")
    assert prompts[-1].endswith("<|end|>\nUser: z\nAssistant:")


def test_chat_keeps_the_system_message(checkpoint: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(monkeypatch)
    arguments = ["--max-new-tokens", "2", "--temperature", "0", "--system", "s"]
    assert chat(monkeypatch, "x\ny\n", str(checkpoint), *arguments) == 0
    assert prompts[0] == "<|begin|>System: s\nUser: x\nAssistant:"
    assert prompts[1:] == ["<|begin|>System: s\nUser: y\nAssistant:"]
    assert "dropped" in capsys.readouterr().err


def test_chat_goes_on_after_a_turn_that_is_too_long(
    checkpoint: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(monkeypatch)
    said = "y\n" + "word " * 60 + "\nx\n"
    assert chat(monkeypatch, said, str(checkpoint), "--max-new-tokens", "2", "--temperature", "0") == 0
    captured = capsys.readouterr()
    assert "the model has positions for 48" in captured.err
    assert captured.out.count("\n") >= 2
    assert prompts[-1].startswith("<|begin|>User: y\n")
    assert prompts[-1].endswith("User: x\nAssistant:")


def test_chat_uses_the_template_of_the_folder(
    checkpoint: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end of a reply ends the reply; a message cannot spell it; a template that refuses is one line."""
    loaded = load(checkpoint)
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.content }}{{ '<|pad|>' if m.role == 'assistant' else ']' }}{% endfor %}["
    )
    save(tmp_path / "own", loaded.model, tokenizer=loaded.tokenizer, chat_template=template)
    prompts = prompts_of(monkeypatch)
    seen: list[GenerationConfig] = []
    monkeypatch.setattr(generation, "stream", _noting(generation.stream, seen))
    said = "a<|pad|>\nb\n"
    assert chat(monkeypatch, said, str(tmp_path / "own"), "--max-new-tokens", "2", "--temperature", "0") == 0
    assert prompts[0] == "<|begin|>[a<|pad|>]["
    assert prompts[1].startswith("<|begin|>[a<|pad|>][")
    assert prompts[1].endswith("<|pad|>[b][")
    assert (seen[0].stop_token_ids, seen[0].stop) == ((loaded.tokenizer.pad_id,), ())
    capsys.readouterr()
    assert chat(monkeypatch, "a\n", str(tmp_path / "own"), "--system", "s") == 2
    err = capsys.readouterr().err
    assert "no system" in err
    assert err.count("\n") == 1


def _noting(original: Callable[..., object], seen: list[GenerationConfig]) -> Callable[..., object]:
    def noting(speaker: object, ids: object, params: GenerationConfig) -> object:
        seen.append(params)
        return original(speaker, ids, params)

    return noting


def test_chat_needs_a_tokenizer(without_tokenizer: Path, capsys: Captured) -> None:
    assert "has no tokenizer" in refused(capsys, "chat", str(without_tokenizer))


# ---------------------------------------------------------------------------------------------------- draw


def test_draw_a_rule_a_config_and_a_checkpoint(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "mask.svg"
    assert main(["draw", "causal & window(4)", "-o", str(target), "--length", "8"]) == 0
    assert target.read_text().startswith("<svg")
    assert capsys.readouterr().out == f"wrote {target}: causal() & window(4), 26 of 64 pairs visible (41%)\n"

    config = tmp_path / "model.yaml"
    config.write_text(
        "model:\n  vocab_size: 9\n  hidden_size: 8\n  num_hidden_layers: 3\n"
        "  attention: {num_attention_heads: 2}\n  ffn: {kind: dense, intermediate_size: 8}\n"
    )
    for named, layers in ((str(config), [[0, 1, 2]]), (str(checkpoint), [[0, 2], [1]])):
        assert main(["draw", named, "-o", str(target), "--documents", "3,2", "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert [panel["layers"] for panel in printed["panels"]] == layers
        assert printed["panels"][-1]["visible_pairs"] == 6 + 3


def test_draw_an_encoder_a_decoder_and_what_one_reads_of_the_other(tmp_path: Path, capsys: Captured) -> None:
    """L22: the flow of each family."""
    words = (
        "  vocab_size: 9\n  hidden_size: 8\n  num_hidden_layers: 2\n"
        "  attention: {num_attention_heads: 2}\n  ffn: {kind: dense, intermediate_size: 8}\n"
    )
    found = {}
    for family in ("encoder", "decoder", "encoder_decoder"):
        config = tmp_path / f"{family}.yaml"
        config.write_text(f"model:\n  family: {family}\n{words}")
        assert main(["draw", str(config), "-o", str(tmp_path / "m.svg"), "--documents", "3,2", "--json"]) == 0
        panels = json.loads(capsys.readouterr().out)["panels"]
        found[family] = [(panel["part"], panel["layers"], panel["visible_pairs"]) for panel in panels]
    assert found["encoder"] == [("encoder", [0, 1], 13)]
    assert found["decoder"] == [("decoder", [0, 1], 9)]
    assert found["encoder_decoder"] == [("encoder", [0, 1], 13), ("decoder", [0, 1], 9), ("cross", [0, 1], 13)]
    drawn = (tmp_path / "m.svg").read_text()
    for word in ("encoder layers 0–1", "decoder layers 0–1", "decoder to encoder, layers 0–1", "token of the source"):
        assert word in drawn


def test_draw_a_png(tmp_path: Path) -> None:
    assert main(["draw", "causal | same_group", "--length=4", "--groups=0,1,1,0", "-o", str(tmp_path / "m.png")]) == 0
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


def test_draw_refuses_in_one_line_and_leaves_nothing(tmp_path: Path, capsys: Captured) -> None:
    there = str(tmp_path / "m.svg")
    assert "give a name that ends in .svg or .png" in refused(capsys, "draw", "causal", "-o", "m.txt")
    assert "there is no rule 'wndow'" in refused(capsys, "draw", "wndow(3)", "-o", there)
    assert "does not exist" in refused(capsys, "draw", "none.yaml", "-o", there)
    assert "write it like 3,5,1" in refused(capsys, "draw", "causal", "--documents", "3,x", "-o", there)
    assert "--groups 0,1,1,0" in refused(capsys, "draw", "same_group", "-o", there)
    assert "draw 1 to 512" in refused(capsys, "draw", "causal", "--length", "0", "-o", there)
    assert "no such file or directory" in refused(capsys, "draw", "causal", "-o", str(tmp_path / "no" / "m.svg"))
    (tmp_path / "taken.svg").mkdir()
    assert "taken.svg: is a directory" in refused(capsys, "draw", "causal", "-o", str(tmp_path / "taken.svg"))
    assert [path.name for path in tmp_path.iterdir()] == ["taken.svg"]


# --------------------------------------------------------------------------------------------------- audit


def test_audit_passes_an_honest_checkpoint(checkpoint: Path, capsys: Captured) -> None:
    assert main(["audit", str(checkpoint), "--checks", "future, loss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["future", "pass"], ["loss", "pass"]]
    assert lines[-1].startswith("passed (sequences of up to 24 tokens; ")
    assert main(["audit", str(checkpoint), "--checks", "future", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdicts"] == {"future": "pass"}


def test_audit_of_a_leak_exits_with_one(checkpoint: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose every token takes a little from the one after it."""
    forward = Decoder.forward

    def leaking(self: Decoder, batch: object, **options: object) -> object:
        output = forward(self, batch, **options)  # type: ignore[arg-type]
        if output.logits is not None:
            object.__setattr__(output, "logits", output.logits + 0.1 * output.logits.roll(-1, 1))
        return output

    monkeypatch.setattr(Decoder, "forward", leaking)
    assert main(["audit", str(checkpoint), "--checks", "future", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert report["verdicts"] == {"future": "leak"}


def test_audit_strict_fails_on_what_is_fragile(capsys: Captured) -> None:
    arguments = ["audit", "broken_models.flow:PoisonedByPads", "--checks", "padding"]
    assert main(arguments) == 0
    assert "fragile" in capsys.readouterr().out
    assert main([*arguments, "--strict"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("failed (")


def test_an_audit_of_a_model_that_ignores_its_input_fails(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    loaded = load(checkpoint)
    with torch.no_grad():
        loaded.model.norm.weight.zero_()
    save(tmp_path / "deaf", loaded.model)
    assert main(["audit", str(tmp_path / "deaf"), "--checks", "future"]) == 1
    assert "ignores its input" in capsys.readouterr().out


def test_audit_refuses_in_one_line(checkpoint: Path, capsys: Captured) -> None:
    assert "did you mean 'future'" in refused(capsys, "audit", str(checkpoint), "--checks", "futur")
    assert "names nothing that can be audited" in refused(capsys, "audit", "nowhere")
