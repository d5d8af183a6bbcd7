"""Statements about Transformers, each measured; ``docs/lessons.md`` says what was seen."""

import math

import pytest
import torch
from torch.nn import functional as F

from helpers.tiny import tiny_model
from pellucid.batch import Batch
from pellucid.models import build, presets
from pellucid.nn import AttentionOptions, probabilities
from pellucid.nn.moe import GatedExperts, MoE, SoftmaxRouter
from pellucid.nn.pooling import pooled
from pellucid.nn.positions import RelativeBias
from pellucid.training import TrainConfig
from pellucid.visibility import Coordinates, full


@pytest.mark.parametrize("size", [16, 64, 256, 512])
def test_l02_dividing_by_the_root_keeps_scores_near_1_and_softmax_open(size):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 64, 4, size, dtype=torch.float64)
    row = Coordinates.range(64)
    scores = torch.einsum("btnh,bsnh->bnts", q, k)
    assert (scores * size**-0.5).var().item() == pytest.approx(1.0, rel=0.1)
    assert scores.var().item() == pytest.approx(size, rel=0.1)
    entropies = []
    for scale in (size**-0.5, 1.0):
        weights = probabilities(q, k, rule=full(), q_coords=row, k_coords=row, options=AttentionOptions(scale=scale))
        entropies.append(float(torch.special.entr(weights).sum(-1).mean()))
    scaled, raw = entropies
    assert scaled == pytest.approx(math.log(64) - 0.5, abs=0.1)  # of Gaussian scores of variance 1
    assert raw < (2.0 if size == 16 else 1.0 if size == 64 else 0.5)


def test_l07_without_positions_order_does_not_matter_and_with_them_it_does():
    row, order = [5, 8, 2, 9, 1], [3, 0, 4, 1, 2]
    batches = Batch.from_rows([row]), Batch.from_rows([[row[i] for i in order]])
    for position, moves in (({"kind": "none"}, False), ({"kind": "sinusoidal"}, True), ({"kind": "rope"}, True)):
        model = tiny_model(family="encoder", position=position)
        plain, moved = (model(batch).logits[0] for batch in batches)
        assert torch.allclose(moved, plain[order], rtol=1e-10, atol=1e-10) != moves


def test_l10_each_token_is_routed_by_itself():
    torch.manual_seed(0)
    router = SoftmaxRouter(8, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    layer = MoE(router=router, experts=GatedExperts(8, 12, num_experts=4)).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    changed = x.clone()
    changed[0, 2] += 1
    moved = ((layer(changed) - layer(x)).abs() > 1e-12).any(-1)[0]
    assert moved.tolist() == [False, False, True, False, False, False]
    assert len({tuple(chosen) for chosen in layer.route(x).experts.tolist()}) > 1


def gradient_by_depth(placement, layers):
    """The norm of each layer's first gradient (its query matrix), before training."""
    model = tiny_model(num_hidden_layers=layers, norm_placement=placement, dtype=torch.float32)
    dice = torch.Generator().manual_seed(0)
    batch = Batch.from_rows(torch.randint(0, 50, (4, 16), generator=dice).tolist())
    model(batch.with_labels(batch.tokens), want="loss").loss.mean().backward()
    return [float(block.ffn.down_proj.weight.grad.norm()) for block in model.layers]


def test_l12_gradients_by_depth():
    """The first layer's grow with depth under post-norm, here over a hundredfold; a pre-norm stream carries them."""
    pre, post = ({layers: gradient_by_depth(name, layers) for layers in (2, 12, 48)} for name in ("pre", "post"))
    assert post[2][0] < post[12][0] < post[48][0]
    assert post[48][0] > 20 * post[48][-1]
    assert pre[48][0] < 10 * pre[2][0]
    assert max(pre[48]) < 20 * min(pre[48])


def test_l17_a_relative_bias_knows_signed_distance_alone():
    bias = RelativeBias(2, bidirectional=True, num_buckets=8, max_distance=16)
    torch.nn.init.normal_(bias.weight)
    row = Coordinates.range(9)
    found = bias(row, row)[0]
    for ahead in (-3, 0, 2):
        assert len(found.diagonal(ahead, 1, 2).unique(dim=1).T) == 1
    assert not torch.equal(found[:, 0, 2], found[:, 2, 0])


def test_l20_a_zero_row_does_not_stay_zero():
    model = tiny_model(family="encoder", position={"kind": "sinusoidal"})
    with torch.no_grad():
        model.embed_tokens.weight[0] = 0
    batch = Batch.from_rows([[5, 8, 2, 9], [7]])
    places = batch.coordinates()
    raw = model.positions(model.embed_tokens(batch.tokens), places)
    assert bool(raw[1, 1:].abs().sum() > 0)
    assert not model.embedded(batch, places)[1, 1:].any()


def test_l21_types_add_and_hide_nothing():
    model = tiny_model(family="encoder", type_vocab_size=2)
    batch = Batch.from_rows([[5, 8, 2, 9]])
    typed = Batch(batch.tokens, batch.positions, batch.segments, types=torch.tensor([[0, 0, 1, 1]]))
    assert not torch.equal(model(typed).logits, model(batch).logits)
    changed = Batch(torch.tensor([[5, 8, 2, 1]]), batch.positions, batch.segments, types=typed.types)
    assert bool((model(changed).logits != model(typed).logits).any(-1).all())  # both sentences are seen by both


def test_l22_three_families_let_information_flow_in_three_ways():
    """What a change of each token moves: all, what follows, and in the third both, through the memory."""
    row, far = [5, 8, 2, 9], 11

    def moved(model, make):
        plain = model(make(row)).logits[0]
        return [
            [bool(x) for x in (model(make([*row[:j], far, *row[j + 1 :]])).logits[0] != plain).any(-1)]
            for j in range(4)
        ]

    encoder = moved(tiny_model(family="encoder"), lambda r: Batch.from_rows([r]))
    decoder = moved(tiny_model(), lambda r: Batch.from_rows([r]))
    both = tiny_model(family="encoder_decoder")
    source, target = (moved(both, make) for make in (lambda r: Batch.from_pairs([r], [[3, 1]]),
                                                     lambda r: Batch.from_pairs([[3, 1]], [r])))  # fmt: skip
    assert encoder == [[True] * 4] * 4
    assert decoder == [[t >= j for t in range(4)] for j in range(4)]
    assert source == [[True] * 2] * 4
    assert target == decoder


def test_l23_families_differ_in_more_than_the_mask():
    """Objective, head, positions and tokenizer follow the family, and what does not belong to it is refused."""
    words = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2}
    words |= {"attention": {"num_attention_heads": 2}, "ffn": {"kind": "dense", "intermediate_size": 24}}
    usual = {}
    for family in ("encoder", "decoder", "encoder_decoder"):
        model = {**words, "family": family, "position": {"kind": "relative_bias"}}
        run = TrainConfig(model=model, budget={"kind": "steps", "steps": 1}, data={"source": "x.jsonl"})
        usual[family] = (run.objective.kind, run.model.head.kind, run.model.position.bidirectional)
    assert usual == {
        "encoder": ("masked_lm", "masked_lm", True),
        "decoder": ("next_token", "language_model", False),
        "encoder_decoder": ("sequence_to_sequence", "language_model", False),
    }


def test_l25_the_model_of_2017_as_it_was_written():
    """Post-norm, sinusoids, one table three times, embeddings times √d, smoothing 0.1, inverse square root."""
    config = presets.preset("transformer-base-2017", ["vocab_size=50", "hidden_size=16", "num_hidden_layers=2"])
    model = build(config, dtype=torch.float64)
    assert config.norm_placement == "post"
    assert config.embedding_multiplier == 4.0
    assert model.encoder.embed_tokens.weight is model.embed_tokens.weight is model.lm_head.weight
    batch = Batch.from_rows([[5, 8]])
    entered = model.encoder.embedded(batch, batch.coordinates())
    angles = torch.tensor([[0.0], [1.0]], dtype=torch.float64) * 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    table = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)
    torch.testing.assert_close(entered[0], 4 * model.embed_tokens.weight[[5, 8]] + table)


def test_l46_means_and_losses_leave_pads_out():
    model = tiny_model("learned-dense-ln", family="encoder")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
    alone, padded = Batch.from_rows([[5, 8, 2]]), Batch.from_rows([[5, 8, 2], [9, 9, 9, 9, 9]])
    hidden = model(padded, want="hidden").hidden
    assert bool(hidden[0, 3:].abs().sum() > 0)  # pads hold values after all
    mean = pooled(hidden, padded.coordinates(), "mean")[0]
    torch.testing.assert_close(mean, model(alone, want="hidden").hidden[0].mean(0), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(hidden[0].mean(0), mean)


def test_l05_heads_can_be_taken_out_one_by_one():
    """What a model loses with each head is a number a head, and no two need be alike."""
    model = tiny_model(dtype=torch.float32, hidden_size=32)
    dice = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    model.train()
    for _ in range(60):  # a row of eight tokens, and the same again: something for heads to look back at
        half = torch.randint(0, 50, (16, 8), generator=dice)
        batch = Batch.from_rows(torch.cat([half, half], 1).tolist())
        labels = F.pad(batch.tokens[:, 1:], (0, 1), value=-100)
        model(batch.with_labels(labels), want="loss").loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().requires_grad_(False)
    whole = float(model(batch.with_labels(labels), want="loss").loss.mean())
    lost = []
    for block in model.layers:
        for head in range(4):
            matrix = block.attention.o_proj.weight
            kept = matrix.detach().clone()
            with torch.no_grad():
                matrix[:, head * 8 : head * 8 + 8] = 0
                lost.append(float(model(batch.with_labels(labels), want="loss").loss.mean()) - whole)
                matrix.copy_(kept)
    assert len(set(lost)) == 8
    assert max(lost) > 2 * sorted(lost)[4]
