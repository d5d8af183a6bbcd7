"""The loop over real decoders: every way to decode gives the same tokens in float64."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from pellucid.batch import Batch
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import LengthError
from pellucid.generation import GenerationConfig, generate, generate_ids, stream
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.model import Decoder

PROMPTS = [[5, 8, 2, 11, 7, 3], [9], [4, 4, 1]]
POSITIONS = {
    "rope": {"kind": "rope"},
    "learned": {"kind": "learned", "max_position_embeddings": 32},
    "sinusoidal": {"kind": "sinusoidal"},
    "none": {"kind": "none"},
}
Make = Callable[..., Decoder]


def made(position: str = "rope", rule: str = "causal", **changes: object) -> Decoder:
    config = ModelConfig.from_mapping(
        {
            "vocab_size": 23,
            "hidden_size": 16,
            "layers": [rule, "causal"],
            "attention": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
            "ffn": {"kind": "gated", "intermediate_size": 24},
            "position": POSITIONS[position],
            "tie_word_embeddings": False,
            **changes,
        }
    )
    return build(config, seed=4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("position", "rule"),
    [
        ("rope", "causal"),
        ("rope", "causal & window(3)"),
        ("learned", "causal & (window(2) | sinks(1))"),
        ("sinusoidal", "causal & window(3)"),
        ("none", "causal"),
    ],
)
def test_cached_and_uncached_alone_and_together(position: str, rule: str) -> None:
    """P-CACHE and P-BATCH on generated ids; also B16, B22 and B52: left padding and positions that go on."""
    model = made(position, rule)
    for params in (
        GenerationConfig(max_new_tokens=9),
        GenerationConfig(max_new_tokens=9, temperature=1.0, top_p=0.95, seed=3),
    ):
        together = generate_ids(model, PROMPTS, params)
        uncached = generate_ids(model, PROMPTS, params, use_cache=False)
        alone = [generate_ids(model, [prompt], params)[0] for prompt in PROMPTS]
        for other in (uncached, alone):
            assert [row.tokens for row in other] == [row.tokens for row in together]
            for left, right in zip(other, together, strict=True):
                assert left.logprobs == pytest.approx(right.logprobs, abs=1e-10)


def test_log_probabilities_are_those_of_one_pass_over_the_whole_row() -> None:
    """L26: what generation says step by step is what training would score in one pass."""
    model, prompt = made(), PROMPTS[0]
    (row,) = generate_ids(model, [prompt], GenerationConfig(max_new_tokens=8, temperature=1.0, seed=1))
    logits = model(Batch.from_rows([prompt + row.tokens])).logits[0, len(prompt) - 1 : -1]
    scored = logits.log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
    assert row.logprobs == pytest.approx(scored.tolist(), abs=1e-10)


def test_a_row_that_stops_early_leaves_the_others_as_they_are() -> None:
    """B20, B128: padding slots behind a finished row are invisible."""
    model = made("learned")
    whole = generate_ids(model, PROMPTS, GenerationConfig(max_new_tokens=12))
    stop = whole[0].tokens[2]
    params = [
        GenerationConfig(max_new_tokens=12, stop_token_ids=[stop]),
        *[GenerationConfig(max_new_tokens=12)] * 2,
    ]
    stopped = generate_ids(model, PROMPTS, params)
    assert stopped[0].tokens == whole[0].tokens[: whole[0].tokens.index(stop) + 1]
    assert [row.tokens for row in stopped[1:]] == [row.tokens for row in whole[1:]]


def test_a_learned_table_bounds_a_request_before_it_runs() -> None:
    """B100."""
    model = made("learned")
    with pytest.raises(LengthError, match="positions for 32; ask for at most 26"):
        generate_ids(model, PROMPTS, GenerationConfig(max_new_tokens=27))
    assert len(generate_ids(model, PROMPTS[:1], GenerationConfig(max_new_tokens=26))[0].tokens) == 26


def test_a_soft_cap_and_a_tied_head_are_the_models_own() -> None:
    model = made(tie_word_embeddings=True, final_logit_softcapping=0.5)
    (row,) = generate_ids(model, [[5]], GenerationConfig(max_new_tokens=1))
    logits = model(Batch.from_rows([[5]])).logits[0, -1]
    assert logits.abs().max() < 0.5
    assert row.logprobs == pytest.approx([float(logits.log_softmax(0).max().detach())], abs=1e-10)


def test_text_through_a_real_tokenizer() -> None:
    """BOS once (B110), whole characters, joined pieces, a table padded beyond the tokenizer."""
    tokenizer = Tokenizer.train(["naïve café 漢字 🙂 " * 20], vocab_size=280)
    speaker = SimpleNamespace(
        model=made(vocab_size=tokenizer.vocab_size + 9, tie_word_embeddings=True), tokenizer=tokenizer
    )
    prompts, wanted = ["naïve", "", "漢字 🙂"], {"max_new_tokens": 24, "temperature": 3.0, "seed": 5}
    completions = generate(speaker, prompts, **wanted)
    pieces = list(stream(speaker, prompts, **wanted))
    for row, completion in enumerate(completions):
        assert "".join(text for at, text in pieces if at == row) == completion.text
        assert completion.text == tokenizer.decode(completion.tokens)
        assert max(completion.tokens) < tokenizer.vocab_size
        assert generate(speaker, [prompts[row]], **wanted)[0].tokens == completion.tokens
