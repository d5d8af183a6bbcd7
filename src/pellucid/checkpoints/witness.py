"""The witness: what a folder's forward gives on its probes, kept beside the weights and asked again.

A digest says that bytes are the same; the witness says that they still *mean* the same. Each probe's logits are
folded into :data:`FOLDS` numbers a slot by fixed signs, computed in float64, kept as float32, and must come back
within :data:`TOLERANCE` of the largest of them: on any machine, and whatever dtype the weights are stored in. A
change that moves no output by that much cannot be seen, and does not matter in float32 either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from pellucid.checkpoints.exact import PortableDropout, Read, exact_model
from pellucid.checkpoints.probes import Probe, probes_of, spread
from pellucid.checkpoints.report import MismatchError
from pellucid.checkpoints.spoken import TextWitness, compared
from pellucid.configfile import Config
from pellucid.data.chat import ChatTemplate
from pellucid.data.objectives import causal
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, InputError
from pellucid.models.config import ModelConfig
from pellucid.models.decoder import Decoder

FOLDS = 4
"""Numbers kept of each slot's logits: Σ ±logit / sqrt(V), the signs being bits of ``spread(id)``."""

TOLERANCE = 1e-6
"""Allowed difference, relative to the largest number of the probe. Float32 alone takes 6e-8 of it."""

LIVE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.25}
"""How far a model in memory, in its own dtype and on its own device, may be from the exact forward to be saved."""

UNWITNESSED = {
    "model.family": "there is only one family",
    "model.attention.kind": "there is only one kind of attention",
    "model.initializer_range": "only first weights are drawn from it; the weights are here",
    "model.residual_init": "only first weights are drawn by it; the weights are here",
    "digests": "whoever changes a file can note its new digest; the witness asks what the files give",
    "witness.tolerance": "a smaller one than was written passes while every output still is within it",
}
"""Fields of the contract that another value can be written into, digests made to fit, and why that is not seen."""

UNSEEN = {
    "a number changed by very little": "what moves no output by a millionth (a dropout of 0.1 to 0.10000001) passes",
    "a value that changes no output": "as rope's theta does with heads of 2, or a scale written out that was null",
    "bounds of rules beyond 2^38, or a few of more than 32": "no probe is put there; all others are met exactly",
    "tokens and chats that are not asked": "merges, rules or turns that no sample line and no small chat needs",
    "what a file holds besides": "spaces, order and comments of the files, where the same is read from them",
}
"""Changes that can be signed anew without being seen, in fields where others are."""

Fold = Annotated[tuple[float, ...], Field(min_length=FOLDS, max_length=FOLDS)]


class Answer(Config):
    """What a probe must give."""

    asked: Probe
    logits: tuple[Fold, ...]
    """The folded logits of each slot in ``asked.at``, row after row."""
    loss: float | None = None
    """Mean cross-entropy in nats over the labels that ``data.objectives.causal`` gives; none with a cache."""
    counted: int | None = None

    @model_validator(mode="after")
    def _one_a_slot(self) -> Answer:
        slots = sum(map(len, self.asked.at))
        if len(self.logits) != slots:
            raise ValueError(f"logits has {len(self.logits)} entries for {slots} slots")
        return self


class Witness(Config):
    """Probes and what they must give."""

    tolerance: Annotated[float, Field(gt=0, le=TOLERANCE)] = TOLERANCE
    probes: dict[str, Answer]
    text: TextWitness | None = None
    """None without a tokenizer."""


class Difference(NamedTuple):
    """How far one output of one probe is from what it must be."""

    probe: str
    what: str
    size: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.size <= self.allowed  # NaN is not


class WitnessError(MismatchError):
    """The folder's forward does not give what it gave; ``differences`` has all that were asked, the last too large."""

    def __init__(self, where: object, differences: tuple[Difference, ...], changed: str = "weights") -> None:
        first = differences[-1]
        super().__init__(
            f"{where} does not give what it gave when it was saved: probe {first.probe!r} differs first, its "
            f"{first.what} by {first.size:.3g}, allowed {first.allowed:.3g}; its {changed} or its contract were changed"
        )
        self.differences = differences


def witness_of(config: ModelConfig, read: Read, tied: Mapping[str, str]) -> Witness:
    """Ask the probes of ``config`` of these weights. Weights that give NaN or infinity have no witness."""
    model = exact_model(config, read, tied)
    answers = {name: _answer(model, probe) for name, probe in probes_of(config).items()}
    for name, answer in answers.items():
        if not np.isfinite([*np.ravel(answer[0]), answer[1] or 0.0]).all():
            raise CheckpointError(
                f"the model gives NaN or infinity on the probe {name!r}, so nothing could verify its folder; "
                "save weights from before they were damaged"
            )
    kept = {
        name: Answer(asked=probe, logits=_short(folds), loss=None if loss is None else _float32(loss), counted=count)
        for (name, probe), (folds, loss, count) in zip(probes_of(config).items(), answers.values(), strict=True)
    }
    return Witness(probes=kept)


def check_witness(
    where: object, witness: Witness, config: ModelConfig, read: Read, tied: Mapping[str, str]
) -> tuple[Difference, ...]:
    """Ask the probes again, in order, up to the first that differs, which a :class:`WitnessError` names."""
    probes = probes_of(config)
    wanted, kept = list(probes), list(witness.probes)
    if wanted != kept:
        raise MismatchError(
            f"{where} has a witness of {', '.join(kept)[:200]}, but its model is asked {', '.join(wanted)}; "
            "its contract was changed"
        )
    found: list[Difference] = []
    try:
        model = exact_model(config, read, tied)
        for name, answer in witness.probes.items():
            for difference in _compared(model, name, answer, witness.tolerance):
                found.append(difference)
                if not difference.passed:
                    raise WitnessError(where, tuple(found))
    except (InputError, RuntimeError, ArithmeticError, MemoryError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = f"{str(error)[:200]}; its contract was changed"
        raise MismatchError(f"{where} cannot be asked its probes: {reason}") from error
    for name, answer in witness.probes.items():
        if answer.asked != probes[name]:
            raise MismatchError(f"{where} was asked another {name!r} than its model is asked; its contract was changed")
    return tuple(found)


def check_text(
    where: object, kept: TextWitness | None, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> tuple[Difference, ...]:
    """Ask tokenizer and chat template again, up to the first difference, which a :class:`WitnessError` names."""
    if (kept is None) != (tokenizer is None) or (kept is not None and (kept.chats is None) != (template is None)):
        raise MismatchError(f"{where} has a witness of other text files than it holds; its contract was changed")
    found: list[Difference] = []
    if kept is not None and tokenizer is not None:
        for difference in (Difference(*parts, 0) for parts in compared(kept, tokenizer, template)):
            found.append(difference)
            if not difference.passed:
                raise WitnessError(where, tuple(found), "text files")
    return tuple(found)


@torch.no_grad()
def check_live(model: nn.Module, witness: Witness) -> None:
    """Refuse a model in memory whose forward is not the one that its config describes."""
    if not isinstance(model, Decoder):
        raise CheckpointError(f"a {type(model).__name__} cannot be saved: load gives back a Decoder, nothing else")
    weight = model.lm_head.weight
    allowed = LIVE_TOLERANCE.get(weight.dtype, 0.25)
    with _resting(model), torch.autocast(weight.device.type, enabled=False):
        for name in ("plain", "padded", "packed", "far"):
            answer = witness.probes[name]
            found = _folded(model, answer.asked, _hidden(model, answer.asked)).numpy()
            want = np.array(answer.logits)
            size = float(np.abs(found - want).max())
            if not size <= allowed * (1 + np.abs(want).max()):
                raise CheckpointError(
                    f"the model differs from what its config describes by {size:.3g} on the probe {name!r}; "
                    "a model that was changed needs a config that says so"
                )


def _compared(model: Decoder, name: str, answer: Answer, tolerance: float) -> Iterator[Difference]:
    folds, loss, counted = _answer(model, answer.asked)
    want = np.array(answer.logits)
    yield Difference(name, "logits", float(np.abs(folds - want).max()), float(np.abs(want).max()) * tolerance)
    if (loss is None) != (answer.loss is None) or counted != answer.counted:
        yield Difference(name, "count of labels", abs((counted or 0) - (answer.counted or 0)) or 1, 0)
    elif loss is not None and answer.loss is not None:
        yield Difference(name, "loss", abs(loss - answer.loss), abs(answer.loss) * tolerance)


@torch.no_grad()
def _answer(model: Decoder, probe: Probe) -> tuple[np.ndarray, float | None, int | None]:
    """Folded logits, mean loss, and how many labels it counts."""
    if probe.training:
        try:
            model.train()
            with PortableDropout():
                return _folded(model, probe, _hidden(model, probe)).numpy(), None, None
        finally:
            model.eval()
    hidden_BTD = _hidden(model, probe)
    folds = _folded(model, probe, hidden_BTD).numpy()
    if probe.chunks:
        return folds, None, None
    loss = model.loss(hidden_BTD, causal(probe.batch()))
    return folds, float(loss.mean()), int(loss.count)


def _hidden(model: Decoder, probe: Probe) -> Tensor:
    device = model.lm_head.weight.device
    if not probe.chunks:
        return model(probe.batch().to(device), want="hidden").hidden
    cache = model.new_cache(len(probe.tokens), sum(probe.chunks))
    parts = [model(piece.to(device), cache=cache, want="hidden").hidden for piece in probe.pieces()]
    return torch.cat(parts, 1)


def _folded(model: Decoder, probe: Probe, hidden_BTD: Tensor) -> Tensor:
    """``[slots, FOLDS]`` in float64: the logits at the probe's slots, folded."""
    seen_SD = torch.cat([row_TD[list(slots)] for row_TD, slots in zip(hidden_BTD, probe.at, strict=True)])
    logits_1SV = model.head(seen_SD.unsqueeze(0))
    size = logits_1SV.shape[-1]
    bits = spread(np.arange(size))[:, None] >> np.arange(FOLDS, dtype=np.uint64) & np.uint64(1)
    signs_VF = torch.from_numpy(1.0 - 2.0 * bits.astype(np.float64))
    return logits_1SV[0].to("cpu", torch.float64) @ signs_VF * size**-0.5


@contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
    """``model`` in eval mode; every part gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _short(folds: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(_float32(value) for value in row) for row in folds)


def _float32(value: float) -> float:
    """The float32 next to ``value``, by its shortest decimals."""
    return float(str(np.float32(value)))
