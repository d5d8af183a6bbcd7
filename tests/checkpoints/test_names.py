"""Tensors by name: every one that is missing, surplus, mistyped or of another shape or type is reported as such."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.folders import resign
from helpers.tiny import tiny_config, tiny_model
from pellucid.batch import Batch
from pellucid.checkpoints import LoadError, load, save, verify
from pellucid.checkpoints.contract import CONTRACT, read_contract
from pellucid.checkpoints.weights import WEIGHTS
from pellucid.data import PLAIN, Tokenizer, encode_chat, encode_prompt
from pellucid.models import build

Tensors = dict[str, torch.Tensor]
BATCH = Batch.from_rows([[5, 8, 2], [7]])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names") / "a"
    save(folder, tiny_model(dtype=torch.float32, hidden_size=16, seed=1))
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "a"))


def change_weights(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def bad(folder: Path) -> tuple[dict[str, str], str]:
    """Every tensor that is not as it should be, and the error."""
    with pytest.raises(LoadError) as caught:
        load(folder)
    return {t.name: t.status for t in caught.value.report if t.status not in ("loaded", "tied")}, str(caught.value)


ONES = torch.ones(16)
GATE = "layers.0.ffn.gate_proj.weight"
WRONG: dict[str, tuple[Callable[[Tensors], object], dict[str, str]]] = {
    "a typo": (
        lambda t: t.update({"layers.0.ffn.gate_porj.weight": t.pop(GATE)}),
        {GATE: "missing", "layers.0.ffn.gate_porj.weight": "surplus"},
    ),
    "one that extends a name": (lambda t: t.update({f"{GATE}.lora": torch.zeros(2)}), {f"{GATE}.lora": "surplus"}),
    "one that a name extends": (lambda t: t.update({"layers.0": torch.zeros(2)}), {"layers.0": "surplus"}),
    "a missing one": (lambda t: t.pop(GATE), {GATE: "missing"}),
    "another shape": (lambda t: t.update({GATE: torch.zeros(48, 17)}), {GATE: "mismatched"}),
    "as many numbers": (lambda t: t.update({GATE: t[GATE].t().contiguous()}), {GATE: "mismatched"}),
    "another type": (lambda t: t.update({GATE: t[GATE].double()}), {GATE: "mismatched"}),
    "another layer": (lambda t: t.update({"layers.2.ffn_norm.weight": ONES}), {"layers.2.ffn_norm.weight": "surplus"}),
    "another final norm": (lambda t: t.update({"final_norm.weight": ONES}), {"final_norm.weight": "surplus"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_each_kind_of_wrong_tensor_is_reported_by_name(saved: Path, kind: str) -> None:
    """B103."""
    change, expected = WRONG[kind]
    change_weights(saved, change)
    found, message = bad(saved)
    assert found == expected
    assert all(f"{status} {name!r}" in message for name, status in expected.items())
    assert not verify(saved, "headers").passed


@pytest.mark.parametrize("kept", ["embed_tokens.weight", "lm_head.weight"])
def test_either_name_of_a_tied_pair_may_be_the_one_in_the_file(saved: Path, kept: str) -> None:
    """B101: one of two names deleted from the file, whichever it is."""
    logits = load(saved).model(BATCH).logits
    both = load(saved).model.state_dict()
    save_file({name: both[name].clone() for name in both if kept == name or not name.startswith(("embed", "lm_head"))},
              saved / WEIGHTS)  # fmt: skip
    found = load(saved)
    assert torch.equal(found.model(BATCH).logits, logits)
    assert found.model.lm_head.weight is found.model.embed_tokens.weight
    assert found.report.names("tied") == ("lm_head.weight",)
    resign(saved, lambda data: None)
    assert verify(saved).passed
    change_weights(saved, lambda t: t.pop(kept))
    assert bad(saved)[0] == {"embed_tokens.weight": "missing"}


def test_a_final_norm_is_surplus_in_a_model_without_one(saved: Path, tmp_path: Path) -> None:
    """B106: the weights of pre-norm under the contract of post-norm, and the other way round."""
    save(tmp_path / "post", build(tiny_config(hidden_size=16, norm_placement="post")))
    post, pre = (folder / CONTRACT for folder in (tmp_path / "post", saved))
    before = pre.read_text(), post.read_text()
    pre.write_text(before[1])
    assert bad(saved)[0] == {"norm.weight": "surplus"}
    post.write_text(before[0])
    assert bad(tmp_path / "post")[0] == {"norm.weight": "missing"}


@pytest.mark.parametrize("other", ["pre", "post"])
def test_a_placement_that_was_flipped_is_refused(tmp_path: Path, other: str) -> None:
    """B106: only the word is changed, and signed."""
    first = {"pre": "post", "post": "pre"}[other]
    save(tmp_path / "a", build(tiny_config(hidden_size=16, norm_placement=first)))
    resign(tmp_path / "a", lambda data: data["model"].update(norm_placement=other))
    assert read_contract(tmp_path / "a" / CONTRACT).model.norm_placement == other
    assert "contradicts itself" in verify(tmp_path / "a", "headers").problem


def test_begin_comes_once_and_training_ids_are_those_of_use_after_a_load(tmp_path: Path) -> None:
    """B110: plain text and chats; what is learnt begins with what is asked."""
    tokenizer = Tokenizer.train(["User: to be\nAssistant: or not to be\n" * 9], vocab_size=290)
    model = tiny_model(vocab_size=290, hidden_size=16)
    for template in (PLAIN.text, PLAIN.text.replace("{{ bos_token }}", "")):
        folder = tmp_path / str(len(template))
        save(folder, model, tokenizer=tokenizer, chat_template=template)
        found = load(folder)
        assert found.tokenizer is not None
        assert found.chat_template is not None
        messages = [{"role": "user", "content": "to be?"}, {"role": "assistant", "content": "or not"}]
        for each in (tokenizer, found.tokenizer):
            learnt, asked = each.encode_document("to be or not"), encode_prompt(each, "to be or not")
            assert learnt == [*asked, each.eos_id]
            whole = encode_chat(each, found.chat_template, messages, False)
            prompt = encode_chat(each, found.chat_template, messages[:1])
            assert whole[: len(prompt)] == prompt
            for ids in (learnt, asked, whole, prompt):
                assert (ids[0], ids.count(each.bos_id)) == (each.bos_id, 1)
        assert encode_chat(tokenizer, found.chat_template, messages) == encode_chat(
            found.tokenizer, found.chat_template, messages
        )
        assert tokenizer.encode_document("é 12\n") == found.tokenizer.encode_document("é 12\n")
