"""What a training config refuses, and that it reads back equal."""

from pathlib import Path
from typing import Any

import pytest

from pellucid.configfile import to_yaml
from pellucid.errors import ConfigError
from pellucid.training import train
from pellucid.training.config import AdamWConfig, MuonConfig, TrainConfig

WORDS: dict[str, Any] = {
    "model": {
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "attention": {"num_attention_heads": 2},
        "ffn": {"kind": "dense", "intermediate_size": 24},
    },
    "max_steps": 6,
}


def config(**changes: Any) -> TrainConfig:
    return TrainConfig.from_mapping(WORDS | changes)


def test_kinds_choose_parts() -> None:
    assert config().optimizer == AdamWConfig()
    assert config(
        optimizer={"kind": "muon", "learning_rate": 1e-2, "adamw": {"learning_rate": 1e-3}}
    ).optimizer == MuonConfig(learning_rate=0.01, adamw=AdamWConfig(learning_rate=0.001))
    assert (config().max_steps, config().max_minutes) == (6, None)
    assert (config(max_minutes=4).max_steps, config(max_minutes=4).max_minutes) == (6, 4.0)


def test_windows_default_to_the_training_length_and_half_of_it() -> None:
    assert config(data={"max_length": 64}).window == (64, 32)
    assert config(evaluation={"max_length": 100}).window == (100, 50)
    assert config(evaluation={"max_length": 100, "stride": 7}).window == (100, 7)
    assert config(data={"max_length": 2}).window == (2, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimiser": {"kind": "adamw"}}, "did you mean 'optimizer'"),
        ({"optimizer": {"kind": "muon", "momentun": 0.9}}, "momentun"),
        ({"optimizer": {"kind": "sgd"}}, "sgd"),
        ({"optimizer": {"kind": "adamw", "learning_rate": "3e-4"}}, "learning_rate"),
        ({"optimizer": {"kind": "adamw", "betas": [0.9, 1.0]}}, "betas"),
        ({"optimizer": {"kind": "adamw", "learning_rate": -1.0}}, "learning_rate"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_steps": None}, "max_steps and max_minutes are both missing"),
        ({"budget": {"kind": "steps", "steps": 6}}, "there is no key 'budget'"),
        ({"max_minutes": 0}, "max_minutes"),
        ({"lr_scheduler": {"warmup_steps": 3, "warmup_ratio": 0.1}}, "give one of them"),
        ({"lr_scheduler": {"warmup_ratio": 1.0}}, "warmup_ratio"),
        ({"evaluation": {"max_length": 8, "stride": 8}}, "stride is 8 but a window has 8"),
        ({"data": {"vocab_size": 301}}, "data.vocab_size is 301 but model.vocab_size is 300"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"precision": "float16"}, "float16"),
        ({"batch_size": True}, "batch_size"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_auto_is_resolved_once_and_nothing_else_changes() -> None:
    auto = config(precision="auto", optimizer={"kind": "muon", "precision": "auto"})
    resolved = auto.resolve_auto("bfloat16")
    assert (resolved.precision, resolved.optimizer) == ("bfloat16", MuonConfig(precision="bfloat16"))
    assert auto.resolve_auto("bfloat16", "float32").optimizer == MuonConfig(precision="float32")
    assert resolved.resolve_auto("float32") == resolved
    assert config().resolve_auto("bfloat16") == config()
    assert resolved.resolved_precision == "bfloat16"


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    wanted = config(optimizer={"kind": "muon"}, max_minutes=4.5, max_grad_norm=None, seed=3)
    (tmp_path / "config.yaml").write_text(to_yaml(wanted))
    assert TrainConfig.from_file(tmp_path / "config.yaml") == wanted
    changed = TrainConfig.from_file(tmp_path / "config.yaml", ["optimizer.adamw.learning_rate=3e-4", "seed=4"])
    assert changed == wanted.model_copy(
        update={"seed": 4, "optimizer": MuonConfig(adamw=AdamWConfig(learning_rate=3e-4, weight_decay=0.0))}
    )


@pytest.mark.parametrize("rule", ["lookahead(1)", "full", "causal | prefix(3)", "window(4)", "chunk(8)"])
def test_a_rule_that_shows_a_token_its_own_label_is_refused(rule: str) -> None:
    """L45: such a model learns faster, to a lower loss, and nothing."""
    model = {name: value for name, value in WORDS["model"].items() if name != "num_hidden_layers"}
    with pytest.raises(
        ConfigError, match=r"lets a token see the next one, which it has to predict; add causal: 'causal"
    ):
        config(model={**model, "layers": ["causal()", rule]})
    assert config(model={**model, "layers": ["causal()", f"causal & ({rule})"]})


@pytest.mark.parametrize("text", ["masked_lm", "masked_lmm", "maskedlm"])
def test_an_objective_given_as_text_says_how_it_is_written(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(objective=text)
    assert str(caught.value) == f"objective is {text!r}, but must be a mapping: write {{kind: masked_lm}}"


def test_a_prefix_is_not_taken_away_from_who_meant_one() -> None:
    """``causal & (causal | prefix())`` would be plain causal: the objective is what does not fit."""
    model = {name: value for name, value in WORDS["model"].items() if name != "num_hidden_layers"}
    with pytest.raises(ConfigError, match=r"take objective \{kind: prefix_lm\}.*, or add causal: 'causal"):
        config(model={**model, "layers": ["causal()", "causal | prefix()"]})
    with pytest.raises(ConfigError, match="lets a token see the next one") as caught:
        config(model={**model, "layers": ["causal()", "causal | prefix() | lookahead(1)"]})
    assert "prefix_lm" not in str(caught.value)


@pytest.mark.parametrize("device", ["banana", "cuda:77"])
def test_a_device_that_is_not_there_is_refused_before_a_folder_is_made(device: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used here"):
        train(config(device=device), tmp_path / "run")
    assert not (tmp_path / "run").exists()
