"""A table with more or fewer rows: old ids mean what they meant."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.tiny import KINDS, tiny_model
from pellucid.batch import Batch
from pellucid.checkpoints import load, save, verify
from pellucid.errors import InputError
from pellucid.models.resize_token_embeddings import SPREAD, resize_token_embeddings

BATCH = Batch.from_rows([[4, 0, 2, 1], [3]])
HEADS = {
    "tied": {},
    "tied, with a bias": {"head_bias": True},
    "untied": {"tie_word_embeddings": False},
    "untied, with a bias": {"tie_word_embeddings": False, "head_bias": True},
}


def made(head: str, size: int, **changes: Any) -> Any:
    model = tiny_model(vocab_size=size, dtype=torch.float32, seed=3, **HEADS[head], **changes)
    if model.lm_head.bias is not None:
        with torch.no_grad():
            model.lm_head.bias.normal_()
    return model


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("old", "new"), [(7, 9), (9, 5), (7, 7), (7, 8)])
def test_old_rows_and_their_logits_stay(head: str, old: int, new: int) -> None:
    """B104."""
    model = made(head, old)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = model(BATCH).logits
    found = resize_token_embeddings(model, new)
    kept = min(old, new)

    assert found.config == model.config.model_copy(update={"vocab_size": new})
    assert (found.embed_tokens.num_embeddings, found.lm_head.out_features) == (new, new)
    for name, tensor in found.state_dict().items():
        rows = new if name.startswith(("embed_tokens", "lm_head")) else len(before[name])
        assert list(tensor.shape) == [rows, *before[name].shape[1:]]
    for name, tensor in found.state_dict().items():
        rows = kept if name.startswith(("embed_tokens", "lm_head")) else len(tensor)
        assert torch.equal(tensor[:rows], before[name][:rows]), name
    torch.testing.assert_close(found(BATCH).logits[..., :kept], logits[..., :kept], atol=1e-6, rtol=1e-6)
    assert found(BATCH).logits.shape[-1] == new
    assert (found.lm_head.weight is found.embed_tokens.weight) == ("untied" not in head)

    assert model.config.vocab_size == old  # not in place, and nothing shared
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not {t.data_ptr() for t in found.parameters()} & {t.data_ptr() for t in model.parameters()}


@pytest.mark.parametrize("head", HEADS)
def test_new_rows_are_the_mean_and_a_little_aside(head: str) -> None:
    model = made(head, 40)
    found = resize_token_embeddings(model, 1040)
    for name in ("embed_tokens", "lm_head"):
        old, new = (getattr(m, name).weight.detach().double() for m in (model, found))
        aside = (new[40:] - old.mean(0)) / (SPREAD * old.std(0, correction=0))
        assert abs(float(aside.mean())) < 0.03
        assert abs(float(aside.std()) - 1) < 0.03
        assert len(new.unique(dim=0)) == 1040
    if found.lm_head.bias is not None:
        mean = model.lm_head.bias.double().mean().float()
        assert torch.equal(found.lm_head.bias[40:], mean.expand(1000))
    old, new = found(BATCH).logits.detach().split([40, 1000], -1)
    assert float((new - old.mean(-1, keepdim=True)).abs().max()) < 0.2 * float(old.std())


def test_new_rows_follow_from_the_seed_alone() -> None:
    model = tiny_model(tie_word_embeddings=False)
    state = torch.get_rng_state()
    a, b, c = (
        resize_token_embeddings(model, 60),
        resize_token_embeddings(model, 60),
        resize_token_embeddings(model, 60, seed=1),
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a.embed_tokens.weight, b.embed_tokens.weight)
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.embed_tokens.weight, c.embed_tokens.weight)


def test_everything_else_stays_as_it_was() -> None:
    """Type, mode, frozen parts and kernel; and it learns as one parameter."""
    model = tiny_model(dtype=torch.bfloat16, backend="reference").train()
    model.layers[0].eval()
    model.embed_tokens.weight.requires_grad_(False)
    found = resize_token_embeddings(model, 55)
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
    assert [m.training for m in found.modules()] == [m.training for m in model.modules()]
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in model.parameters()]
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert found.layers[0].attention.options == model.layers[0].attention.options


@pytest.mark.parametrize("kind", KINDS)
def test_a_resized_model_is_a_whole_checkpoint(tmp_path: Any, kind: str) -> None:
    found = resize_token_embeddings(tiny_model(kind, hidden_size=16, dtype=torch.float32), 53)
    save(tmp_path / "a", found)
    assert verify(tmp_path / "a").passed
    assert torch.equal(load(tmp_path / "a").model(BATCH).logits, found(BATCH).logits)
    assert load(tmp_path / "a").model.config.vocab_size == 53


@pytest.mark.parametrize("size", [0, -1, 1 << 30, True, 2.0, "9", None])
@pytest.mark.usefixtures("our_checks_only")
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(InputError, match="vocab_size"):
        resize_token_embeddings(tiny_model(), size)
    with pytest.raises(InputError, match="resize_token_embeddings takes a model, not a Linear"):
        resize_token_embeddings(nn.Linear(2, 2), 5)  # type: ignore[arg-type]


def test_an_encoder_decoder_keeps_one_table_and_a_classifier_has_no_logits_to_widen() -> None:
    both = tiny_model(family="encoder_decoder", dtype=torch.float32)
    found = resize_token_embeddings(both, 57)
    assert found.encoder.embed_tokens is found.embed_tokens
    assert found.lm_head.weight is found.embed_tokens.weight
    assert found.embed_tokens.weight.shape[0] == 57
    head = {"kind": "sequence_classification", "num_labels": 3}
    classifier = tiny_model(family="encoder", head=head, dtype=torch.float32)
    assert torch.equal(resize_token_embeddings(classifier, 57)(BATCH).logits, classifier(BATCH).logits)
