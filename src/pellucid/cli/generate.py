"""``pellucid generate``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from pellucid.cli import common

Prompts = Annotated[
    list[str],
    typer.Argument(metavar="PROMPT", help="Texts to go on from; - reads one from standard input.", show_default=False),
]
Stops = Annotated[
    list[str] | None, typer.Option("--stop", help="End at this text; may be given again.", show_default=False)
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Run the whole text again for each token: slow, and equal.")]


def generate(
    checkpoint: common.Checkpoint,
    prompts: Prompts,
    max_new_tokens: common.NewTokens = 64,
    temperature: common.Temperature = 0.0,
    top_k: common.TopK = None,
    top_p: common.TopP = 1.0,
    min_p: common.MinP = 0.0,
    seed: common.Seed = None,
    stop: Stops = None,
    no_cache: NoCache = False,
    as_json: common.Json = False,
) -> None:
    """Go on from one or more prompts.

    \b
    Example:
      pellucid generate my-model "def fibonacci(n):" --max-new-tokens 80
    """
    from pellucid.checkpoints import load
    from pellucid.generation import GenerationParams
    from pellucid.generation import generate as complete

    params = GenerationParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    texts = [_standard_input() if prompt == "-" else prompt for prompt in prompts]
    loaded = load(checkpoint)
    if as_json:
        found = complete(loaded, texts, params, use_cache=not no_cache)
        common.print_json([{"prompt": t, **c.to_dict()} for t, c in zip(texts, found, strict=True)])
    elif len(texts) == 1:
        _stream(loaded, texts[0], params, not no_cache)
    else:
        for text, completion in zip(texts, complete(loaded, texts, params, use_cache=not no_cache), strict=True):
            common.say(f"{text}{completion.text}\n\n")


def _stream(loaded: Any, text: str, params: Any, use_cache: bool) -> None:
    from pellucid.generation import stream

    pieces = stream(loaded, [text], params, use_cache=use_cache)
    common.say(text)
    for _, piece in pieces:
        common.say(piece)
    common.say("\n")


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not {error.encoding} text; convert it first") from None
