"""Models to folders and back: nothing lost, nothing taken on trust, nothing half done."""

import json
import os
import pickle
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.folders import resign
from helpers.tiny import tiny_model
from pellucid.batch import Batch
from pellucid.checkpoints import MismatchError, load, save, verify
from pellucid.checkpoints.contract import CONTRACT
from pellucid.checkpoints.files import canonical_digest, digest
from pellucid.checkpoints.load_report import LoadError, stored_tensors
from pellucid.checkpoints.loading import TOKENIZER
from pellucid.checkpoints.weights import WEIGHTS, write_tensors
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import ArgumentError, CheckpointError, InputError
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.model import Decoder

BATCH = Batch.from_rows([[5, 8, 2, 9, 1], [7], [3, 3, 4]])


def config(**changes: Any) -> ModelConfig:
    words: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "attention": {"num_attention_heads": 2, "num_key_value_heads": 1},
        "ffn": {"kind": "gated", "intermediate_size": 24},
    }
    return ModelConfig.from_mapping(words | changes)


CONFIGS = {
    "tied": config(),
    "free head with bias": config(tie_word_embeddings=False, head_bias=True),
    "post-norm": config(
        norm_placement="post", norm={"kind": "layer_norm"}, position={"kind": "learned", "max_position_embeddings": 9}
    ),
    "windows": config(layers=["causal & window(2)", "causal"], num_hidden_layers=2, position={"kind": "none"}),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["to be or not to be, that is the question"] * 3, vocab_size=270)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "saved"
    save(folder, build(CONFIGS["tied"], seed=1))
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


def same(a: Decoder, b: Decoder) -> bool:
    return torch.equal(a(BATCH).logits, b(BATCH).logits)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the contract by hand, the digests left as they are."""
    path = folder / CONTRACT
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


# ---- there and back


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loaded_model_is_the_saved_one(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    model = build(CONFIGS[name], seed=3)
    save(tmp_path / "a", model, tokenizer=tokenizer)
    found = load(tmp_path / "a", check="digests")
    assert same(found.model, model)
    assert found.model.config == model.config
    assert not found.model.training
    assert found.tokenizer is not None
    assert found.tokenizer.encode("to be") == tokenizer.encode("to be")
    assert found.report.complete
    assert {t.name for t in found.report} == set(model.state_dict())
    assert {t.status for t in found.report} == ({"loaded", "tied"} if model.config.tie_word_embeddings else {"loaded"})


def test_a_loaded_model_can_be_saved_again_byte_for_byte(tmp_path: Path, saved: Path) -> None:
    save(tmp_path / "again", load(saved).model)
    for name in (WEIGHTS, CONTRACT):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


def test_changing_a_loaded_model_leaves_the_file_alone(saved: Path) -> None:
    """Weights are mapped, privately."""
    before = (saved / WEIGHTS).read_bytes()
    with torch.no_grad():
        for parameter in load(saved).model.parameters():
            parameter.add_(1)
    assert (saved / WEIGHTS).read_bytes() == before


def test_a_tied_tensor_is_stored_once_and_loaded_as_one(saved: Path) -> None:
    """B101, B112: one name in the file, one parameter in the model."""
    assert "lm_head.weight" not in load_file(saved / WEIGHTS)
    found = load(saved)
    assert found.model.lm_head.weight is found.model.embed_tokens.weight
    assert found.report.names("tied") == ("lm_head.weight",)
    assert found.contract.tied == {"lm_head.weight": "embed_tokens.weight"}


def test_a_tied_tensor_may_lie_under_its_other_name(saved: Path) -> None:
    """B101: either name in the file gives the whole model."""
    model = load(saved).model
    logits = model(BATCH).logits.clone()
    change_weights(saved, lambda t: t.update({"lm_head.weight": t.pop("embed_tokens.weight")}))
    found = load(saved).model
    assert torch.equal(found(BATCH).logits, logits)
    assert found.lm_head.weight is found.embed_tokens.weight
    assert not any(p.is_meta for p in found.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cast_is_reported(saved: Path, dtype: torch.dtype) -> None:
    found = load(saved, dtype=dtype)
    assert {p.dtype for p in found.model.parameters()} == {dtype}
    names = [name for name, _ in found.model.named_parameters()]
    assert list(found.report.names("cast")) == names
    assert found.report.tensors[0].detail == f"float32[300, 16] to {str(dtype).removeprefix('torch.')}"
    assert str(found.report) == f"1 tied, {len(names)} cast"


def test_a_model_of_another_dtype_comes_back_in_it(tmp_path: Path) -> None:
    model = build(CONFIGS["tied"], dtype=torch.float64)
    save(tmp_path / "a", model)
    found = load(tmp_path / "a")
    assert same(found.model, model)
    assert found.report.names("cast") == ()


def test_the_contract_is_readable_and_stable(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, build(CONFIGS["tied"], seed=1), tokenizer=tokenizer)
    text = (tmp_path / "a" / CONTRACT).read_text()
    assert text == (tmp_path / "b" / CONTRACT).read_text()
    data = json.loads(text)
    assert list(data) == [
        "schema_version",
        "model",
        "positions_after_cache",
        "text",
        "tied",
        "tensors",
        "digests",
        "witness",
    ]
    assert data["text"] == {
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "adds_bos": "document",
    }
    assert data["tensors"]["layers.1.attention.k_proj.weight"] == "float32[8, 16]"
    own = data["digests"].pop(CONTRACT)
    assert data["digests"] == {n: digest(tmp_path / "a" / n) for n in (WEIGHTS, TOKENIZER)}
    assert own == canonical_digest(data)
    assert max(map(len, text.splitlines())) < 200


# ---- what saving refuses


def test_an_existing_target_is_refused(saved: Path) -> None:
    before = (saved / WEIGHTS).read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        save(saved, build(CONFIGS["tied"], seed=2))
    assert (saved / WEIGHTS).read_bytes() == before


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 5000, 35_000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, tokenizer: Tokenizer, size: int) -> None:
    """At any of the files: one clear error, no folder."""
    with (
        full_disk(size),
        pytest.raises(InputError, match=r"cannot write .*(too large|os error 27)") as caught,
    ):
        save(tmp_path / "a", build(CONFIGS["tied"]), tokenizer=tokenizer)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_files_get_the_mode_of_any_new_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A checkpoint is as open as its folder."""
    save(tmp_path / "a", build(CONFIGS["tied"]), tokenizer=tokenizer, max_shard_bytes=5000)
    (tmp_path / "new").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").iterdir()}
    assert modes == {stat.S_IMODE((tmp_path / "new").stat().st_mode)}


def test_a_model_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    """A folder must be able to build again what it holds."""
    grown = build(CONFIGS["tied"])
    grown.layers[0].extra = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(
        CheckpointError, match=r"has float32\[2, 2\] as 'layers.0.extra.weight', but its config describes nothing"
    ):
        save(tmp_path / "a", grown)
    resized = build(CONFIGS["tied"])
    resized.norm.weight = torch.nn.Parameter(torch.ones(17))
    with pytest.raises(
        CheckpointError, match=r"has float32\[17\] as 'norm.weight', but its config describes float32\[16\]"
    ):
        save(tmp_path / "a", resized)
    untied = build(CONFIGS["tied"])
    untied.lm_head.weight = torch.nn.Parameter(untied.embed_tokens.weight.detach().clone())
    with pytest.raises(
        CheckpointError,
        match=r"has float32\[300, 16\] as 'lm_head.weight', but its config describes the same as embed_tokens",
    ):
        save(tmp_path / "a", untied)
    with pytest.raises(CheckpointError, match=r"Linear without a ModelConfig in \.config cannot be saved"):
        save(tmp_path / "a", torch.nn.Linear(2, 2))
    assert os.listdir(tmp_path) == []


def test_a_tokenizer_with_too_many_tokens_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    small = build(config(vocab_size=260))
    with pytest.raises(CheckpointError, match=rf"tokenizer has {tokenizer.vocab_size} tokens but the model only 260"):
        save(tmp_path / "a", small, tokenizer=tokenizer)


# ---- what loading refuses


def damage_report(folder: Path) -> dict[str, str]:
    with pytest.raises(LoadError) as caught:
        load(folder)
    return {t.name: t.status for t in caught.value.report if t.status not in ("loaded", "tied")}


def test_every_tensor_that_is_wrong_is_named(saved: Path) -> None:
    """B103, B106: a mistyped key, a longer one, a missing one, a wrong shape, a wrong dtype, all at once."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.attention.q_porj.weight"] = tensors.pop("layers.0.attention.q_proj.weight")
        tensors["norm.weight.x"] = torch.zeros(3)
        tensors["layers.0.attn_norm.weight"] = torch.ones(17)
        tensors["layers.1.attn_norm.weight"] = tensors["layers.1.attn_norm.weight"].double()

    change_weights(saved, change)
    assert damage_report(saved) == {
        "layers.0.attention.q_proj.weight": "missing",
        "layers.0.attention.q_porj.weight": "surplus",
        "norm.weight.x": "surplus",
        "layers.0.attn_norm.weight": "mismatched",
        "layers.1.attn_norm.weight": "mismatched",
    }


def test_the_error_names_what_it_met_and_what_it_wanted(saved: Path) -> None:
    change_weights(saved, lambda t: t.update({"norm.weight": torch.ones(17)}))
    with pytest.raises(LoadError) as caught:
        load(saved)
    assert str(caught.value) == (
        f"{saved} does not hold the tensors of its contract: mismatched 'norm.weight' "
        "(the contract wants float32[16], the file holds float32[17]); nothing was loaded"
    )


def test_a_tied_tensor_stored_twice_is_surplus(saved: Path) -> None:
    change_weights(saved, lambda t: t.update({"lm_head.weight": t["embed_tokens.weight"] + 1}))
    assert damage_report(saved) == {"lm_head.weight": "surplus"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: c["model"].update(norm_placement="post"),
            "contradicts itself: its model has nothing as 'norm.weight'",
        ),
        (lambda c: c["model"].update(tie_word_embeddings=False), "contradicts itself"),
        (lambda c: c["model"]["attention"].update(num_key_value_heads=2), "contradicts itself"),
        (lambda c: c["model"].update(layers=["causal()"] * 3), "contradicts itself"),
        (lambda c: c["model"].update(layers=["causal()"] * 4000), "4000 layers but only 20 tensors"),
        (lambda c: c["model"].update(hidden_sise=16), "hidden_sise"),
        (lambda c: c["model"].update(code="import os"), "code"),
        (lambda c: c.update(surprise=1), "surprise"),
        (lambda c: c.update(schema_version=2), "schema_version 2, this version reads 5.* or save its model again"),
        (lambda c: c.update(schema_version=True), "schema_version True, this version reads 5"),
        (lambda c: c["model"]["position"].update(rope_theta=500.0), "was changed after it was written"),
        (lambda c: c["digests"].pop("pellucid.json"), "has no digest of itself"),
        (
            lambda c: c["tied"].update({"embed_tokens.weight": "lm_head.weight"}),
            "its model has .* as 'embed_tokens.weight', its lists say the same as lm_head",
        ),
        (lambda c: c["digests"].update({"model.safetensors": "0"}), "digests"),
        (lambda c: c.pop("model"), "model"),
    ],
)
def test_a_contract_that_does_not_hold_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    """B106: a pre-norm checkpoint is no post-norm one; nothing unknown is passed over."""
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=words):
        load(saved)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b'{"schema_version": ' + b"9" * 9999 + b"}"]
)
def test_a_contract_that_is_none_is_refused(saved: Path, content: bytes) -> None:
    (saved / CONTRACT).write_bytes(content)
    with pytest.raises(CheckpointError, match=CONTRACT):
        load(saved)


def test_pickles_are_never_opened(saved: Path) -> None:
    """B109: a pickle under the right name is no safetensors file, and its code does not run."""
    canary = saved / "canary"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (canary,)

    (saved / WEIGHTS).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="not safetensors"):
        load(saved)
    (saved / WEIGHTS).unlink()
    torch.save(Bomb(), saved / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds pytorch_model\.bin, which may be a pickle and is never opened"):
        load(saved)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "OLD.PTH", "last.ckpt", "x.pkl", "y.pickle"])
def test_pickles_are_refused_beside_good_weights_too(saved: Path, name: str) -> None:
    """B109: whoever reads the folder next might open it."""
    canary = saved / "canary"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (canary,)

    torch.save(Bomb(), saved / name)
    for check in ("headers", "digests", "witness"):
        with pytest.raises(CheckpointError, match=rf"holds {name}, which may be a pickle .*; remove it, "):
            load(saved, check=check)
    assert not canary.exists()


def test_digests_tell_a_changed_weight(saved: Path) -> None:
    change_weights(saved, lambda t: t["norm.weight"].add_(1))
    load(saved)
    with pytest.raises(CheckpointError, match="was changed or damaged"):
        load(saved, check="digests")


def test_another_tokenizer_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """At every level, by its digest; one of another size also when somebody signed it."""
    save(tmp_path / "a", build(CONFIGS["tied"]), tokenizer=tokenizer)
    path = tmp_path / "a" / TOKENIZER
    path.unlink()
    Tokenizer.train(["quite other words, and more of them, all different"], vocab_size=262).save(path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has SHA-256"):
        load(tmp_path / "a")
    resign(tmp_path / "a", lambda data: None)
    with pytest.raises(CheckpointError, match="another model's tokenizer"):
        load(tmp_path / "a")
    path.unlink()
    Tokenizer.train(["quite other words, and more of them"] * 9, vocab_size=tokenizer.vocab_size).save(path)
    for check in ("headers", "digests", "witness"):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json has SHA-256"):
            load(tmp_path / "a", check=check)


def test_a_folder_that_is_none_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist; give a folder that was saved"):
        load(tmp_path / "nowhere")
    save(tmp_path / "run" / "checkpoints" / "step-00000007", build(CONFIGS["tied"]))
    with pytest.raises(CheckpointError, match=r"has no pellucid\.json; did you mean .*/step-00000007\?"):
        load(tmp_path / "run")


def test_a_model_is_seen_as_its_tensors_under_first_names() -> None:
    model = build(CONFIGS["tied"])
    stored, tied = stored_tensors(model)
    assert list(stored) == [name for name, _ in model.named_parameters()]
    assert tied == {"lm_head.weight": "embed_tokens.weight"}


def test_weights_are_written_like_the_library_writes_them(tmp_path: Path) -> None:
    """Byte for byte, whatever the type, the layout and the number of axes; the digest is that of the file."""
    wide = torch.arange(12.0).view(3, 4)
    tensors = {
        "b.weight": wide.t(),
        "a": wide[1:].to(torch.bfloat16),
        "é": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3, dtype=torch.float16),
        "expanded": torch.ones(1).expand(5),
    }
    found = write_tensors(tmp_path / "ours", tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert found == digest(tmp_path / "ours")


def test_a_folder_can_be_saved_with_digests_only(tmp_path: Path) -> None:
    """Its tensors and digests are compared as ever; there is no witness, and nothing pretends that there is."""
    model = tiny_model(seed=3)
    save(tmp_path / "a", model, prove="digests")
    loaded = load(tmp_path / "a", check="digests")
    assert loaded.contract.witness is None
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in loaded.model.state_dict().items())
    found = verify(tmp_path / "a")
    assert (found.passed, found.level, found.differences) == (True, "digests", ())
    with pytest.raises(MismatchError, match="digests only, so there is no witness to compare; verify it at the level"):
        load(tmp_path / "a", check="witness")
    assert not verify(tmp_path / "a", "witness").passed
    data = bytearray((tmp_path / "a" / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (tmp_path / "a" / WEIGHTS).write_bytes(data)
    assert "SHA-256" in verify(tmp_path / "a").problem
    with pytest.raises(ArgumentError, match="prove is 'nothing'; choose witness or digests"):
        save(tmp_path / "b", model, prove="nothing")  # type: ignore[arg-type]
