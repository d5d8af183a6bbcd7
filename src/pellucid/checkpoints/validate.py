"""What is handed to ``save``, ``load`` and ``verify``: checked before anything is read, computed or written."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path

import torch
from torch import Tensor

from pellucid.data.chat import ChatTemplate
from pellucid.data.records import printable
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError
from pellucid.models.build import why_unusable

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The types that weights may have."""


def folder_path(path: object) -> Path:
    """``path`` as a Path that the system can be asked about."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise CheckpointError(
            f"a checkpoint folder is named by text or a Path, not by {repr_short(path)}; give its name"
        )
    if not text:
        raise CheckpointError("the name of the checkpoint folder is empty; '.' is the folder you are in")
    odd = next((c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"), None)
    if odd is not None:
        kind = "a NUL character" if odd == "\0" else f"the lone surrogate {printable(odd)}"
        raise CheckpointError(f"{printable(text)[:200]!r} cannot name a folder: it holds {kind}; take it out")
    return Path(text)


def float_type(dtype: object) -> torch.dtype | None:
    """``dtype`` or the one of that name; None stays None."""
    if dtype is None:
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise CheckpointError(
            f"dtype is {repr_short(dtype)}, but weights can be {', '.join(DTYPES)}; choose one of these"
        )
    return found


def device_of(device: object) -> torch.device:
    """``device``, where a tensor can be put."""
    wanted = "a device like 'cpu' or 'cuda:0' is wanted"
    if not isinstance(device, str | torch.device):
        raise CheckpointError(f"device is {repr_short(device)}, but {wanted}; leave it out for the CPU")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise CheckpointError(f"device is {repr_short(device)}, but {wanted}; leave it out for the CPU") from error
    if found.type == "meta":
        raise CheckpointError("device is 'meta', which holds no weights; build(config, device='meta') needs no folder")
    if reason := why_unusable(found):
        raise CheckpointError(f"device is {str(found)!r}, which cannot be used here: {reason}; choose cpu")
    return found


def shard_size(most: object) -> int | None:
    """The most bytes of one file of weights; None is any number."""
    if most is not None and (type(most) is not int or most < 1):
        raise CheckpointError(
            f"max_shard_bytes is {repr_short(most)}, but must be a whole number of at least 1; "
            "leave it out for a single file"
        )
    return most


def tokenizer_of(tokenizer: object) -> Tokenizer | None:
    """``tokenizer``, if it is one of ours."""
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise CheckpointError(
            f"tokenizer is {repr_short(tokenizer)}, but a pellucid.Tokenizer is wanted; "
            "Tokenizer.load reads a tokenizer.json"
        )
    return tokenizer


def template_of(template: object) -> ChatTemplate | None:
    """A chat template, given as such or as its text."""
    if template is None or isinstance(template, ChatTemplate):
        return template
    if not isinstance(template, str):
        raise CheckpointError(
            f"chat_template is {repr_short(template)}, but a ChatTemplate or its text is wanted; "
            "ChatTemplate.load reads a file"
        )
    return ChatTemplate(template)


def check_tensors(tensors: Mapping[str, Tensor], wide: Set[str]) -> None:
    """The tensors of one model hold numbers, of one type, on one device; those that are ``wide`` at least float32."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"the model has no numbers in {name!r}, which is on the meta device; fill it before it is saved"
            )
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(
                f"the model has {_word(tensor.dtype)} in {name!r}, but weights can be {', '.join(DTYPES)}; "
                "convert it with model.to(torch.float32)"
            )
    for what in ("dtype", "device"):
        usual = Counter(getattr(t, what) for name, t in tensors.items() if name not in wide).most_common(1)[0][0]
        for name, tensor in tensors.items():
            stays = what == "dtype" and name in wide
            wanted = widened(usual) if stays else usual
            if (found := getattr(tensor, what)) != wanted:
                place = "is wanted there" if stays else "elsewhere"
                raise CheckpointError(
                    f"the model has {_word(found)} in {name!r} but {_word(wanted)} {place}; "
                    f"convert it with model.to({'torch.' if what == 'dtype' else ''}{_word(usual)})"
                )


def widened(dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or float32 where that is wider: the type of what stays wide in a narrow model."""
    return torch.promote_types(dtype, torch.float32)


def repr_short(value: object) -> str:
    """A value as an error shows it: on one line, cut when long."""
    text = _word(value) if isinstance(value, torch.dtype) else " ".join(repr(value).split())
    return printable(text if len(text) <= 60 else text[:59] + "…")


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")
