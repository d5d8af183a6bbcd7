"""Every family through one loop and one beam search: real models of many parts, in float64."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pellucid.batch import Batch
from pellucid.data.schemas import PromptCompletionSchema, Seq2SeqSchema, open_examples
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import InputError, LengthError, UnsupportedError
from pellucid.generation import BeamSearchConfig, GenerationConfig, beam_search, decode, generate, generate_ids
from pellucid.generation.config import model_inputs, reads_sources
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.model import Model

PROMPTS = [[5, 8, 2, 11, 7, 3], [9], [4, 4, 1]]
SOURCES = [[3, 4], [1, 2, 3, 4, 5, 6, 14], [7, 7, 7]]
LATENT = {
    "kind": "latent",
    "num_attention_heads": 2,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
GATED = {"kind": "gated", "intermediate_size": 24}
EXPERTS = {"kind": "moe", "num_experts": 4, "num_experts_per_tok": 2, "expert": GATED}
T5 = {"kind": "relative_bias", "num_buckets": 8, "max_distance": 12, "bidirectional": False}
DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window-sinks": {"layers": ["causal & (window(2) | sinks(1))", "causal & window(3)"]},
    "latent": {"attention": LATENT},
    "alibi": {"position": {"kind": "alibi"}},
    "experts": {"ffn": EXPERTS},
}
PREFIX: dict[str, dict[str, Any]] = {
    "prefix": {"layers": ["causal | prefix()", "causal | prefix()"]},
    "prefix-relative": {"layers": ["causal & window(2) | prefix()", "causal"], "position": T5},
}
BOTH: dict[str, dict[str, Any]] = {
    "both-rope": {},
    "both-relative": {"position": T5, "norm_placement": "pre"},
    "both-learned-post": {"position": {"kind": "learned", "max_position_embeddings": 32}, "norm_placement": "post"},
    "both-window": {"layers": ["causal & window(2)", "causal & window(3)"]},
    "both-experts": {"ffn": EXPERTS, "position": {"kind": "none"}},
}
KINDS = [*DECODERS, *PREFIX, *BOTH]


def made(kind: str, **changes: Any) -> Model:
    family = {"family": "encoder_decoder"} if kind in BOTH else {}
    config = {
        "vocab_size": 23,
        "hidden_size": 16,
        "layers": ["causal", "causal"],
        "attention": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
        "ffn": GATED,
        "tie_word_embeddings": False,
        **family,
        **(DECODERS | PREFIX | BOTH)[kind],
        **changes,
    }
    model = build(ModelConfig.from_mapping(config), seed=4, dtype=torch.float64)
    for weight in model.parameters():  # first weights say nearly the same for every input
        weight.data.mul_(1.7)
    return model


def sources_of(kind: str) -> list[list[int]] | None:
    return SOURCES if kind in BOTH else None


def own_source(kind: str, row: int) -> list[list[int]] | None:
    return [SOURCES[row]] if kind in BOTH else None


@torch.inference_mode()
def whole_pass(model: Model, prompt: list[int], said: list[int], source: list[int] | None = None) -> list[float]:
    """The log-probability of each said token in one pass over prompt and answer."""
    batch = Batch.from_rows([[*prompt, *said]])
    if any("prefix" in str(rule) for rule in model.rules):
        batch = replace(batch, groups=(batch.positions < len(prompt)).long())
    if source is not None:
        batch = replace(batch, source=Batch.from_rows([source]))
    logits = model(batch).logits[0, len(prompt) - 1 : -1]
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(said)[:, None])[:, 0].tolist()
    return found


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    assert [row.tokens for row in found] == [row.tokens for row in expected]
    for left, right in zip(found, expected, strict=True):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_tokens_with_and_without_a_cache_alone_and_together(kind: str) -> None:
    """P-CACHE, P-BATCH and L26 for generated ids: prompts and sources of different lengths, mates that finish early."""
    model, sources = made(kind), sources_of(kind)
    params = [GenerationConfig(max_new_tokens=new, temperature=1.0, seed=new) for new in (5, 2, 6)]
    together = generate_ids(model, PROMPTS, params, sources=sources)
    assert_alike(generate_ids(model, PROMPTS, params, sources=sources, use_cache=False), together)
    for row, prompt in enumerate(PROMPTS):
        alone = generate_ids(model, [prompt], [params[row]], sources=own_source(kind, row))
        assert_alike(alone, [together[row]])
        said = whole_pass(model, prompt, together[row].tokens, *(own_source(kind, row) or ()))
        assert together[row].logprobs == pytest.approx(said, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_beams_with_and_without_a_cache_alone_and_together(kind: str) -> None:
    """B55: after any reordering a beam says what a fresh pass over its own tokens says, for every state there is."""
    model, sources = made(kind), sources_of(kind)
    params = BeamSearchConfig(
        num_beams=4, num_return_sequences=3, max_new_tokens=5, length_penalty=0.6, stop_token_ids=[2, 7, 19]
    )
    together = beam_search(model, PROMPTS, params, sources=sources)
    uncached = beam_search(model, PROMPTS, params, sources=sources, use_cache=False)
    for row, prompt in enumerate(PROMPTS):
        alone = beam_search(model, [prompt], params, sources=own_source(kind, row))
        for other in (uncached[row], alone[0]):
            assert_alike(other, together[row])
        for hypothesis in together[row]:
            said = whole_pass(model, prompt, hypothesis.tokens, *(own_source(kind, row) or ()))
            assert hypothesis.logprobs == pytest.approx(said, abs=1e-10)
            assert hypothesis.score == pytest.approx(sum(said) / len(said) ** 0.6, abs=1e-10)


@pytest.mark.parametrize("kind", BOTH)
def test_a_source_matters_to_the_last_token_and_only_to_its_own_row(kind: str) -> None:
    """B59: nothing of the decoder's windows cuts a source, and no mate reads it."""
    model, params = made(kind), GenerationConfig(max_new_tokens=6)
    before = generate_ids(model, PROMPTS, params, sources=SOURCES)
    changed = [20, *SOURCES[1][1:]]
    after = generate_ids(model, PROMPTS, params, sources=[SOURCES[0], changed, SOURCES[2]])
    assert_alike([after[0], after[2]], [before[0], before[2]])
    said = before[1].tokens
    told = [whole_pass(model, PROMPTS[1], said, source)[-1] for source in (SOURCES[1], changed)]
    assert before[1].logprobs[-1] == pytest.approx(told[0], abs=1e-10)
    assert abs(told[1] - told[0]) > 1e-6


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", ["both-rope", "both-relative"])
def test_sentences_that_are_done_leave_the_others_as_they_are(kind: str, use_cache: bool) -> None:
    """B56: sentences end after different numbers of steps, in any order, and each result is its own."""
    model = made(kind)
    params = BeamSearchConfig(
        num_beams=2, num_return_sequences=2, max_new_tokens=8, stop_token_ids=list(range(9)), length_penalty=0.5
    )
    alone = [beam_search(model, [[5]], params, sources=[source])[0] for source in SOURCES]
    assert len({max(len(hypothesis.tokens) for hypothesis in row) for row in alone}) > 1
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        found = beam_search(model, [[5]] * 3, params, sources=[SOURCES[row] for row in order], use_cache=use_cache)
        for row, own in zip(found, order, strict=True):
            assert_alike(row, alone[own])


def test_a_prefix_lm_sees_its_prompt_both_ways() -> None:
    """The first token of the prompt is made from the last one too, so the same model without groups says otherwise."""
    found = generate_ids(made("prefix"), PROMPTS, GenerationConfig(max_new_tokens=3))
    causal = generate_ids(made("plain"), PROMPTS, GenerationConfig(max_new_tokens=3))
    assert found[0].logprobs != pytest.approx(causal[0].logprobs, abs=1e-6)
    assert found[1].tokens == causal[1].tokens  # one token sees itself either way


def test_sources_and_prompts_are_bounded_each_by_its_own_positions() -> None:
    """B100 for both stacks."""
    encoder = {"position": {"kind": "learned", "max_position_embeddings": 8}}
    model = made("both-learned-post", encoder=encoder)
    with pytest.raises(LengthError, match="source 0 has 9 tokens, but the model has positions for 8"):
        generate_ids(model, [[1]], GenerationConfig(max_new_tokens=2), sources=[[1] * 9])
    with pytest.raises(LengthError, match="positions for 32; ask for at most 31"):
        beam_search(model, [[1]], BeamSearchConfig(max_new_tokens=32), sources=[[1] * 8])
    assert len(generate_ids(model, [[1]], GenerationConfig(max_new_tokens=31), sources=[[1] * 8])[0].tokens) == 31


def test_a_source_of_another_vocabulary_has_its_own_ids() -> None:
    model = made("both-rope", source_vocab_size=40)
    few = GenerationConfig(max_new_tokens=2)
    assert len(generate_ids(model, [[1]], few, sources=[[39]])[0].tokens) == 2
    with pytest.raises(InputError, match="source 0 holds 40, but token ids are 0 to 39"):
        generate_ids(model, [[1]], few, sources=[[40]])


def test_texts_reach_a_model_as_they_did_in_training() -> None:
    """One form of sources, starts and prefixes for the examples that train and for the texts that come later."""
    tokenizer = Tokenizer.train(["naïve café " * 20], vocab_size=280)
    size = {"vocab_size": tokenizer.vocab_size}
    pairs = open_examples([{"source": "a café", "target": "naïve"}], Seq2SeqSchema(), tokenizer, split="all")
    translator = SimpleNamespace(model=made("both-rope", **size), tokenizer=tokenizer)
    ask = model_inputs(translator, ["a café"], None)
    assert ask.sources == [pairs.source.document(0).tolist()]
    assert ask.prompts == [pairs.store.document(0).tolist()[:1]]
    (found,) = generate(translator, ["a café"], num_beams=2, max_new_tokens=3)
    (expected,) = beam_search(
        translator.model, ask.prompts,
        BeamSearchConfig(num_beams=2, max_new_tokens=3, stop_token_ids=[tokenizer.eos_id]),
        sources=ask.sources, vocab_size=tokenizer.vocab_size,
    )  # fmt: skip
    assert found.tokens == expected[0].tokens
    assert found.text == tokenizer.decode(found.tokens)
    rows = open_examples([{"prompt": "a café", "completion": " x"}], PromptCompletionSchema(), tokenizer, split="all")
    prefix = rows.store.document(0)[rows.columns["groups"] == 1].tolist()
    assert model_inputs(
        SimpleNamespace(model=made("prefix", **size), tokenizer=tokenizer), ["a café"], None
    ).prompts == [prefix]


def test_models_that_say_no_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="this Encoder cannot continue a prompt"):
        generate_ids(made("plain", family="encoder", layers=["full()"]), [[1]])
    classifier = made("plain", head={"kind": "sequence_classification", "num_labels": 2})
    with pytest.raises(UnsupportedError, match=r"this Decoder with the head \w+ predicts no tokens"):
        beam_search(classifier, [[1]])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_step_moves_no_list_to_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first pass every index is where the tensors are; a row that ends writes one number."""
    model = made(kind)
    sources = {"sources": [[1, 2, 3], [4, 5]]} if reads_sources(model) else {}
    params = [
        GenerationConfig(max_new_tokens=8, temperature=1.0, top_k=4, top_p=0.9, seed=1, repetition_penalty=1.2),
        GenerationConfig(max_new_tokens=5, min_new_tokens=4, stop_token_ids=[1, 2], temperature=1.0, seed=2),
    ]
    steps = decode(model, [[1, 2], [3, 4]], params, **sources)
    assert [next(steps), next(steps)]
    moved: list[str] = []

    def spy(function: str) -> None:
        real = getattr(torch, function)

        def run(*values: Any, **options: Any) -> torch.Tensor:
            moved.append(function)
            return real(*values, **options)

        monkeypatch.setattr(torch, function, run)

    for function in ("tensor", "as_tensor", "from_numpy"):
        spy(function)
    assert len(list(steps)) == 6
    assert moved == []
