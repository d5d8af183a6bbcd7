"""``pellucid chat``: plain turns."""

from __future__ import annotations

import sys
from typing import Any

import typer

from pellucid.cli import common

USER, REPLY = "User: ", "Assistant: "


def chat(
    checkpoint: common.Checkpoint,
    max_new_tokens: common.NewTokens = 200,
    temperature: common.Temperature = 0.8,
    top_k: common.TopK = None,
    top_p: common.TopP = 0.95,
    min_p: common.MinP = 0.0,
    seed: common.Seed = None,
) -> None:
    """Talk with a model in plain turns.

    /exit or the end of the input ends it. The model reads the whole transcript before each reply; when it is
    longer than the model's positions, the oldest turns are forgotten.

    \b
    Example:
      pellucid chat my-model --temperature 0.7
    """
    from pellucid.checkpoints import load
    from pellucid.errors import LengthError
    from pellucid.generation import GenerationParams

    params = GenerationParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=("\n" + USER,),
    )
    loaded, turns = load(checkpoint), list[str]()
    while (line := _line()) is not None:
        if not line:
            continue
        turns.append(f"{USER}{line}\n{REPLY}")
        try:
            turns[-1] += _reply(loaded, turns, params).strip() + "\n"
        except LengthError as error:
            typer.echo(f"error: {error}", err=True)
            turns.pop()


def _line() -> str | None:
    """What the person says next; None at the end."""
    if sys.stdin.isatty():
        common.say("> ")
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"the input is not {error.encoding} text; convert it first") from None
    said = line.strip()
    return None if not line or said == "/exit" else said


def _reply(loaded: Any, turns: list[str], params: Any) -> str:
    """Speak the reply to the last turn; older turns are dropped from ``turns`` until it fits."""
    from pellucid.errors import LengthError
    from pellucid.generation import stream

    while True:
        try:
            pieces = stream(loaded, ["".join(turns).rstrip(" ")], params)
            break
        except LengthError:
            if len(turns) == 1:
                raise
            del turns[0]
            typer.echo("(the oldest turn was forgotten)", err=True)
    spoken: list[str] = []
    for _, piece in pieces:
        text = piece if any(spoken) else piece.lstrip()
        common.say(text)
        spoken.append(text)
    common.say("\n")
    return "".join(spoken)
