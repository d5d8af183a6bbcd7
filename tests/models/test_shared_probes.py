"""The shared probes over a spread of configs: family × attention × position × norm × ffn × rules by layer × head."""

import pytest
import torch

from helpers import shared_probes as probes
from helpers.shared_probes import ROWS
from helpers.spread import SPREAD, spread_config, spread_model
from helpers.tiny import assert_agree, tiny_model
from pellucid.configfile import to_yaml
from pellucid.configfile.yaml import load_yaml
from pellucid.data import Batch, objectives
from pellucid.errors import UnsupportedError
from pellucid.models import Decoder, EncoderDecoder, ModelConfig

OF_DOCUMENTS = ("sequence_classification", "regression", "sentence_embedding")
pytestmark = pytest.mark.usefixtures("our_checks_only")  # many whole models
each = pytest.mark.parametrize("words", SPREAD.values(), ids=SPREAD)


def family(words):
    return words.get("family", "decoder")


def those(wanted):
    found = {name: words for name, words in SPREAD.items() if wanted(words)}
    assert len(found) >= 3
    return pytest.mark.parametrize("words", found.values(), ids=found)


def test_the_spread_is_wide():
    configs = [spread_config(words) for words in SPREAD.values()]
    assert len(configs) >= 30
    stacks = [stack for config in configs for stack in (config, *([config.encoder] if config.encoder else []))]
    assert {config.family for config in configs} == {"encoder", "decoder", "encoder_decoder"}
    assert len({config.norm_placement for config in configs}) == 7
    assert len({config.head.kind for config in configs}) == 7
    assert {stack.attention.kind for stack in stacks} == {"grouped", "latent"}
    assert len({(layer.ffn or stack.ffn).kind for stack in stacks for layer in stack.each_layer}) == 3
    positions = {layer.position or stack.position for stack in stacks for layer in stack.each_layer}
    assert len({position.kind for position in positions}) == 6
    assert len({getattr(position, "scaling", None) and position.scaling.kind for position in positions}) == 7
    assert len({stack.norm.kind for stack in stacks}) == 4
    assert len({rule.describe() for stack in stacks for rule in stack.rules}) >= 8


@each
def test_configs_come_back_from_their_text(words):
    config = spread_config(words)
    assert ModelConfig.from_mapping(load_yaml(to_yaml(config), "text")) == config


@each
def test_p_causal(words):
    probes.p_causal(spread_model(words))


@each
def test_p_causal_by_gradient(words):
    probes.p_causal_by_gradient(spread_model(words))


@each
def test_p_pad(words):
    probes.p_pad(spread_model(words))


@those(
    lambda words: (
        "head" in words and words["head"]["kind"] in ("sequence_classification", "regression", "sentence_embedding")
    )
)
def test_p_pad_of_documents(words):
    probes.p_pad_documents(spread_model(words))


@those(lambda words: family(words) != "encoder")
def test_p_cache(words):
    model = spread_model(words)
    assert isinstance(model, Decoder)
    probes.p_cache(model)


@each
def test_p_pack(words):
    probes.p_pack(spread_model(words))


@each
def test_p_batch(words):
    probes.p_batch(spread_model(words, torch.float32))


@each
def test_p_sweep(words):
    probes.p_sweep(spread_model(words))


@each
def test_modes_agree(words):
    """B32."""
    probes.p_modes(spread_model(words))


@those(lambda words: family(words) == "encoder_decoder")
def test_the_whole_source_is_read(words):
    model = spread_model(words)
    assert isinstance(model, EncoderDecoder)
    probes.p_source(model)


def alone(model, rows):
    return [model(Batch.from_rows([row])).logits[0] for row in rows]


def test_all_losses_in_one_pass_equal_prefix_by_prefix():
    """L26: shifting trains every position at once, and gives what feeding each prefix alone gives."""
    model = tiny_model()
    row = ROWS[1]
    whole = model(objectives.causal(Batch.from_rows([row])), want="loss").loss
    one_by_one = 0.0
    for end in range(1, len(row)):
        logits = model(Batch.from_rows([row[:end]])).logits[0, -1]
        one_by_one -= logits.log_softmax(-1)[row[end]].item()
    assert whole.total.item() == pytest.approx(one_by_one, abs=1e-10)
    assert whole.count.item() == len(row) - 1


def test_a_prefix_rule_needs_its_whole_prefix_at_once():
    """What an earlier token may see ahead must be there when it is computed, or the cache refuses."""
    model = tiny_model(rule="causal | prefix(4)")
    row = ROWS[1]
    expected = alone(model, [row])[0]
    cache = model.new_cache(1, 9)
    logits = [model(Batch.from_rows([part]), cache=cache).logits[0] for part in (row[:4], row[4:6], row[6:])]
    assert_agree(torch.cat(logits), expected)
    cache = model.new_cache(1, 9)
    model(Batch.from_rows([row[:3]]), cache=cache)
    with pytest.raises(UnsupportedError, match=r"causal\(\) \| prefix\(4\) lets earlier tokens see later ones"):
        model(Batch.from_rows([row[3:]]), cache=cache)
    assert cache.length == 3
