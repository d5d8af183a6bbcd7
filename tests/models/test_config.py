"""Configs say everything, refuse what they do not know, and come back from their own text."""

import pytest

from helpers.tiny import KINDS, tiny_config
from pellucid.errors import ConfigError
from pellucid.models import ModelConfig


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind):
    config = tiny_config(kind)
    assert ModelConfig(**config.model_dump(mode="json")) == config


def test_short_forms_are_written_out():
    config = tiny_config(num_hidden_layers=3, rule="window(4) & causal", attention={"num_attention_heads": 4})
    assert config.layers == ("window(4) & causal()",) * 3
    assert (config.attention.num_key_value_heads, config.attention.head_dim) == (4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden_size": 3}, "hidden_size"),
        ({"attention": {"num_attention_heads": 4, "qknorm": True}}, "qk_norm"),
        ({"attention": {"num_attention_heads": 5}}, "hidden_size 32 does not divide by 5"),
        ({"attention": {"num_attention_heads": 4, "num_key_value_heads": 3}}, "4 query heads cannot share 3"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"layers": ["causal", "causl"], "num_hidden_layers": None}, "no rule 'causl'"),
        ({"layers": ["causal"], "num_hidden_layers": 2}, "layers lists 1"),
        ({"num_hidden_layers": 0}, "from 1 to"),
        ({"num_hidden_layers": True}, "from 1 to"),
        ({"num_hidden_layers": 10**12}, "from 1 to"),
        ({"norm_placement": "post", "residual_init": "zero"}, "belong to 'pre'"),
        ({"norm_placement": "middle"}, "pre"),
        ({"attention": {"num_attention_heads": 4, "head_dim": 7}}, "make it even"),
        ({"ffn": {"kind": "gatd", "intermediate_size": 8}}, "gated"),
        ({"position": {"kind": "rope", "theta": float("nan")}}, "theta"),
        ({"dropout": {"residual": 1.0}}, "residual"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
    ],
)
def test_wrong_values_are_named_with_the_way_out(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        tiny_config(**changes)
    assert "\n" not in str(caught.value)


def test_configs_are_frozen():
    config = tiny_config()
    with pytest.raises((ConfigError, ValueError), match="frozen"):
        config.hidden_size = 3
