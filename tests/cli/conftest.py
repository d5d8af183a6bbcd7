"""A small checkpoint on disk, made once."""

from pathlib import Path

import pytest

from pellucid.checkpoints import save
from pellucid.data.tokenizer import Tokenizer
from pellucid.models.build import build
from pellucid.models.config import ModelConfig


def small_config(vocab_size: int, **changes: object) -> ModelConfig:
    return ModelConfig.from_mapping(
        {
            "vocab_size": vocab_size,
            "hidden_size": 16,
            "layers": ["causal & window(4)", "causal", "causal & window(4)"],
            "attention": {"num_attention_heads": 2},
            "ffn": {"kind": "gated", "intermediate_size": 24},
            "position": {"kind": "learned", "max_position_embeddings": 48},
            **changes,
        }
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "small"
    tokenizer = Tokenizer.train(["def f(x): return x\n" * 40], vocab_size=280)
    save(folder, build(small_config(tokenizer.vocab_size), seed=1), tokenizer=tokenizer)
    return folder


@pytest.fixture(scope="session")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "bare"
    save(folder, build(small_config(40), seed=1))
    return folder
