"""From a config to the parts of a run. What can be refused is refused here, before the first step."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pellucid.checkpoints import store
from pellucid.data.loader import Loader
from pellucid.data.text import Corpus, Document, open_corpus
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, ConfigError
from pellucid.models.build import build
from pellucid.models.decoder import Decoder
from pellucid.training import state
from pellucid.training.allocator import keep_pages
from pellucid.training.config import TrainConfig
from pellucid.training.environment import NAME as ENVIRONMENT
from pellucid.training.environment import changes, listing, other_circumstances, recorded_data
from pellucid.training.optim import Optimizers, make_optimizers
from pellucid.training.precision import fastest
from pellucid.training.run_folder import RunFolder

_OPTIMIZER_SHARE = 2  # AdamW remembers two numbers for each weight


@dataclass
class Parts:
    """What a run consists of."""

    train: Corpus
    heldout: Corpus
    sample: list[Document]
    """The held-out documents of validations on the way."""
    tokenizer: Tokenizer
    loader: Loader
    model: Decoder
    optimizers: Optimizers
    counters: state.Counters
    facts: dict[str, Any]
    """What ``environment.json`` is to say of all this."""


def prepare(config: TrainConfig, run: RunFolder, last: Path | None, warn: Callable[[str], None]) -> Parts:
    """Open the data, make or load tokenizer and model, and go on from ``last``; nothing is written."""
    set_up_process(config)
    train, heldout = open_data(config)
    sample = draw(heldout, config.validation.documents)
    tokenizer = make_tokenizer(config, train) if last is None else Tokenizer.load(last / store.TOKENIZER)
    _check_fit(config, tokenizer)
    loader = Loader.from_corpus(
        train,
        tokenizer,
        "train",
        batch_size=config.batch_size,
        length=config.data.length,
        seed=config.seed,
    )
    model = build(config.model, seed=config.seed, device=config.device)
    model.gradient_checkpointing = config.checkpoint_activations
    _check_lengths(config, model)
    optimizers = make_optimizers(model, config.optimizer)
    run.refuse_without_room(_checkpoint_size(model))
    data = described_data(train, heldout, loader)
    compare_environment(run, data, last, warn)
    counters = state.Counters() if last is None else go_on(last, model, loader, optimizers)
    facts = {
        "seed": config.seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data": data,
        "tokenizer": tokenizer.digest(),
    }
    return Parts(train, heldout, sample, tokenizer, loader, model, optimizers, counters, facts)


def settled(config: TrainConfig) -> TrainConfig:
    """The config with everything decided that was left to this machine."""
    if config == config.settled("float32"):
        return config
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return config.settled(fastest(config.device))


def refuse_missing_device(name: str) -> None:
    """An error for a device that torch does not know, or that this machine does not have."""
    try:
        torch.zeros(1, device=name).add_(1).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:150]
        raise ConfigError(
            f"device {name!r} cannot be used here ({reason}); choose cpu, or one that torch offers"
        ) from error


def go_on(last: Path, model: Decoder, loader: Loader, optimizers: Optimizers) -> state.Counters:
    """Put model, loader, optimizers and random generators back to where ``last``, which is whole, was saved."""
    stored, own = store.load(last).model.state_dict(), model.state_dict()
    if odd := next((name for name in own if stored[name].dtype != own[name].dtype), None):
        raise CheckpointError(
            f"{last} holds {odd} as {stored[odd].dtype} but a run's weights are {own[odd].dtype}; "
            "put back the checkpoint that the run saved"
        )
    model.load_state_dict(stored)  # a copy: mapped memory lies otherwise, and might round otherwise
    counters = state.load_state(last / state.FOLDER, optimizers)
    loader.load_state_dict(counters.loader)
    return counters


def set_up_process(config: TrainConfig) -> None:
    """Threads, allocator and random generators, which belong to the whole process."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    keep_pages()
    state.seed_all(config.seed)


def open_data(config: TrainConfig) -> tuple[Corpus, Corpus]:
    """The corpora whose ``train`` and ``heldout`` sides are used."""
    data = config.data
    if data.heldout_source is None:
        corpus = open_corpus(data.source, text_field=data.text_field, heldout_share=data.heldout_share)
        return corpus, corpus
    return (
        open_corpus(data.source, text_field=data.text_field, heldout_share=0.0),
        open_corpus(data.heldout_source, text_field=data.text_field, heldout_share=1.0),
    )


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
    size = config.data.vocab_size or config.model.vocab_size
    return Tokenizer.train((document.text for document in train.documents("train")), vocab_size=size)


def described_data(train: Corpus, heldout: Corpus, loader: Loader) -> dict[str, str]:
    """Digests of the data, and of its files one by one."""
    said = {"train": train.digest(), "heldout": heldout.digest(), "tokens": loader.store.digest()}
    said["files"] = listing(train)
    if heldout is not train:
        said["heldout_files"] = listing(heldout)
    return said


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


def _check_lengths(config: TrainConfig, model: Decoder) -> None:
    for name, length in (("data.length", config.data.length), ("validation.length", config.window[0])):
        if model.max_length is not None and length > model.max_length:
            raise ConfigError(
                f"{name} is {length} but the model has positions for {model.max_length} tokens; "
                "shorten it, or raise model.position.max_positions"
            )


def _checkpoint_size(model: Decoder) -> int:
    return (1 + _OPTIMIZER_SHARE) * sum(p.numel() * p.element_size() for p in model.parameters())
