"""``pellucid chat``: turns through the model's chat template."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from pellucid.cli import common

STOP = "\nUser: "
"""Ends a reply of a model without a template of its own, which goes on with the other's turn."""

System = Annotated[str | None, typer.Option(help="What the model is told before the first turn.", show_default=False)]


def chat(
    checkpoint: common.Checkpoint,
    system: System = None,
    max_new_tokens: common.NewTokens = 200,
    temperature: common.Temperature = 0.8,
    top_k: common.TopK = None,
    top_p: common.TopP = 0.95,
    min_p: common.MinP = 0.0,
    seed: common.Seed = None,
) -> None:
    """Talk with a model through its chat template, or in plain turns if it has none.

    /exit or the end of the input ends it. The model reads the whole transcript before each reply; when it is
    longer than the model's positions, the oldest turns are forgotten.

    \b
    Example:
      pellucid chat my-model --system "Answer in one line." --temperature 0.7
    """
    from pellucid.checkpoints import load
    from pellucid.errors import ArgumentError, LengthError
    from pellucid.generation import GenerationParams

    params = GenerationParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    loaded = load(checkpoint)
    if loaded.tokenizer is None:
        raise ArgumentError(f"{checkpoint} has no tokenizer; a chat needs one")
    told = _Transcript(loaded, system, params)
    failed = answered = 0
    while (line := _line()) is not None:
        if not line:
            continue
        try:
            told.reply(line)
            answered += 1
        except LengthError as error:
            failed += 1
            typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2 if failed and not answered else 0)


class _Transcript:
    """The turns so far. Each reply is drawn after all of them, rendered anew."""

    def __init__(self, loaded: Any, system: str | None, params: Any) -> None:
        from pellucid.data.chat import PLAIN, reply_end

        self.loaded, self.template = loaded, loaded.chat_template or PLAIN
        end = reply_end(loaded.tokenizer, self.template)
        stop = (STOP,) if self.template is PLAIN else ()
        self.params = params.model_copy(update={"stop": stop, "stop_ids": () if end is None else (end,)})
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, str]] = []
        self.longest = loaded.model.max_length
        self._said_cut = False

    def reply(self, line: str) -> None:
        """Speak the reply to ``line``. A line that is too long by itself is not kept, and nothing is forgotten."""
        spoken: list[str] = []
        for _, piece in self._pieces([*self.turns, {"role": "user", "content": line}]):
            text = piece if any(spoken) else piece.lstrip()
            common.say(text)
            spoken.append(text)
        common.say("\n")
        self.turns.append({"role": "assistant", "content": "".join(spoken).strip()})

    def _pieces(self, turns: list[dict[str, str]]) -> Any:
        """The reply to ``turns``, which are kept but for the oldest ones that leave it too little room."""
        from pellucid.data.chat import encode_chat
        from pellucid.generation import stream

        whole = len(turns)
        while True:
            ids = encode_chat(self.loaded.tokenizer, self.template, [*self.system, *turns])
            if len(turns) == 1 or self._room(ids) >= self._enough():
                break
            del turns[:2]
        pieces = stream(self.loaded, [ids], self._fitting(ids))
        if len(turns) < whole:
            typer.echo("(the oldest turn was forgotten)", err=True)
        self.turns = turns
        return pieces

    def _room(self, ids: list[int]) -> int:
        """How many tokens of a reply the model has positions for, at most as many as were asked for."""
        most: int = self.params.max_new_tokens
        return most if self.longest is None else min(most, self.longest - len(ids))

    def _enough(self) -> int:
        """Room for which no turn need be forgotten: what was asked for, or a quarter of the model's positions."""
        most: int = self.params.max_new_tokens
        return most if self.longest is None else min(most, max(1, self.longest // 4))

    def _fitting(self, ids: list[int]) -> Any:
        """The parameters of a reply, cut to the room that is left; said the first time."""
        room = self._room(ids)
        if not 0 < room < self.params.max_new_tokens:
            return self.params
        if not self._said_cut:
            typer.echo(f"(replies end where the model's {self.longest} positions do)", err=True)
            self._said_cut = True
        return self.params.model_copy(update={"max_new_tokens": room})


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
