"""``pellucid generate``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from pellucid.cli import common

Prompts = Annotated[
    list[str],
    typer.Argument(
        metavar="PROMPT",
        help="Texts to continue, or for an encoder-decoder to read; - reads one from standard input.",
        show_default=False,
    ),
]
Stops = Annotated[
    list[str] | None, typer.Option("--stop", help="Stop at this text; can be repeated.", show_default=False)
]
Penalty = Annotated[float, typer.Option(help="Above 1, tokens that have occurred already become less likely.")]
Beams = Annotated[
    int | None, typer.Option(help="Beam search with this many beams instead of sampling.", show_default=False)
]
NBest = Annotated[int, typer.Option(help="With --num-beams: how many sequences to print.")]
LengthPenalty = Annotated[
    float, typer.Option(help="With --num-beams: scores are summed log-probabilities / length**this.")
]
StartId = Annotated[int | None, typer.Option(help="The decoder start token of an encoder-decoder.", show_default=False)]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Run the whole text for each token: slow, same result.")]


def generate(
    context: typer.Context,
    checkpoint: common.Checkpoint,
    prompts: Prompts,
    max_new_tokens: common.NewTokens = 64,
    temperature: common.Temperature = 0.0,
    top_k: common.TopK = None,
    top_p: common.TopP = 1.0,
    min_p: common.MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: common.Seed = None,
    stop: Stops = None,
    num_beams: Beams = None,
    num_return_sequences: NBest = 1,
    length_penalty: LengthPenalty = 1.0,
    start_id: StartId = None,
    no_cache: NoCache = False,
    as_json: common.Json = False,
) -> None:
    """Continue one or more prompts, or decode what an encoder-decoder reads.

    \b
    Example:
      pellucid generate my-model "def fibonacci(n):" --max-new-tokens 80
    """
    from pellucid.generation import BeamSearchConfig, GenerationConfig

    _refuse_unused(context, num_beams)
    given = {
        name: context.params[name] for name in ("max_new_tokens", *(_SAMPLING if num_beams is None else _SEARCHING))
    }
    if num_beams is None:
        params: GenerationConfig | BeamSearchConfig = GenerationConfig(**{**given, "stop": tuple(stop or ())})
    else:
        params = BeamSearchConfig(**given)
    texts = [_standard_input() if prompt == "-" else prompt for prompt in prompts]
    _generate(checkpoint, texts, params, as_json, start_id=start_id, use_cache=not no_cache)


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
_SEARCHING = ("num_beams", "num_return_sequences", "length_penalty")


def _refuse_unused(context: typer.Context, num_beams: int | None) -> None:
    """Refuse options of sampling with --num-beams, and options of beam search without."""
    for name in _SEARCHING[1:] if num_beams is None else _SAMPLING:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            if num_beams is None:
                raise typer.BadParameter(f"{option} is for a beam search; give --num-beams too")
            raise typer.BadParameter(f"{option} is for sampling, and --num-beams {num_beams} searches; leave out one")


def _generate(checkpoint: str, texts: list[str], params: Any, as_json: bool, **options: Any) -> None:
    from pellucid.checkpoints import load
    from pellucid.generation import BeamSearchConfig, generate_n_best, stream
    from pellucid.generation import generate as complete
    from pellucid.generation.config import reads_sources

    loaded = load(checkpoint)
    before = ["" if reads_sources(loaded.model) else text for text in texts]  # a decoder does not continue its source
    if isinstance(params, BeamSearchConfig):
        found = generate_n_best(loaded, texts, params, **options)
        if as_json:
            common.print_json(_ranked(texts, found))
        else:
            _print_best(before, found, scores=params.num_return_sequences > 1)
    elif as_json:
        drawn = complete(loaded, texts, params, **options)
        common.print_json([{"prompt": t, **c.to_dict()} for t, c in zip(texts, drawn, strict=True)])
    elif len(texts) == 1:
        pieces = stream(loaded, texts, params, **options)
        common.write(before[0])
        for _, piece in pieces:
            common.write(piece)
        common.write("\n")
    else:
        for text, completion in zip(before, complete(loaded, texts, params, **options), strict=True):
            common.write(f"{text}{completion.text}\n\n")


def _ranked(texts: list[str], found: list[list[Any]]) -> list[dict[str, Any]]:
    return [
        {"prompt": text, "rank": rank, **completion.to_dict()}
        for text, completions in zip(texts, found, strict=True)
        for rank, completion in enumerate(completions, 1)
    ]


def _print_best(before: list[str], found: list[list[Any]], scores: bool) -> None:
    """The best of each prompt, after their scores where there are several; an empty line after each prompt."""
    for text, completions in zip(before, found, strict=True):
        for completion in completions:
            score = f"{completion.score:9.4f}  " if scores else ""
            common.write(f"{score}{text}{completion.text}\n")
        if len(before) > 1:
            common.write("\n")


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not {error.encoding} text; convert it first") from None
