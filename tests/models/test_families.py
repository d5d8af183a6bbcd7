"""What encoders, decoders and the two together promise: who reads what, what is shared, what is refused."""

import pytest
import torch

from pellucid.batch import Batch
from pellucid.errors import ConfigError, InputError, LengthError, UnsupportedError
from pellucid.models import Decoder, Encoder, EncoderDecoder, ModelConfig, build


def config_of(**more):
    return ModelConfig(
        **{
            "vocab_size": 19,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "attention": {"num_attention_heads": 4, "num_key_value_heads": 2},
            "ffn": {"kind": "gated", "intermediate_size": 24},
            **more,
        }
    )


def model_of(**more):
    return build(config_of(**more), dtype=torch.float64)


PAIRS = Batch.from_pairs([[5, 8, 2, 9], [4, 4]], [[3, 1, 6], [7]])


def test_each_family_is_a_class_of_its_own():
    assert type(model_of()) is Decoder
    assert type(model_of(family="encoder")) is Encoder
    assert type(model_of(family="encoder_decoder")) is EncoderDecoder


def test_rules_and_heads_follow_from_the_family_and_are_written_out():
    encoder, both = config_of(family="encoder"), config_of(family="encoder_decoder")
    assert encoder.layers == ("full()",) * 2
    assert encoder.head.kind == "masked_lm"
    assert both.layers == ("causal()",) * 2
    assert both.encoder.layers == ("full()",) * 2
    assert both.cross_attention.num_key_value_heads == 2
    assert ModelConfig.from_mapping(both.model_dump(mode="json")) == both


def test_an_encoder_takes_from_its_decoder_what_it_does_not_say_itself():
    config = config_of(
        family="encoder_decoder",
        position={"kind": "relative_bias", "num_buckets": 8},
        norm={"kind": "layer_norm", "eps": 1e-3},
        encoder={"num_hidden_layers": 3, "ffn": {"kind": "dense", "intermediate_size": 8}},
    )
    assert len(config.encoder.layers) == 3
    assert config.encoder.norm == config.norm
    assert config.encoder.ffn.kind == "dense"
    assert (config.position.bidirectional, config.encoder.position.bidirectional) == (False, True)


def test_first_and_last_tokens_of_the_source_reach_every_target_token():
    """B14, B59: cross-attention is neither causal nor windowed, whatever the decoder's own layers are."""
    model = model_of(family="encoder_decoder", rule="causal & window(2)", encoder={"rule": "full & window(2)"})
    plain = model(PAIRS).logits
    for slot in range(4):
        changed = PAIRS.source.tokens.clone()
        changed[0, slot] = 11
        moved = model(Batch.from_pairs([changed[0].tolist(), [4, 4]], [[3, 1, 6], [7]])).logits
        assert bool((moved[0] != plain[0]).any(-1).all())
        assert torch.equal(moved[1], plain[1])


def test_packed_pairs_read_their_own_source():
    model = model_of(family="encoder_decoder")
    packed = model(Batch.from_pairs([[5, 8, 2, 9], [4, 4]], [[3, 1, 6], [7]], packed=True)).logits[0]
    apart = model(PAIRS).logits
    torch.testing.assert_close(packed[:3], apart[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(packed[3], apart[1, 0], rtol=1e-10, atol=1e-10)


def test_the_source_comes_once_and_the_cache_remembers_it():
    model = model_of(family="encoder_decoder")
    whole = model(PAIRS).logits
    cache = model.new_cache(2, 4)
    first = model(Batch.from_pairs([[5, 8, 2, 9], [4, 4]], [[3], [7]]), cache=cache).logits
    second = model(Batch.from_rows([[1, 6], []]), cache=cache).logits
    torch.testing.assert_close(torch.cat([first, second], 1)[0], whole[0], rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match="has a source already"):
        model(Batch.from_pairs([[5], [4]], [[3], [7]]), cache=cache)


def test_sources_where_none_are_read_and_none_where_they_are():
    with pytest.raises(InputError, match="Decoder reads none"):
        model_of()(PAIRS)
    with pytest.raises(InputError, match="has no source to read"):
        model_of(family="encoder_decoder")(Batch.from_rows([[5]]))
    with pytest.raises(UnsupportedError, match="has no cache"):
        model_of(family="encoder")(Batch.from_rows([[5]]), cache=model_of().new_cache(1, 4))


def test_a_memory_of_another_size_needs_a_table_of_its_own():
    with pytest.raises(ConfigError, match=r"encoder\.hidden_size is 24 and hidden_size 16"):
        config_of(family="encoder_decoder", encoder={"hidden_size": 24})
    model = model_of(family="encoder_decoder", encoder={"hidden_size": 24}, source_vocab_size=11)
    assert model.encoder.embed_tokens.weight.shape == (11, 24)
    assert model(PAIRS).logits.shape == (2, 3, 19)


def test_three_ways_tied():
    model = model_of(family="encoder_decoder")
    assert model.encoder.embed_tokens.weight is model.embed_tokens.weight is model.lm_head.weight
    apart = model_of(family="encoder_decoder", source_vocab_size=19, tie_word_embeddings=False)
    assert (
        len({id(w) for w in (apart.encoder.embed_tokens.weight, apart.embed_tokens.weight, apart.lm_head.weight)}) == 3
    )


def test_layers_may_be_one_layer():
    shared = [{"rule": "causal"}, {"rule": "causal", "same_as": 0}, {"rule": "causal", "same_as": 0}]
    model, single = model_of(layers=shared, num_hidden_layers=3), model_of(num_hidden_layers=1)
    count = [sum(p.numel() for p in m.parameters()) for m in (model, single)]
    assert count[0] == count[1]
    assert model.layers[2] is model.layers[0]
    for weights in (model, single):
        weights.double()
    single.load_state_dict(model.state_dict(), strict=False)
    x = Batch.from_rows([[5, 8, 2]])
    one = single(x, want="hidden").hidden
    assert not torch.allclose(model(x, want="hidden").hidden, one)  # three times through it is not once
    for odd in ([{"rule": "causal", "same_as": 0}], [{"rule": "causal"}, {"rule": "causal & window(2)", "same_as": 0}]):
        with pytest.raises(ConfigError, match=r"same_as|the same as"):
            config_of(layers=odd, num_hidden_layers=len(odd))


def test_factorised_embeddings_lead_in_and_out():
    model = model_of(embedding_size=6)
    assert model.embed_tokens.weight.shape == (19, 6)
    assert model.embed_project.weight.shape == (16, 6)
    assert model.lm_head.project.weight.shape == (6, 16)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model(Batch.from_rows([[5, 8]])).logits.shape == (1, 2, 19)


def test_embeddings_are_multiplied_and_the_root_is_written_out():
    config = config_of(embedding_multiplier="sqrt", position={"kind": "none"})
    assert config.embedding_multiplier == 4.0
    model = build(config, dtype=torch.float64)
    batch = Batch.from_rows([[5, 8]])
    entered = model.embed(batch, batch.coordinates())
    torch.testing.assert_close(entered, 4 * model.embed_tokens.weight[[5, 8]][None])


@pytest.mark.parametrize("embedding_norm", [False, True])
@pytest.mark.parametrize("embedding_size", [None, 6])
def test_nan_in_the_row_of_the_padding_id_reaches_nothing(embedding_norm, embedding_size):
    """Outputs, and the gradients of norms and matrices on entry, with a norm there and without."""
    model = model_of(
        family="encoder", embedding_norm=embedding_norm, embedding_size=embedding_size, norm={"kind": "layer_norm"}
    )
    batch = Batch.from_rows([[5, 8, 2], [7]])
    labelled = batch.with_labels(torch.where(batch.segments != 0, batch.tokens, -100))
    want = model(labelled, want="loss").loss.total
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.embed_tokens.weight[0] = torch.nan
    got = model(labelled, want="loss").loss.total
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    got.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is None or bool(weight.grad.isfinite().all()), name


def test_types_add_to_content_and_position():
    """L21."""
    model = model_of(family="encoder", type_vocab_size=2)
    batch = Batch.from_rows([[5, 8, 2, 9]])
    typed = Batch(batch.tokens, batch.positions, batch.segments, types=torch.tensor([[0, 0, 1, 1]]))
    entered, plain = (model.embed(b, b.coordinates()) for b in (typed, batch))
    difference = model.token_types.weight[1] - model.token_types.weight[0]
    torch.testing.assert_close(entered - plain, torch.stack([0 * difference] * 2 + [difference] * 2)[None])
    assert not torch.equal(model(typed).hidden, model(batch).hidden)
    with pytest.raises(InputError, match="no type_vocab_size"):
        model_of(family="encoder")(typed)


def test_a_document_past_the_limit_is_refused_with_a_cache_too():
    model = model_of(max_position_embeddings=4)
    assert model.max_length == 4
    with pytest.raises(LengthError, match="5 tokens, but max_position_embeddings is 4"):
        model(Batch.from_rows([[5, 8, 2, 9, 1]]))
    cache = model.new_cache(1, 8)
    model(Batch.from_rows([[5, 8, 2]]), cache=cache)
    with pytest.raises(LengthError, match="5 tokens"):
        model(Batch.from_rows([[9, 1]]), cache=cache)
    model(Batch.from_rows([[9]]), cache=cache)
    assert cache.length == 4


def test_a_length_that_the_host_does_not_know_is_not_asked_for(monkeypatch):
    """As while a compiler looks on: a table's own end is all that remains."""
    monkeypatch.setattr("pellucid.visibility.Coordinates.read_layout", lambda _: None)
    batch = Batch.from_rows([[1, 2, 3, 4, 5]])
    queries, keys = model_of(max_position_embeddings=4).resolve_coordinates(batch, None)
    assert queries is keys
    assert queries.shape == (1, 5)


def test_a_float32_stream_in_a_bfloat16_model():
    """Small branches are not lost in a large stream; in float64 the stream stays float64."""
    config = config_of(residual_dtype="float32")
    narrow = build(config, dtype=torch.bfloat16)
    seen = []
    narrow.layers[0].register_forward_hook(lambda *a: seen.append(a[2].dtype))
    narrow(Batch.from_rows([[5, 8, 2]]))
    assert seen == [torch.float32]
    exact = build(config, dtype=torch.float64)
    plain = build(config_of(), dtype=torch.float64)
    batch = Batch.from_rows([[5, 8, 2]])
    assert torch.equal(exact(batch).logits, plain(batch).logits)


def test_encoders_without_positions_do_not_care_about_order():
    """L07: with ``NoPosition`` the outputs move with the tokens."""
    model = model_of(family="encoder", position={"kind": "none"})
    row, order = [5, 8, 2, 9, 1], [3, 0, 4, 1, 2]
    plain = model(Batch.from_rows([row])).logits[0]
    moved = model(Batch.from_rows([[row[i] for i in order]])).logits[0]
    torch.testing.assert_close(moved, plain[order], rtol=1e-10, atol=1e-10)


WITHOUT = {"layers": [{"rule": "causal", "position": {"kind": "none"}}], "num_hidden_layers": 1}
TOO_FEW = {
    "kind": "longrope",
    "short_factor": [1.0],
    "long_factor": [1.0],
    "original_max_position_embeddings": 4,
    "attention_factor": 1.0,
}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"encoder": {"num_hidden_layers": 1}}, "encoder belongs to family 'encoder_decoder'"),
        ({"family": "encoder", "source_vocab_size": 9}, "source_vocab_size belongs to family"),
        ({"family": "encoder_decoder", "norm_placement": "parallel"}, "no place for cross-attention"),
        ({"norm_placement": "sandwich", "residual_init": "zero"}, "a norm behind each branch undoes it"),
        ({"norm_placement": "deep", "initializer_range": 0.02}, "Xavier's scale"),
        ({"position": {"kind": "learned", "max_position_embeddings": 8}, **WITHOUT}, "is added on entry"),
        ({"attention": {"num_attention_heads": 4, "head_dim": 3}}, "rope"),
        ({"position": {"kind": "rope", "rotary_dim": 6}}, "rotary_dim is 6"),
        ({"position": {"kind": "rope", "scaling": TOO_FEW}}, "one divisor a pair"),
        ({"position": {"kind": "relative_bias", "num_buckets": 3}}, None),
        ({"position": {"kind": "relative_bias", "num_buckets": 1}}, "num_buckets is 1"),
    ],
)  # fmt: skip
def test_words_that_cannot_stand_together(more, said):
    if said is None:
        assert build(config_of(**more))
        return
    with pytest.raises(ConfigError, match=said):
        config_of(**more)


def test_a_first_pass_that_fails_can_be_tried_again_with_another_source():
    model = model_of(family="encoder_decoder", max_position_embeddings=4)
    cache = model.new_cache(1, 8)
    with pytest.raises(LengthError, match="5 tokens"):
        model(Batch.from_pairs([[5, 8]], [[1, 2, 3, 4, 5]]), cache=cache)
    pair = Batch.from_pairs([[4, 4, 9]], [[1, 2]])
    torch.testing.assert_close(model(pair, cache=cache).logits, model(pair).logits, rtol=1e-10, atol=1e-10)
    cache.crop(0)
    other = Batch.from_pairs([[7]], [[1, 2]])
    torch.testing.assert_close(model(other, cache=cache).logits, model(other).logits, rtol=1e-10, atol=1e-10)


def test_a_cache_of_another_depth_is_refused():
    model, other = model_of(), model_of(num_hidden_layers=3)
    for wrong in (other.new_cache(1, 4), model_of(num_hidden_layers=1).new_cache(1, 4)):
        with pytest.raises(InputError, match="layers, but the model 2"):
            model(Batch.from_rows([[5]]), cache=wrong)


def test_what_pools_a_whole_document_goes_on_from_no_cache():
    for pooling in ("mean", "first"):
        head = {"kind": "sequence_classification", "num_labels": 3, "pooling": pooling}
        model = model_of(head=head)
        cache = model.new_cache(1, 4)
        model(Batch.from_rows([[5, 8]]), cache=cache)
        with pytest.raises(UnsupportedError, match="pools all of it"):
            model(Batch.from_rows([[2]]), cache=cache)
        assert model(Batch.from_rows([[2]]), cache=cache, want="hidden").hidden.shape == (1, 1, 16)
    model = model_of(head={"kind": "sequence_classification", "num_labels": 3})
    cache = model.new_cache(1, 4)
    model(Batch.from_rows([[5, 8]]), cache=cache)
    last = model(Batch.from_rows([[2]]), cache=cache).logits
    torch.testing.assert_close(last, model(Batch.from_rows([[5, 8, 2]])).logits, rtol=1e-10, atol=1e-10)


def test_a_shared_table_begins_as_the_decoders():
    model = model_of(family="encoder_decoder", initializer_range=0.5, encoder={"initializer_range": 0.001})
    assert 0.3 < float(model.embed_tokens.weight.detach().std()) < 0.7
    assert float(model.encoder.layers[0].attention.q_proj.weight.detach().std()) < 0.01


def test_a_written_multiplier_is_no_root():
    both = {"family": "encoder_decoder", "source_vocab_size": 9}
    written = config_of(
        **both, embedding_multiplier=4.0, encoder={"hidden_size": 64, "attention": {"num_attention_heads": 4}}
    )
    by_root = config_of(
        **both, embedding_multiplier="sqrt", encoder={"hidden_size": 64, "attention": {"num_attention_heads": 4}}
    )
    assert (written.embedding_multiplier, written.encoder.embedding_multiplier) == (4.0, 4.0)
    assert (by_root.embedding_multiplier, by_root.encoder.embedding_multiplier) == (4.0, 8.0)


def test_sizes_that_would_take_for_ever_are_refused_at_once():
    with pytest.raises(ConfigError, match="num_buckets is 16777216"):
        config_of(position={"kind": "relative_bias", "num_buckets": 1 << 24})
    with pytest.raises(ConfigError, match="num_attention_heads is 16777216"):
        config_of(attention={"num_attention_heads": 1 << 24, "head_dim": 1}, position={"kind": "alibi"})


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_layers_run_twice_where_asked_in_training_without_a_cache(asked, training, monkeypatch):
    runs = []

    def checkpoint(block, *arguments, use_reentrant, **told):
        runs.append(block)
        return block(*arguments, **told)

    monkeypatch.setattr("pellucid.models.model.checkpoint", checkpoint)
    model = model_of().train(training)
    model.gradient_checkpointing = asked
    batch = Batch.from_rows([[1, 2, 3]])
    model(batch, cache=model.new_cache(1, 8))
    assert not runs
    model(batch)
    assert runs == (list(model.layers) if asked and training else [])


def test_routing_is_told_by_the_layers_that_route():
    expert = {"kind": "gated", "intermediate_size": 24}
    routed = {
        "kind": "moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert": expert,
        "router": {"kind": "softmax"},
    }
    layers = ["causal", {"rule": "causal", "ffn": routed}, {"rule": "causal", "ffn": routed}]
    model = build(config_of(num_hidden_layers=None, layers=layers), dtype=torch.float64)
    batch = Batch.from_rows([[1, 2, 3]])
    assert len(model(batch).routing) == 2
    assert model_of()(batch).routing == ()
