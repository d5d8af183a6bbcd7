"""Configs drawn at random: each comes back from its text, and its model keeps what all models promise."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from helpers import shared_probes as probes
from helpers.drawn_configs import configs
from helpers.spread import speaks, spread_model
from pellucid.audits import audit
from pellucid.configfile import to_yaml
from pellucid.configfile.yaml import load_yaml
from pellucid.models import Decoder, EncoderDecoder, ModelConfig, build

drawn = given(configs())


def many(count):
    return settings(max_examples=count, suppress_health_check=list(HealthCheck))


@drawn
@many(40)
def test_configs_come_back_from_their_text_and_build(words):
    config = ModelConfig(**words)
    assert ModelConfig.from_mapping(load_yaml(to_yaml(config), "text")) == config
    assert ModelConfig(**config.model_dump(mode="json")) == config
    model = build(config, device="meta")
    assert len(model.layers) == len(config.layers)


@pytest.mark.slow
@drawn
@many(80)
def test_shared_probes(words):
    torch.manual_seed(0)
    model = spread_model(words)
    probes.p_causal(model)
    probes.p_causal_by_gradient(model)
    probes.p_pad(model)
    probes.p_pack(model)
    probes.p_sweep(model)
    probes.p_modes(model)
    probes.p_batch(spread_model(words, torch.float32))
    if not speaks(model):
        probes.p_pad_documents(model)
    if isinstance(model, Decoder):
        probes.p_cache(model)
    if isinstance(model, EncoderDecoder):
        probes.p_source(model)


@pytest.mark.slow
@pytest.mark.usefixtures("our_checks_only")
@drawn
@many(20)
def test_audits_pass(words):
    report = audit(probe=spread_model(words).probe(), checks=["future", "packing", "padding", "cache"])
    assert "leak" not in report.verdicts.values(), report
    assert "error" not in report.verdicts.values(), report
    assert report.passed
