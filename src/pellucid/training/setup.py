"""From a config to the parts of a run. What can be refused is refused here, before the first step."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pellucid.checkpoints.loading import TOKENIZER, load
from pellucid.data.corpus import Corpus, Document
from pellucid.data.loader import Loader
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, ConfigError
from pellucid.models.build import build, why_unusable
from pellucid.models.model import EncoderDecoder, Model
from pellucid.training import state
from pellucid.training.config import TrainConfig
from pellucid.training.datasets import RunDatasets, open_data, training_texts
from pellucid.training.environment import NAME as ENVIRONMENT
from pellucid.training.environment import (
    changes,
    fastest_precision,
    keep_freed_memory,
    listing,
    other_circumstances,
    recorded_data,
)
from pellucid.training.evaluation import Evaluator
from pellucid.training.objective_builder import corrupted_lengths, special_tokens
from pellucid.training.objectives import CausalLMConfig, SpanCorruptionConfig
from pellucid.training.optim import OptimizerSet, make_optimizers
from pellucid.training.run_folder import RunFolder

_OPTIMIZER_SHARE = 2  # AdamW remembers two numbers for each weight


@dataclass
class RunComponents:
    """What a run consists of."""

    heldout: Corpus
    sample: list[Document]
    """The held-out documents of validations on the way, where these are in bits per byte."""
    evaluator: Evaluator | None
    """How validations go of any other objective than the next token."""
    classes: tuple[str, ...]
    """The names of the classes, in order, where something is classified."""
    tokenizer: Tokenizer
    loader: Loader
    model: Model
    optimizers: OptimizerSet
    trainer_state: state.TrainerState
    facts: dict[str, Any]
    """What ``environment.json`` is to say of all this."""


def prepare(config: TrainConfig, run: RunFolder, last: Path | None, warn: Callable[[str], None]) -> RunComponents:
    """Open the data, make or load tokenizer and model, and restore ``last``; nothing is written."""
    set_up_process(config)
    sides = train, heldout = open_data(config)
    by_bytes = isinstance(config.objective, CausalLMConfig)
    sample = draw(heldout, config.evaluation.num_documents) if by_bytes else []
    tokenizer = make_tokenizer(config, train) if last is None else Tokenizer.load(last / TOKENIZER)
    _check_fit(config, tokenizer)
    datasets = RunDatasets(config, sides, tokenizer, warn)
    loader = datasets.loader()
    model = build(config.model, seed=config.seed, device=config.device)
    model.gradient_checkpointing = config.gradient_checkpointing
    model.label_smoothing = config.label_smoothing_factor
    _check_lengths(config, model)
    evaluator = None if by_bytes else Evaluator(config, loader, datasets.heldout_loader, tokenizer.eos_id)
    optimizers = make_optimizers(model, config.optimizer)
    run.refuse_without_room(_checkpoint_size(model))
    data = data_digests(datasets, loader)
    compare_environment(run, data, last, warn)
    trainer_state = state.TrainerState() if last is None else restore_checkpoint(last, model, loader, optimizers)
    facts = {
        "seed": config.seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data": data,
        "tokenizer": tokenizer.digest(),
    }
    classes = datasets.classes
    return RunComponents(
        heldout, sample, evaluator, classes, tokenizer, loader, model, optimizers, trainer_state, facts
    )


def resolve_auto(config: TrainConfig) -> TrainConfig:
    """The config with everything decided that was left to this machine."""
    if config == config.resolve_auto("float32"):
        return config
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    return config.resolve_auto(fastest_precision(config.device))


def refuse_missing_device(name: str) -> None:
    """An error for a device that torch does not know, or that this machine does not have."""
    if reason := why_unusable(name):
        raise ConfigError(f"device {name!r} cannot be used here ({reason}); choose cpu, or one that torch offers")


def restore_checkpoint(last: Path, model: Model, loader: Loader, optimizers: OptimizerSet) -> state.TrainerState:
    """Put model, loader, optimizers and random generators back to where ``last``, which is whole, was saved."""
    stored, own = load(last).model.state_dict(), model.state_dict()
    if odd := next((name for name in own if stored[name].dtype != own[name].dtype), None):
        raise CheckpointError(
            f"{last} holds {odd} as {stored[odd].dtype} but a run's weights are {own[odd].dtype}; "
            "put back the checkpoint that the run saved"
        )
    model.load_state_dict(stored)  # a copy: mapped memory lies otherwise, and might round otherwise
    trainer_state = state.load_state(last / state.FOLDER, optimizers)
    loader.load_state_dict(trainer_state.loader)
    return trainer_state


def set_up_process(config: TrainConfig) -> None:
    """Threads, allocator and random generators, which belong to the whole process."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    keep_freed_memory()
    state.seed_all(config.seed)


def draw(heldout: Corpus, most: int | None) -> list[Document]:
    """Up to ``most`` held-out documents, spread over the corpus by a hash of their names: always the same."""
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


def data_digests(datasets: RunDatasets, loader: Loader) -> dict[str, str]:
    """Digests of the data, and of its files one by one."""
    train, heldout = datasets.sides
    digests = datasets.digests(loader) | {"files": listing(train)}
    if heldout is not train:
        digests["heldout_files"] = listing(heldout)
    return digests


def compare_environment(run: RunFolder, data: dict[str, str], last: Path | None, warn: Callable[[str], None]) -> None:
    """Hold the data and the machine against what the run noted; other data than was learnt from is refused."""
    noted = run.environment()
    before = recorded_data(noted)
    other = [name for name in ("tokens", "heldout") if before.get(name, data[name]) != data[name]]
    if last is None:
        if other or before.get("train", data["train"]) != data["train"]:
            warn(
                f"the data changed since the run in {run.path} began ({_changed(before, data)}); it had saved nothing "
                "yet, so it starts anew with the data as it is"
            )
        return
    if other:
        what = "held-out data" if other == ["heldout"] and data["train"] != data["heldout"] else "data"
        raise ConfigError(
            f"the {what} is not that of the run in {run.path} ({_changed(before, data)}); put it back as it was, "
            "or start a new run in another folder"
        )
    if not before:
        warn(
            f"{run.path / ENVIRONMENT} is lost: whether threads, versions and held-out data are those of the run "
            "cannot be told"
        )
    elif differs := other_circumstances(noted):
        warn(
            f"{differs}: the numbers are exactly those of an undisturbed run only where these are the same; "
            "stop and set them back if that matters"
        )


def _changed(before: dict[str, str], data: dict[str, str]) -> str:
    """In words, what is other data than before."""
    found = [changes(before.get(name, ""), data.get(name, "")) for name in ("files", "heldout_files")]
    return "; ".join(filter(None, found)) or "which files cannot be told"


def _check_fit(config: TrainConfig, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but model.vocab_size is "
            f"{config.model.vocab_size}; set model.vocab_size to {tokenizer.vocab_size} or more"
        )
    if tokenizer.bos_id is None:
        raise ConfigError("the tokenizer has no begin token, and without one a document's first token is not learnt")


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


def _checkpoint_size(model: Model) -> int:
    return (1 + _OPTIMIZER_SHARE) * sum(p.numel() * p.element_size() for p in model.parameters())
