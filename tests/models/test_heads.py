"""What models say about tokens and documents, and the sums that they are trained by."""

import math

import pytest
import torch
from torch.nn import functional as F

from pellucid.batch import IGNORED, Batch
from pellucid.errors import ConfigError, InputError, ShapeError
from pellucid.models import ModelConfig, build

ROWS = [[5, 8, 2, 9, 1], [7, 3, 4], [6]]


def model_of(head=None, **more):
    config = {
        "family": "encoder",
        "vocab_size": 17,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "attention": {"num_attention_heads": 2},
        "ffn": {"kind": "dense", "intermediate_size": 12},
        "position": {"kind": "learned", "max_position_embeddings": 12},
        **({} if head is None else {"head": head}),
        **more,
    }
    return build(ModelConfig(**config), dtype=torch.float64)


def with_targets(batch, targets):
    return Batch(**{**vars_of(batch), "targets": torch.as_tensor(targets)})


def vars_of(batch):
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__}


LAYOUTS = [
    Batch.from_rows(ROWS),
    Batch.from_rows(ROWS, side="left", length=8),
    Batch.packed(ROWS, length=11),
]

HEADS = [
    ({"kind": "sequence_classification", "num_labels": 4}, [3, 0, 2], torch.long),
    ({"kind": "sequence_classification", "num_labels": 4, "pooling": "mean", "pooler": "tanh"}, [3, 0, 2], torch.long),
    ({"kind": "sequence_classification", "num_labels": 4, "pooling": "last"}, [3, IGNORED, 2], torch.long),
    ({"kind": "regression"}, [0.5, math.nan, -2.0], torch.float64),
    ({"kind": "regression", "num_outputs": 2, "pooling": "mean"}, [[0.5, 1], [1, 2], [-2.0, 0]], torch.float64),
    ({"kind": "span"}, [[1, 3], [IGNORED, IGNORED], [0, 0]], torch.long),
]


@pytest.mark.parametrize(("head", "targets", "dtype"), HEADS)
def test_documents_together_are_documents_alone(head, targets, dtype):
    """P-PACK and P-PAD for heads about documents: outputs, sums, counts and gradients."""
    model = model_of(head)
    alone = [
        model(with_targets(Batch.from_rows([row]), torch.tensor([target], dtype=dtype)), want="loss").loss
        for row, target in zip(ROWS, targets, strict=True)
    ]
    total, count = sum(loss.total for loss in alone), sum(int(loss.count) for loss in alone)
    total.backward()
    want = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    for batch in LAYOUTS:
        model.zero_grad()
        loss = model(with_targets(batch, torch.tensor(targets, dtype=dtype)), want="loss").loss
        assert int(loss.count) == count
        torch.testing.assert_close(loss.total, total, rtol=1e-10, atol=1e-10)
        loss.total.backward()
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weight.grad, want[name], rtol=1e-9, atol=1e-10)


def test_a_class_is_the_cross_entropy_of_its_documents_logits():
    model = model_of({"kind": "sequence_classification", "num_labels": 4})
    batch = with_targets(LAYOUTS[2], [3, 0, 2])
    logits = model(batch).logits
    assert logits.shape == (3, 4)
    want = F.cross_entropy(logits, batch.targets, reduction="sum")
    torch.testing.assert_close(model(batch, want="loss").loss.total, want)


def test_a_span_is_sought_among_the_tokens_of_its_own_document():
    model = model_of({"kind": "span"})
    batch = with_targets(LAYOUTS[2], [[1, 3], [IGNORED, IGNORED], [0, 0]])
    scores = model(batch).logits[0]
    begin = -scores[:5, 0].log_softmax(0)[1]
    end = -scores[:5, 1].log_softmax(0)[3]
    loss = model(batch, want="loss").loss
    assert int(loss.count) == 2  # the document of one token is certain, and counts
    torch.testing.assert_close(loss.total, (begin + end) / 2)
    with pytest.raises(InputError, match="an answer's end is 5, which is outside its document"):
        model(with_targets(LAYOUTS[2], [[1, 5], [0, 0], [0, 0]]), want="loss")


def test_pairs_find_each_other():
    model = model_of({"kind": "sentence_embedding", "projection_dim": 5})
    rows = [*ROWS, [3, 3]]
    vectors = model(Batch.from_rows(rows)).logits
    assert vectors.shape == (4, 5)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4, dtype=torch.float64))
    scores = (vectors @ vectors.T / 0.05).fill_diagonal_(-torch.inf)
    want = -sum(scores[i].log_softmax(0)[i ^ 1] for i in range(4))
    for batch in (Batch.from_rows(rows), Batch.packed(rows)):
        loss = model(batch, want="loss").loss
        torch.testing.assert_close(loss.total, want)
        assert int(loss.count) == 4
    with pytest.raises(InputError, match="even number of documents, not 3"):
        model(LAYOUTS[0], want="loss")


def test_each_token_gets_its_own_mark():
    model = model_of({"kind": "token_classification", "num_labels": 3})
    labels = torch.tensor([[0, 2, IGNORED, 1, 1], [1, IGNORED, 0, -100, -100], [2, -100, -100, -100, -100]])
    batch = LAYOUTS[0].with_labels(labels)
    loss = model(batch, want="loss").loss
    want = F.cross_entropy(model(batch).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert int(loss.count) == 7
    torch.testing.assert_close(loss.total, want)


def test_masked_lm_leads_through_a_dense_layer_and_ties_the_table():
    model = model_of(head_bias=True, embedding_size=6)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.lm_head.dense.weight.shape == (6, 8)
    hidden = model(LAYOUTS[0], want="hidden").hidden
    head = model.lm_head
    features = head.norm(F.gelu(head.dense(hidden)))
    torch.testing.assert_close(model(LAYOUTS[0]).logits, features @ model.embed_tokens.weight.T + head.bias)


def test_logits_are_multiplied_before_they_are_bent_and_the_loss_agrees():
    model = model_of(family="decoder", head=None, logit_multiplier=3.0, final_logit_softcapping=2.0)
    plain = model_of(family="decoder", head=None)
    batch = LAYOUTS[0]
    logits = model(batch).logits
    torch.testing.assert_close(logits, 2 * torch.tanh(3 * plain(batch).logits / 2))
    batch = batch.with_labels(torch.where(batch.segments != 0, batch.tokens, IGNORED))
    want = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    torch.testing.assert_close(model(batch, want="loss").loss.total, want)


def test_labels_are_smoothed_in_training_alone_and_never_where_nothing_counts():
    model = model_of(family="decoder", head=None)
    batch = LAYOUTS[0].with_labels(torch.where(LAYOUTS[0].positions > 0, LAYOUTS[0].tokens, IGNORED))
    plain = model(batch, want="loss").loss
    model.label_smoothing = 0.1
    assert torch.equal(model(batch, want="loss").loss.total, plain.total)
    model.train()
    smoothed = model(batch, want="loss").loss
    logits = model(batch).logits.flatten(0, 1)
    want = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(smoothed.total, want)
    assert int(smoothed.count) == int(plain.count) == 6


def test_missing_and_odd_targets_are_refused():
    model = model_of({"kind": "sequence_classification", "num_labels": 4})
    with pytest.raises(InputError, match="needs targets, one for each of the batch's 3 documents"):
        model(LAYOUTS[0], want="loss")
    with pytest.raises((InputError, ShapeError)):
        model(with_targets(LAYOUTS[0], [1, 2]), want="loss")
    with pytest.raises(InputError, match="a target is 4, but there are 4 classes"):
        model(with_targets(LAYOUTS[0], [1, 2, 4]), want="loss")
    with pytest.raises(InputError, match="a target is -1"):
        model(with_targets(LAYOUTS[0], [1, -1, 2]), want="loss")


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("decoder", {"head": {"kind": "masked_lm"}}, "head 'masked_lm' belongs to an encoder"),
        ("encoder_decoder", {"head": {"kind": "span"}}, "an encoder_decoder gives tokens"),
        ("encoder", {"head": {"kind": "span"}, "head_bias": True}, "head_bias is about tokens' logits"),
        ("encoder", {"head": {"kind": "span"}, "tie_word_embeddings": True}, "tie_word_embeddings is about"),
    ],
)
def test_heads_that_do_not_fit_are_refused(family, more, said):
    with pytest.raises(ConfigError, match=said):
        model_of(family=family, position={"kind": "rope"}, **more)
