"""The witness: the outputs of a folder's model on its probes, stored beside the weights and computed again later.

A digest proves that bytes are the same; the witness proves that they still *mean* the same. Each probe's logits are
reduced to a few numbers an output by fixed signs, computed in float64, stored as float32, and must come back within a
millionth of the largest of them: on any machine, and whatever dtype the weights are stored in. A change that moves no
output by that much cannot be seen, and does not matter in float32 either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from pellucid.checkpoints.contract import MismatchError, ProbeRecord, Witness, WitnessProbe
from pellucid.checkpoints.load_report import stored_tensors
from pellucid.checkpoints.probe_set import probes_of
from pellucid.checkpoints.reference_forward import (
    hidden_states,
    probe_outputs,
    random_projection,
    reference_model,
    stream_dtypes,
)
from pellucid.checkpoints.tokenizer_fingerprint import TokenizerFingerprint, compare_tokenizer, tokenizer_fingerprint
from pellucid.checkpoints.weights import ReadTensor
from pellucid.data.chat import ChatTemplate
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, InputError
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.model import Model
from pellucid.nn.moe import Router
from pellucid.probe import eval_mode

LIVE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.25}
"""How far a model in memory, in its own dtype and on its own device, may be from the reference forward to be saved."""


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
    """The outputs are not those of the witness; ``differences`` has all that were compared, the last too large."""

    def __init__(self, where: object, differences: tuple[Difference, ...], changed: str = "weights") -> None:
        first = differences[-1]
        super().__init__(
            f"{where} does not have the outputs it had when it was saved: probe {first.probe!r} differs first, its "
            f"{first.what} by {first.size:.3g}, allowed {first.allowed:.3g}; its {changed} or its contract were changed"
        )
        self.differences = differences


def live_witness(
    model: nn.Module, config: ModelConfig, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> Witness:
    """The witness of a model in memory, whose forward must be that of ``config``, and of what goes with it."""
    stored, tied = stored_tensors(model)
    witness = witness_of(config, lambda name: stored[name].detach(), tied)
    check_live(model, config, witness)
    return witness.model_copy(
        update={"text": None if tokenizer is None else tokenizer_fingerprint(tokenizer, template)}
    )


def witness_of(config: ModelConfig, read: ReadTensor, tied: Mapping[str, str]) -> Witness:
    """Run the probes of ``config`` with these weights. Weights whose outputs are NaN or infinite have no witness."""
    model, probes = reference_model(config, read, tied), probes_of(config)
    records = {}
    for name, probe in probes.items():
        outputs, loss, count = probe_outputs(model, probe)
        if not np.isfinite([*np.ravel(outputs), loss or 0.0]).all():
            raise CheckpointError(
                f"the model gives NaN or infinity on the probe {name!r}, so nothing could verify its folder; "
                "save weights from before they were damaged"
            )
        logits = tuple(tuple(map(_float32, row)) for row in outputs)
        rounded = None if loss is None else _float32(loss)
        records[name] = ProbeRecord(probe=probe, logits=logits, loss=rounded, num_targets=count)
    return Witness(probes=records, stream=_stream(config, read, tied, probes["plain"]))


def check_witness(
    where: object,
    witness: Witness,
    config: ModelConfig,
    read: ReadTensor,
    tied: Mapping[str, str],
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
) -> tuple[Difference, ...]:
    """Compute all outputs again, in order, up to the first that differs, which a :class:`WitnessError` names."""
    found: list[Difference] = []
    for changed, differences in (
        ("weights", _output_differences(where, witness, config, read, tied)),
        ("text files", _text_differences(where, witness.text, tokenizer, template)),
    ):
        for difference in differences:
            found.append(difference)
            if not difference.passed:
                raise WitnessError(where, tuple(found), changed)
    return tuple(found)


def _output_differences(
    where: object, witness: Witness, config: ModelConfig, read: ReadTensor, tied: Mapping[str, str]
) -> Iterator[Difference]:
    probes = probes_of(config)
    if list(probes) != list(witness.probes):
        raise MismatchError(
            f"{where} has a witness with the probes {', '.join(witness.probes)[:200]}, but its model has "
            f"{', '.join(probes)}; its contract was changed"
        )
    try:
        model = reference_model(config, read, tied)
        for name, record in witness.probes.items():
            yield from _compare(model, name, record, witness.tolerance)
        stream = _stream(config, read, tied, probes["plain"])
    except (InputError, RuntimeError, ArithmeticError, MemoryError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = f"{str(error)[:200]}; its contract was changed"
        raise MismatchError(f"{where} cannot run its probes: {reason}") from error
    yield Difference("stream", "types after layers", sum(a != b for a, b in zip_longest(stream, witness.stream)), 0)
    for name, record in witness.probes.items():
        if record.probe != probes[name]:
            raise MismatchError(f"{where} has another probe {name!r} than its model; its contract was changed")


def _text_differences(
    where: object, noted: TokenizerFingerprint | None, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> Iterator[Difference]:
    if (noted is None) != (tokenizer is None) or (noted is not None and (noted.chats is None) != (template is None)):
        raise MismatchError(f"{where} has a witness of other text files than it holds; its contract was changed")
    if noted is not None and tokenizer is not None:
        yield from (Difference(*parts, 0) for parts in compare_tokenizer(noted, tokenizer, template))


def check_live(model: nn.Module, config: ModelConfig, witness: Witness) -> None:
    """Refuse a model in memory whose forward is not the one that its config describes."""
    wanted = type(build(config, device="meta"))
    if not isinstance(model, wanted):
        raise CheckpointError(
            f"a {type(model).__name__} cannot be saved: load returns a {wanted.__name__}, nothing else"
        )
    allowed = LIVE_TOLERANCE.get(model.dtype, 0.25)
    routes = any(isinstance(part, Router) for part in model.modules())
    # rounding sends single tokens to other experts in a narrow type; most of them stay
    worst = np.median if routes and model.dtype.itemsize < 4 else np.max
    with eval_mode(model), torch.autocast(model.device.type, enabled=False):
        for name in ("plain", "padded", "packed", "far"):
            probe = witness.probes[name].probe
            found = random_projection(model, probe, hidden_states(model, probe)).numpy()
            want = np.array(witness.probes[name].logits)
            size = float(worst(np.abs(found - want)))
            if not size <= allowed * (1 + np.abs(want).max()):
                raise CheckpointError(
                    f"the model differs from what its config describes by {size:.3g} on the probe {name!r}; "
                    "a model that was changed needs a config that says so"
                )


def _stream(config: ModelConfig, read: ReadTensor, tied: Mapping[str, str], probe: WitnessProbe) -> tuple[str, ...]:
    return stream_dtypes(reference_model(config, read, tied, torch.bfloat16), probe)


def _compare(model: Model, name: str, record: ProbeRecord, tolerance: float) -> Iterator[Difference]:
    outputs, loss, count = probe_outputs(model, record.probe)
    want = np.array(record.logits)
    yield Difference(name, "logits", float(np.abs(outputs - want).max()), float(np.abs(want).max()) * tolerance)
    if (loss is None) != (record.loss is None) or count != record.num_targets:
        yield Difference(name, "count of targets", abs((count or 0) - (record.num_targets or 0)) or 1, 0)
    elif loss is not None and record.loss is not None:
        yield Difference(name, "loss", abs(loss - record.loss), abs(record.loss) * tolerance)


def _float32(value: float) -> float:
    """The float32 next to ``value``, by its shortest decimals."""
    return float(str(np.float32(value)))
