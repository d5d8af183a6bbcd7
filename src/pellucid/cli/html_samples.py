"""A sample text through a checkpoint: what each token may see, attends to, and was moved by."""

from __future__ import annotations

import copy
import math
import re
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from pellucid.batch import Batch
    from pellucid.checkpoints import Checkpoint
    from pellucid.models.model import Model
    from pellucid.probe import Probe
    from pellucid.records import TokenView
    from pellucid.training import TrainConfig

_CHARACTERS = 600
_DOCUMENTS = 30
_WORK = 1.5e11
"""About how many multiplications the view may cost: a big model gets a shorter text."""
_WEIGHTS = 400_000
"""How many attention weights a page carries at most."""
_ROUNDING = 1e-5

_BEGINNING = re.compile(r"^(?:def|class|async def) \w", re.MULTILINE)
_MEASURE = (
    "how much of the prediction after a token went elsewhere when another token was replaced by a random one; "
    "0 is nothing, 1 is all of it"
)


def heldout_text(config: TrainConfig) -> str:
    """A few lines that a run of ``config`` never trains on; of Python, where a definition begins."""
    from pellucid.errors import RunError
    from pellucid.training.datasets import open_data

    texts = [document.text for document in islice(open_data(config)[1].documents("heldout"), _DOCUMENTS)]
    for text in texts:
        found = _BEGINNING.search(text)
        if found and len(text) - found.start() > _CHARACTERS // 2:
            return text[found.start() :][:_CHARACTERS]
    if not texts:
        raise RunError("the run holds out no document, so there is no text to show; raise data.heldout_fraction")
    return max(texts, key=len)[:_CHARACTERS]


def token_view(checkpoint: Checkpoint, text: str) -> TokenView:
    """The first tokens of ``text``, run through the checkpoint's model in float32 on the CPU."""
    import torch

    from pellucid.audits import expected_flow
    from pellucid.batch import Batch
    from pellucid.data.tokenizer import with_begin
    from pellucid.errors import ArgumentError
    from pellucid.records import TokenView

    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise ArgumentError("the checkpoint has no tokenizer, so no text can be shown; save it with one")
    model = copy.deepcopy(checkpoint.model).to("cpu", torch.float32).eval()
    ids = with_begin(tokenizer.bos_id, tokenizer.encode(text))[: longest(model)]
    probe, batch = model.probe(), Batch.from_rows([ids])
    with torch.no_grad():
        attention_LNTT = [weights_BNTT[0] for weights_BNTT in probe.attention(batch)]
        moved_TT = replaced_one_by_one(probe, batch, tokenizer.vocab_size)
    return TokenView(
        f"{len(ids)} tokens of held-out text",
        tuple(tokenizer.decode([id_], skip_special=False) for id_ in ids),
        expected_flow(probe.rules, batch)[0].tolist(),
        [weights_NTT.tolist() for weights_NTT in attention_LNTT],
        moved_TT.tolist(),
        tuple(f"{index}: {rule.describe()}" for index, rule in enumerate(probe.rules)),
        _MEASURE,
        "Changes within float32 rounding count as none.",
    )


def can_be_shown(model: Model) -> bool:
    """Whether :func:`token_view` can show this model: one stack, with logits over the vocabulary."""
    from pellucid.models.config import ModelConfig
    from pellucid.models.configs import VOCABULARY

    config = model.config
    return isinstance(config, ModelConfig) and config.encoder is None and isinstance(config.head, VOCABULARY)


def longest(model: Model) -> int:
    """How many tokens to show: few enough for the model's size, its layers and heads, and its positions."""
    from pellucid.records import LONGEST_VIEW

    parameters = sum(parameter.numel() for parameter in model.parameters())
    heads = len(model.rules) * model.config.attention.num_attention_heads
    affordable = min(math.isqrt(int(_WORK / parameters)), math.isqrt(_WEIGHTS // heads))
    return max(2, min(LONGEST_VIEW, affordable, model.max_length or LONGEST_VIEW))


def replaced_one_by_one(probe: Probe, batch: Batch, vocab_size: int) -> Tensor:
    """``[query, key]``: the total variation between each query's prediction before and after the key is replaced.

    Every request has one shape, so that what is hidden cannot even change the rounding on most machines; changes
    within rounding are 0 in any case.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    steps_T = torch.randint(1, vocab_size, (batch.shape[1],), generator=generator)
    before_TV = probe.logits(batch)[0].double()
    limit = _ROUNDING * (1 + float(before_TV.abs().max()))
    columns = []
    for key, (token, step) in enumerate(zip(batch.tokens[0].tolist(), steps_T.tolist(), strict=True)):
        after_TV = probe.logits(batch.with_token(0, key, (token + step) % vocab_size))[0].double()
        variation_T = (after_TV.softmax(-1) - before_TV.softmax(-1)).abs().sum(-1) / 2
        changed_T = ~((after_TV - before_TV).abs().amax(-1) <= limit)  # NaN counts
        columns.append(torch.where(changed_T, variation_T.clamp(min=1e-9), 0.0))
    return torch.stack(columns, -1)
