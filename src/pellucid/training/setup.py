"""What a run starts from: the parts that its config describes, and the newest whole checkpoint of one that is resumed.

Everything that can be refused is refused here, before the first step and before anything is written.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pellucid.checkpoints.loading import TOKENIZER, load, open_folder
from pellucid.checkpoints.verify import verify
from pellucid.configfile.base_config import config_diff, format_differences, format_value
from pellucid.data.corpus import Corpus, Document
from pellucid.data.loader import Loader
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, ConfigError, InputError, RunError
from pellucid.messages import join_some
from pellucid.models.build import build, why_unusable
from pellucid.models.model import EncoderDecoder, Model
from pellucid.training import state
from pellucid.training.config import TrainConfig
from pellucid.training.datasets import RunDatasets, corrupted_lengths, open_data, special_tokens, training_texts
from pellucid.training.environment import compare_environment, fastest_precision, keep_freed_memory, listing
from pellucid.training.evaluation import Evaluator
from pellucid.training.loggers import MetricsLog
from pellucid.training.objectives import CausalLMConfig, SpanCorruptionConfig
from pellucid.training.optim import make_optimizers
from pellucid.training.results import Listener, Validation, Warned
from pellucid.training.run_folder import RunFolder, step_name
from pellucid.training.step import OptimizerSet, progress

_OPTIMIZER_SHARE = 2  # AdamW keeps two numbers for each weight
LENGTH = frozenset({"max_steps", "max_minutes"})
"""The keys that say how long a run is."""
_FREE = LENGTH | {"eval_steps", "evaluation", "save_steps", "save_total_limit", "num_threads", "device"}


@dataclass
class RunComponents:
    """The parts of a run."""

    heldout: Corpus
    sample: list[Document]
    """The held-out documents of evaluations during the run, where these are in bits per byte."""
    evaluator: Evaluator | None
    """The evaluation of every other objective than causal LM."""
    label_names: tuple[str, ...]
    """The names of the classes, in order, of a classification."""
    tokenizer: Tokenizer
    loader: Loader
    model: Model
    optimizers: OptimizerSet
    trainer_state: state.TrainerState
    facts: dict[str, Any]
    """What ``environment.json`` records besides the machine."""


def prepare(config: TrainConfig, run: RunFolder, last: Path | None, warn: Callable[[str], None]) -> RunComponents:
    """Open the data, make or load tokenizer and model, and restore ``last``; nothing is written."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    keep_freed_memory()
    state.seed_all(config.seed)
    sides = train, heldout = open_data(config)
    by_bytes = isinstance(config.objective, CausalLMConfig)
    sample = draw(heldout, config.evaluation.num_documents) if by_bytes else []
    tokenizer = make_tokenizer(config, train) if last is None else Tokenizer.load(last / TOKENIZER)
    _check_tokenizer(config, tokenizer)
    datasets = RunDatasets(config, sides, tokenizer, warn)
    loader = datasets.loader()
    model = build(config.model, seed=config.seed, device=config.device)
    model.gradient_checkpointing = config.gradient_checkpointing
    model.label_smoothing = config.label_smoothing_factor
    _check_lengths(config, model)
    evaluator = None if by_bytes else Evaluator(config, loader, datasets.heldout_loader, tokenizer.eos_id)
    optimizers = make_optimizers(model, config.optimizer)
    run.refuse_without_room((1 + _OPTIMIZER_SHARE) * sum(p.numel() * p.element_size() for p in model.parameters()))
    data = datasets.digests(loader) | {"files": listing(train)}
    if heldout is not train:
        data["heldout_files"] = listing(heldout)
    compare_environment(run.path, data, last is not None, warn)
    trainer_state = state.TrainerState() if last is None else restore_checkpoint(last, model, loader, optimizers)
    facts = {
        "seed": config.seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data": data,
        "tokenizer": tokenizer.digest(),
    }
    return RunComponents(
        heldout, sample, evaluator, datasets.label_names, tokenizer, loader, model, optimizers, trainer_state, facts
    )


def resolve_auto(config: TrainConfig) -> TrainConfig:
    """The config with ``auto`` replaced by what is faster on this machine."""
    if config == config.resolve_auto("float32"):
        return config
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    return config.resolve_auto(fastest_precision(config.device))


def refuse_missing_device(name: str) -> None:
    """Raises for a device that torch does not know, or that this machine does not have."""
    if reason := why_unusable(name):
        raise ConfigError(f"device {name!r} cannot be used here ({reason}); choose cpu, or one that torch offers")


def restore_checkpoint(last: Path, model: Model, loader: Loader, optimizers: OptimizerSet) -> state.TrainerState:
    """Restore model, loader, optimizers and random generators from ``last``, which is whole."""
    stored, own = load(last).model.state_dict(), model.state_dict()
    if odd := next((name for name in own if stored[name].dtype != own[name].dtype), None):
        raise CheckpointError(
            f"{last} holds {odd} as {stored[odd].dtype} but a run's weights are {own[odd].dtype}; "
            "put back the checkpoint that the run saved"
        )
    model.load_state_dict(stored)  # a copy: mapped memory is aligned differently, and might round differently
    trainer_state = state.load_state(last / state.FOLDER, optimizers)
    loader.load_state_dict(trainer_state.loader)
    return trainer_state


def draw(heldout: Corpus, most: int | None) -> list[Document]:
    """Up to ``most`` held-out documents, chosen by a hash of their names: always the same."""
    documents = heldout.documents("heldout")
    if most is None:
        return list(documents)
    return heapq.nsmallest(most, documents, key=lambda d: hashlib.sha256(d.name.encode()).digest())


def make_tokenizer(config: TrainConfig, train: Corpus) -> Tokenizer:
    """The tokenizer that the config names, or one trained on the training documents."""
    if config.data.tokenizer is not None:
        return Tokenizer.load(config.data.tokenizer)
    return Tokenizer.train(
        training_texts(config, train),
        vocab_size=config.data.vocab_size or config.model.vocab_size,
        kind=config.data.tokenizer_kind,
        special_tokens=special_tokens(config),
    )


def _check_tokenizer(config: TrainConfig, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but model.vocab_size is "
            f"{config.model.vocab_size}; set model.vocab_size to {tokenizer.vocab_size} or more"
        )
    if tokenizer.bos_id is None:
        raise ConfigError("the tokenizer has no begin token, and without one a document's first token has no label")


def _check_lengths(config: TrainConfig, model: Model) -> None:
    most, source = model.max_length, config.data.max_source_length or config.data.max_length
    lengths = [("data.max_length", config.data.max_length, most)]
    if isinstance(config.objective, SpanCorruptionConfig):
        source, cut_out = corrupted_lengths(config.objective, config.data.max_length)
        lengths = [("what is cut out of data.max_length", cut_out, most)]
    if isinstance(config.objective, CausalLMConfig):
        lengths.append(("evaluation.max_length", config.window[0], most))
    if isinstance(model, EncoderDecoder):
        lengths.append(("the source", source, model.max_source_length))
    for name, length, limit in lengths:
        if limit is not None and length > limit:
            raise ConfigError(
                f"{name} is {length} but the model has positions for {limit} tokens; "
                "shorten it, or raise model.position.max_position_embeddings"
            )


# ---- a run that is resumed


def reopen(run: RunFolder, config: TrainConfig, *, exactly: bool = False) -> TrainConfig:
    """Lock the folder of a run that is resumed; returns ``config`` with ``auto`` resolved as when the run began.

    Length and bookkeeping may differ from the run's own configuration; with ``exactly``, nothing may.
    """
    if not run.holds_run():
        raise RunError(f"there is no run in {run.path}: leave --resume out (in Python: resume)")
    stored = TrainConfig.from_file(run.config)
    if stored != stored.resolve_auto("float32"):
        raise ConfigError(
            f"{run.config} leaves a precision to be measured, but this run began with one; "
            "put back float32 or bfloat16, whichever it was"
        )
    config = config.resolve_auto(stored.resolved_precision, getattr(stored.optimizer, "precision", None))
    found = config_diff(stored, config)
    run.changed = {difference.top for difference in found}
    free = set() if exactly else _FREE
    if refused := [difference for difference in found if difference.top not in free]:
        same = "resume with the same configuration, or start a new run in another folder"
        new = "--resume continues with the new one (in Python: resume=True), another folder starts a new run"
        raise ConfigError(
            f"the configuration is not that of the run in {run.path}: {format_differences(refused)}; "
            + (new if run.changed <= _FREE else same)
        )
    run.lock()
    return config


@dataclass(frozen=True)
class ResumePoint:
    """``checkpoint`` is None for a run that has saved nothing yet; ``passed``: newer ones and their faults."""

    checkpoint: Path | None
    trainer_state: state.TrainerState
    passed: tuple[tuple[Path, str], ...] = ()
    pointer: str = ""
    """What is wrong with ``last`` itself."""


def find_resume_point(run: RunFolder) -> ResumePoint:
    """The newest whole checkpoint of ``run``. A run that has some, but none that is whole, is refused.

    Nothing is changed.
    """
    pointer = ""
    try:
        target = run.read_pointer("last")
        if target is not None and not target.is_dir():
            pointer = f"{run.path / 'last'} points to {target.name}, which is not there"
    except CheckpointError as error:
        pointer = str(error)
    passed: list[tuple[Path, str]] = []
    for path in reversed(run.saved()):
        try:
            trainer_state = examine(path)
        except (InputError, OSError) as error:
            passed.append((path, str(error)))
        else:
            return ResumePoint(path, trainer_state, tuple(passed), pointer)
    if passed:
        reasons = join_some([f"{path.name}: {reason[:300]}" for path, reason in passed], 3, "; ")
        raise CheckpointError(
            f"no checkpoint of the run in {run.path} can be used ({reasons}); nothing was changed: "
            "put back a good copy of one, or start a new run in another folder"
        )
    if pointer:
        raise CheckpointError(
            f"{pointer}, and {run.checkpoints} holds no step; put the step's folder back, or remove "
            f"{run.path / 'last'} to begin the run again"
        )
    return ResumePoint(None, state.TrainerState())


def examine(path: Path) -> state.TrainerState:
    """The trainer state of the checkpoint at ``path``. Every byte of it is checked; raises where it is not whole."""
    found = verify(path, "digests")
    if found.problem:
        raise CheckpointError(found.problem)
    if not (path / TOKENIZER).is_file():
        raise CheckpointError(f"{path} has no {TOKENIZER}, so it is not a run's checkpoint")
    trainer_state = state.read_trainer_state(path / state.FOLDER)
    if path.name != step_name(trainer_state.step):
        raise CheckpointError(f"{path} holds the state of step {trainer_state.step}; it was put together from two")
    return trainer_state


def check_resume_point(config: TrainConfig, run: RunFolder, point: ResumePoint) -> None:
    """Raises for a checkpoint of another model, and for a new length that is shorter than the run already is."""
    if point.checkpoint is not None:
        stored = open_folder(point.checkpoint).contract.model
        for path, own, found in config_diff(config.model, stored, "model"):
            raise CheckpointError(
                f"{point.checkpoint} is of another model: {path}: the run has {format_value(own)}, the checkpoint "
                f"{format_value(found)}; put back the checkpoint that the run saved, or move this one away"
            )
    if run.changed & LENGTH:
        at = point.trainer_state
        for name, limit, reached in (("steps", config.max_steps, at.step), ("minutes", config.max_minutes, at.minutes)):
            if limit is not None and reached > limit:
                raise ConfigError(
                    f"max_{name} is {limit:g}, but the run in {run.path} has reached {reached:g} {name}; "
                    "give as many or more, or start a new run in another folder"
                )


def final(config: TrainConfig, run: RunFolder, point: ResumePoint) -> Validation | None:
    """The final evaluation of a finished run; None where something is left to do."""
    trainer_state = point.trainer_state
    if point.checkpoint is None or run.changed & {"eval_steps", "evaluation"}:
        return None
    length_is_known = config.max_minutes is None or run.changed & LENGTH
    if length_is_known and progress(config, trainer_state.step, trainer_state.minutes) < 1:
        return None
    return MetricsLog(run.metrics).final(trainer_state.step)


def repair_folder(run: RunFolder, point: ResumePoint, listener: Listener) -> None:
    """Repair the folder, and warn about checkpoints that were passed over."""
    trainer_state = point.trainer_state
    moved = run.repair_folder(point.checkpoint, {path for path, _ in point.passed}, trainer_state.best_step)
    if point.checkpoint is None:
        return
    where = f"the run in {run.path} continues from {point.checkpoint.name}"
    for path, reason in point.passed:
        listener(Warned(f"{path.name} cannot be used ({reason}) and is moved to {moved[path].name}; {where}"))
    if point.pointer:
        listener(Warned(f"{point.pointer}; {where}, the newest that is whole"))
    if trainer_state.best_step is not None and run.read_pointer("best") is None:
        listener(Warned(f"{step_name(trainer_state.best_step)}, the best so far, is not there any more; {where}"))
