"""``pellucid show`` and ``pellucid verify``."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from pellucid.checkpoints import load, save
from pellucid.checkpoints.contract import CONTRACT
from pellucid.checkpoints.weights import WEIGHTS
from pellucid.cli.main import main
from pellucid.data import PLAIN, Tokenizer
from pellucid.models import ModelConfig, build

Captured = pytest.CaptureFixture[str]
CONFIG = {
    "vocab_size": 40,
    "hidden_size": 16,
    "layers": ["causal & window(4)", "causal", "causal"],
    "attention": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "ffn": {"kind": "gated", "intermediate_size": 24},
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verbs") / "good"
    save(folder, build(ModelConfig.from_mapping(CONFIG), seed=1), max_shard_bytes=4000)
    return folder


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A weight of another shape, one too many, one missing."""
    folder = tmp_path / "bad"
    save(folder, build(ModelConfig.from_mapping(CONFIG), seed=1))
    tensors = load_file(folder / WEIGHTS)
    tensors["norm.weight"] = torch.ones(17)
    tensors["extra"] = torch.ones(1)
    del tensors["layers.0.ffn.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS)
    return folder


def test_show_says_what_a_checkpoint_is(good: Path, capsys: Captured) -> None:
    assert main(["show", str(good)]) == 0
    lines = capsys.readouterr().out.splitlines()
    total = sum(weight.numel() for weight in load(good).model.parameters())
    found = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines if "  " in line}
    assert found["parameters"] == f"{total:,}"
    assert found["layers"] == "1 × causal() & window(4), 2 × causal()"
    assert found["heads"] == "4 of 4, 2 for keys and values"
    assert found["positions"] == "rope (rope_theta 10000.0, interleaved False)"
    assert found["head"] == "language_model, tied to the embedding"
    assert found["text"] == "no tokenizer"
    assert found["witness"] == "plain, padded, packed, continued, far, training"
    row = next(line for line in lines if line.startswith("layers.2.attention.k_proj.weight")).split()
    assert row[1:3] == ["float32[8,", "16]"]
    assert row[3].startswith("model-0000")
    assert lines[-1] == "29 loaded, 1 tied"


def test_every_verb_takes_a_run_and_its_pointers(tmp_path: Path, capsys: Captured) -> None:
    tokenizer = Tokenizer.train(["to be or not to be"] * 3, vocab_size=262)
    run = tmp_path / "run"
    for step, seed in ((1, 1), (2, 2)):
        model = build(ModelConfig.from_mapping(CONFIG | {"vocab_size": 262}), seed=seed)
        save(run / "checkpoints" / f"step-0000000{step}", model, tokenizer=tokenizer)
    (run / "best").write_text("step-00000001\n")
    (run / "last").write_text("step-00000002\n")
    for name, step in (("run", "1"), ("run/best", "1"), ("run/last", "2")):
        there = str(tmp_path / name)
        assert main(["show", there, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["path"].endswith(f"step-0000000{step}")
        assert main(["draw", there, "-o", str(tmp_path / "mask.svg")]) == 0
        capsys.readouterr()
    assert main(["generate", str(run), "to be", "--max-new-tokens", "2"]) == 0
    assert main(["verify", str(run / "last"), "--level", "headers"]) == 0
    assert main(["audit", str(run / "best"), "--checks", "dropout"]) == 0
    capsys.readouterr()
    (run / "best").write_text("../../elsewhere")
    for verb in (["show"], ["generate"], ["verify"], ["draw"], ["audit"]):
        words = {"generate": ["x"], "draw": ["-o", str(tmp_path / "mask.svg")]}.get(verb[0], [])
        assert main([*verb, str(run / "best"), *words]) in (1, 2)
        out, err = capsys.readouterr()
        assert "holds '../../elsewhere', which is not the name of a step" in out + err


ODD = {
    "dropout": {"attention": 0.125},
    "attention": {"num_attention_heads": 4, "num_key_value_heads": 2, "scale": 0.375},
    "final_logit_softcapping": 30.5,
    "initializer_range": 0.0625,
}


def test_show_prints_the_whole_contract(tmp_path: Path, capsys: Captured) -> None:
    """Every field and value of it, as lines that read like the config they came from."""
    tokenizer = Tokenizer.train(["to be or not to be"] * 3, vocab_size=262)
    config = ModelConfig.from_mapping(CONFIG | ODD | {"vocab_size": 262})
    save(tmp_path / "a", build(config, seed=1), tokenizer=tokenizer, chat_template=PLAIN)
    assert main(["show", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    contract = load(tmp_path / "a").contract
    data = contract.model_dump(mode="json")
    start, end = (out.index(mark) for mark in ("schema_version: 5", "\ntensors\n"))
    told = yaml.safe_load(out[start:end])
    assert set(told) == set(data) - {"tensors"}
    for name in ("positions_after_cache", "text", "tied", "digests"):
        assert told[name] == data[name]
    assert told["model"].pop("layers") == ["1 × causal() & window(4)", "2 × causal()"]
    assert {name: value for name, value in data["model"].items() if name != "layers"} == told["model"]
    for line in ("    attention: 0.125", "    scale: 0.375", "  final_logit_softcapping: 30.5", "  adds_bos: document"):
        assert line in out.splitlines()
    assert set(contract.witness.probes) <= set(told["witness"])
    assert told["witness"]["plain"].startswith("1 × 8 tokens, 3 slots, loss ")
    assert told["witness"]["chat question"].endswith(" ids")
    assert all(f"\n{name} " in out[end:] for name in [*contract.tensors, *contract.tied])


def test_show_speaks_of_every_family_and_part(tmp_path: Path, capsys: Captured) -> None:
    """Every row of the table, of models that have no one size of head and no single stack."""
    both = {
        "family": "encoder_decoder",
        "position": {"kind": "rope", "scaling": {"kind": "linear", "factor": 2.0}},
        "layers": ["causal", {"rule": "causal", "position": {"kind": "none"}}],
    }
    latent = {
        "attention": {
            "kind": "latent", "num_attention_heads": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
        "ffn": {"kind": "moe", "num_experts": 4, "num_experts_per_tok": 2, "expert": CONFIG["ffn"]},
        "head": {"kind": "regression"},
    }  # fmt: skip
    told = {}
    for name, words in (("both", both), ("latent", latent)):
        save(tmp_path / name, build(ModelConfig.from_mapping(CONFIG | words), seed=1))
        assert main(["show", str(tmp_path / name)]) == 0
        lines = capsys.readouterr().out.splitlines()
        told[name] = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines if "  " in line}
    assert told["both"]["family"] == "encoder_decoder"
    assert told["both"]["layers"] == "1 × causal(), 1 × causal() (position none)"
    assert told["both"]["encoder's layers"] == "2 × full()"
    assert told["both"]["encoder's positions"] == (
        "rope (rope_theta 10000.0, interleaved False, scaling linear (factor 2.0))"
    )
    assert told["both"]["reads the encoder"] == "4 of 4, 2 for keys and values"
    assert told["latent"]["heads"] == "2 of 8 (4 turned), values of 6, from latents of 8"
    assert told["latent"]["size"] == "16, 2 of 4 experts by softmax, each gated ffn 24 (silu)"
    assert told["latent"]["head"].startswith("regression (num_outputs 1, pooling last")


def test_show_as_json_leaves_nothing_out(good: Path, capsys: Captured) -> None:
    assert main(["show", str(good), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["contract"] == load(good).contract.model_dump(mode="json")


def test_show_as_json(good: Path, capsys: Captured) -> None:
    assert main(["show", str(good), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["complete"] is True
    assert data["changed"] == ""
    assert data["contract"]["model"]["layers"] == ["causal() & window(4)", "causal()", "causal()"]
    tied = next(row for row in data["tensors"] if row["name"] == "lm_head.weight")
    assert tied == {
        "name": "lm_head.weight", "tensor": None, "file": None, "status": "tied", "detail": "is embed_tokens.weight",
    }  # fmt: skip


def test_show_names_every_tensor_that_is_wrong(bad: Path, capsys: Captured) -> None:
    assert main(["show", str(bad)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "27 loaded, 1 tied, 1 missing, 1 surplus, 1 mismatched"
    assert "mismatched  the contract wants float32[16], the file holds float32[17]" in out
    assert main(["show", str(bad), "--json"]) == 1
    rows = {row["name"]: row["status"] for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert rows["extra"] == "surplus"
    assert rows["layers.0.ffn.up_proj.weight"] == "missing"


def test_show_says_that_a_contract_was_changed(good: Path, tmp_path: Path, capsys: Captured) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "a"))
    (folder / CONTRACT).write_text((folder / CONTRACT).read_text().replace("10000.0", "20000.0"))
    assert main(["show", str(folder)]) == 1
    assert "was changed after it was written" in capsys.readouterr().out


@pytest.mark.parametrize("level", [None, "headers", "digests", "witness"])
def test_verify_passes_what_was_saved(good: Path, capsys: Captured, level: str | None) -> None:
    assert main(["verify", str(good), *(["--level", level] if level else [])]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"passed ({level or 'witness'})"
    assert (len(out) > 8) == (level in (None, "witness"))


def test_verify_hashes_text_files_at_every_level(good: Path, tmp_path: Path, capsys: Captured) -> None:
    tokenizer = Tokenizer.train(["to be or not to be"] * 3, vocab_size=262)
    folder = tmp_path / "a"
    config = ModelConfig.from_mapping(CONFIG | {"vocab_size": 262})
    save(folder, build(config, seed=1), tokenizer=tokenizer, chat_template=PLAIN)
    for name in ("tokenizer.json", "chat_template.jinja"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before + b" ")
        assert main(["verify", str(folder), "--level", "headers"]) == 1
        assert f"{name} has SHA-256" in capsys.readouterr().out
        (folder / name).write_bytes(before)
    assert main(["verify", str(folder)]) == 0


def test_verify_tells_a_mismatch_from_what_cannot_be_read(
    good: Path, bad: Path, tmp_path: Path, capsys: Captured
) -> None:
    """Exit code 1: it is not what its contract says; 2: nobody can say what it is."""
    assert main(["verify", str(bad), "--level", "headers"]) == 1
    assert "failed: " in capsys.readouterr().out
    folder = Path(shutil.copytree(good, tmp_path / "a"))
    shard = next(folder.glob("model-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 0x40
    shard.write_bytes(content)
    assert main(["verify", str(folder), "--level", "headers"]) == 0
    capsys.readouterr()
    assert main(["verify", str(folder), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is False
    assert "was changed or damaged" in data["problem"]
    shard.write_bytes(content[:-1])
    assert main(["verify", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert main(["verify", str(tmp_path / "nowhere")]) == 2


def test_verify_refuses_a_level_that_is_none(good: Path, capsys: Captured) -> None:
    assert main(["verify", str(good), "--level", "all"]) == 2
    assert "choose one of headers, digests, witness" in capsys.readouterr().err
