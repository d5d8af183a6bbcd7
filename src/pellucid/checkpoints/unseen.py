"""What a contract can be changed in without the witness seeing it, and why."""

from __future__ import annotations

_FIRST = {
    "initializer_range": "only first weights are drawn from it; the weights are here",
    "residual_init": "only first weights are drawn by it; the weights are here",
}

UNWITNESSED = {
    **{f"model.{stack}{field}": reason for stack in ("", "encoder.") for field, reason in _FIRST.items()},
    "model.cross_attention.qk_norm.after_positions": "nothing is turned between two stacks",
    "digests": "whoever changes a file can note its new digest; the witness asks what the files give",
    "witness.tolerance": "a smaller one than was written passes while every output still is within it",
}
"""Fields of the contract that another value can be written into, digests made to fit, and why that is not seen."""

UNSEEN = {
    "a number changed by very little": "what moves no output by a millionth (a dropout of 0.1 to 0.10000001) passes",
    "a value that changes no output": (
        "as rope's rope_theta does with heads of 2, a scale written out that was null, or top_k_softmax for a softmax "
        "over all experts that is renormalised"
    ),
    "bounds of rules beyond 2^38, or a few of more than 32": "no probe is put there; all others are met exactly",
    "capacities beyond 1024, or of several layers": "an expert is not sent so many tokens; one for all is met exactly",
    "limits that nothing reaches": (
        "clips and caps that a thousand times of what the first layer of each kind is given stays below"
    ),
    "tokens and chats that are not asked": "merges, rules or turns that no sample line and no small chat needs",
    "what a file holds besides": "spaces, order and comments of the files, where the same is read from them",
}
"""Changes that can be signed anew without being seen, in fields where others are."""
