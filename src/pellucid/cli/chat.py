"""``pellucid chat``: turns through the model's chat template."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from pellucid.cli import common

STOP = "\nUser: "
"""Ends a reply of a model without a chat template, which would continue with the user's turn."""

System = Annotated[str | None, typer.Option(help="A system message before the first turn.", show_default=False)]


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
    """Chat with a model through its chat template, or in plain turns if it has none.

    /exit or the end of the input ends the chat. The model reads the whole transcript before each reply; when the
    transcript is longer than the model's positions, the oldest turns are dropped.

    \b
    Example:
      pellucid chat my-model --system "Answer in one line." --temperature 0.7
    """
    from pellucid.checkpoints import load
    from pellucid.errors import ArgumentError, LengthError
    from pellucid.generation import GenerationConfig

    params = GenerationConfig(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    loaded = load(checkpoint)
    if loaded.tokenizer is None:
        raise ArgumentError(f"{checkpoint} has no tokenizer; a chat needs one")
    transcript = _Transcript(loaded, system, params)
    failed = replies = 0
    while (line := _line()) is not None:
        if not line:
            continue
        try:
            transcript.reply(line)
            replies += 1
        except LengthError as error:
            failed += 1
            typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2 if failed and not replies else 0)


class _Transcript:
    """The turns so far. Each reply is sampled after all of them, rendered anew."""

    def __init__(self, loaded: Any, system: str | None, params: Any) -> None:
        from pellucid.data.chat import PLAIN, reply_end

        self.loaded, self.template = loaded, loaded.chat_template or PLAIN
        end = reply_end(loaded.tokenizer, self.template)
        stop = (STOP,) if self.template is PLAIN else ()
        self.params = params.model_copy(update={"stop": stop, "stop_token_ids": () if end is None else (end,)})
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, str]] = []
        self.longest = loaded.model.max_length
        self._cut_reported = False

    def reply(self, line: str) -> None:
        """Write the reply to ``line``. If the line alone is too long, it raises and the turns stay as they were."""
        written: list[str] = []
        for _, piece in self._pieces([*self.turns, {"role": "user", "content": line}]):
            text = piece if any(written) else piece.lstrip()
            common.write(text)
            written.append(text)
        common.write("\n")
        self.turns.append({"role": "assistant", "content": "".join(written).strip()})

    def _pieces(self, turns: list[dict[str, str]]) -> Any:
        """The reply to ``turns``, the oldest of them dropped where they leave it too little room."""
        from pellucid.data.chat import encode_chat
        from pellucid.generation import stream

        whole = len(turns)
        while True:
            ids = encode_chat(self.loaded.tokenizer, self.template, [*self.system, *turns])
            if len(turns) == 1 or self._room(ids) >= self._enough():
                break
            del turns[:2]
        pieces = stream(self.loaded, [ids], self._limited(ids))
        if len(turns) < whole:
            typer.echo("(the oldest turns were dropped)", err=True)
        self.turns = turns
        return pieces

    def _room(self, ids: list[int]) -> int:
        """How many tokens of a reply the model has positions for, at most ``max_new_tokens``."""
        most: int = self.params.max_new_tokens
        return most if self.longest is None else min(most, self.longest - len(ids))

    def _enough(self) -> int:
        """Room for which no turn is dropped: ``max_new_tokens``, or a quarter of the model's positions."""
        most: int = self.params.max_new_tokens
        return most if self.longest is None else min(most, max(1, self.longest // 4))

    def _limited(self, ids: list[int]) -> Any:
        """The parameters of a reply, cut to the room that is left; the first cut is reported."""
        room = self._room(ids)
        if not 0 < room < self.params.max_new_tokens:
            return self.params
        if not self._cut_reported:
            typer.echo(f"(replies are cut at the model's {self.longest} positions)", err=True)
            self._cut_reported = True
        return self.params.model_copy(update={"max_new_tokens": room})


def _line() -> str | None:
    """The next line of the user; None at the end."""
    if sys.stdin.isatty():
        common.write("> ")
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"the input is not {error.encoding} text; convert it first") from None
    text = line.strip()
    return None if not line or text == "/exit" else text
