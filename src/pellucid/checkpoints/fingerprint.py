"""The witness: what a folder's forward gives on its probes, kept beside the weights and asked again.

A digest says that bytes are the same; the witness says that they still *mean* the same. Each probe's logits are
reduced to :data:`PROJECTIONS` numbers an output by fixed signs, computed in float64, kept as float32, and must come
back within :data:`TOLERANCE` of the largest of them: on any machine, and whatever dtype the weights are stored in. A
change that moves no output by that much cannot be seen, and does not matter in float32 either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import nn

from pellucid.checkpoints.load_report import MismatchError
from pellucid.checkpoints.probe_set import Slot, WitnessProbe, probes_of
from pellucid.checkpoints.reference_forward import (
    PROJECTIONS,
    Read,
    hidden_states,
    probe_outputs,
    random_projection,
    reference_model,
    stream_dtypes,
)
from pellucid.checkpoints.tokenizer_fingerprint import TokenizerFingerprint, compare_tokenizer
from pellucid.configfile import Config
from pellucid.data.chat import ChatTemplate
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, InputError
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.model import Model
from pellucid.nn.moe import Router

TOLERANCE = 1e-6
"""Allowed difference, relative to the largest number of the probe. Float32 alone takes 6e-8 of it."""

LIVE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.25}
"""How far a model in memory, in its own dtype and on its own device, may be from the exact forward to be saved."""

Projection = Annotated[tuple[float, ...], Field(min_length=PROJECTIONS, max_length=PROJECTIONS)]


class ProbeRecord(Config):
    """What a probe must give."""

    asked: WitnessProbe
    logits: tuple[Projection, ...]
    """The folded logits of each slot in ``asked.at``, row after row, or of each document."""
    loss: float | None = None
    """The head's own mean loss over labels that follow from the input; none with a cache."""
    counted: Slot | None = None

    @model_validator(mode="after")
    def _one_a_slot(self) -> ProbeRecord:
        if len(self.logits) != self.asked.outputs:
            raise ValueError(f"logits has {len(self.logits)} entries for {self.asked.outputs} outputs")
        return self


class Witness(Config):
    """Probes and what they must give."""

    tolerance: Annotated[float, Field(gt=0, le=TOLERANCE)] = TOLERANCE
    stream: Annotated[tuple[str, ...], Field(max_length=1 << 13)]
    """The type of the stream behind each layer with weights of its own, an encoder's first, in a bfloat16 model."""
    probes: dict[str, ProbeRecord]
    text: TokenizerFingerprint | None = None
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
    model, probes = reference_model(config, read, tied), probes_of(config)
    answers = {name: probe_outputs(model, probe) for name, probe in probes.items()}
    for name, (folds, loss, _) in answers.items():
        if not np.isfinite([*np.ravel(folds), loss or 0.0]).all():
            raise CheckpointError(
                f"the model gives NaN or infinity on the probe {name!r}, so nothing could verify its folder; "
                "save weights from before they were damaged"
            )
    kept = {
        name: ProbeRecord(
            asked=probe, logits=_short(folds), loss=None if loss is None else _float32(loss), counted=count
        )
        for (name, probe), (folds, loss, count) in zip(probes.items(), answers.values(), strict=True)
    }
    return Witness(probes=kept, stream=_stream(config, read, tied, probes["plain"]))


def _stream(config: ModelConfig, read: Read, tied: Mapping[str, str], probe: WitnessProbe) -> tuple[str, ...]:
    return stream_dtypes(reference_model(config, read, tied, torch.bfloat16), probe)


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
        model = reference_model(config, read, tied)
        for name, kept_answer in witness.probes.items():
            for difference in _compared(model, name, kept_answer, witness.tolerance):
                found.append(difference)
                if not difference.passed:
                    raise WitnessError(where, tuple(found))
        stream = _stream(config, read, tied, probes["plain"])
    except (InputError, RuntimeError, ArithmeticError, MemoryError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = f"{str(error)[:200]}; its contract was changed"
        raise MismatchError(f"{where} cannot be asked its probes: {reason}") from error
    others = sum(a != b for a, b in zip_longest(stream, witness.stream))
    found.append(Difference("stream", "types behind layers", others, 0))
    if others:
        raise WitnessError(where, tuple(found))
    for name, kept_answer in witness.probes.items():
        if kept_answer.asked != probes[name]:
            raise MismatchError(f"{where} was asked another {name!r} than its model is asked; its contract was changed")
    return tuple(found)


def check_text(
    where: object, kept: TokenizerFingerprint | None, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> tuple[Difference, ...]:
    """Ask tokenizer and chat template again, up to the first difference, which a :class:`WitnessError` names."""
    if (kept is None) != (tokenizer is None) or (kept is not None and (kept.chats is None) != (template is None)):
        raise MismatchError(f"{where} has a witness of other text files than it holds; its contract was changed")
    found: list[Difference] = []
    if kept is not None and tokenizer is not None:
        for difference in (Difference(*parts, 0) for parts in compare_tokenizer(kept, tokenizer, template)):
            found.append(difference)
            if not difference.passed:
                raise WitnessError(where, tuple(found), "text files")
    return tuple(found)


@torch.no_grad()
def check_live(model: nn.Module, config: ModelConfig, witness: Witness) -> None:
    """Refuse a model in memory whose forward is not the one that its config describes."""
    wanted = type(build(config, device="meta"))
    if not isinstance(model, wanted):
        raise CheckpointError(
            f"a {type(model).__name__} cannot be saved: load gives back a {wanted.__name__}, nothing else"
        )
    allowed = LIVE_TOLERANCE.get(model.dtype, 0.25)
    routes = any(isinstance(part, Router) for part in model.modules())
    # rounding sends single tokens to other experts in a narrow type; most of them stay
    worst = np.median if routes and model.dtype.itemsize < 4 else np.max
    with _eval_mode(model), torch.autocast(model.device.type, enabled=False):
        for name in ("plain", "padded", "packed", "far"):
            asked = witness.probes[name].asked
            found = random_projection(model, asked, hidden_states(model, asked)).numpy()
            want = np.array(witness.probes[name].logits)
            size = float(worst(np.abs(found - want)))
            if not size <= allowed * (1 + np.abs(want).max()):
                raise CheckpointError(
                    f"the model differs from what its config describes by {size:.3g} on the probe {name!r}; "
                    "a model that was changed needs a config that says so"
                )


def _compared(model: Model, name: str, kept: ProbeRecord, tolerance: float) -> Iterator[Difference]:
    folds, loss, counted = probe_outputs(model, kept.asked)
    want = np.array(kept.logits)
    yield Difference(name, "logits", float(np.abs(folds - want).max()), float(np.abs(want).max()) * tolerance)
    if (loss is None) != (kept.loss is None) or counted != kept.counted:
        yield Difference(name, "count of labels", abs((counted or 0) - (kept.counted or 0)) or 1, 0)
    elif loss is not None and kept.loss is not None:
        yield Difference(name, "loss", abs(loss - kept.loss), abs(kept.loss) * tolerance)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
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
