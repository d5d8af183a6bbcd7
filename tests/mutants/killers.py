"""Whether a mutant is found out: by the audit of tiny models first, then by the tests of its room.

Everything heavy is imported once; each mutant lives in a forked process, in which its module is loaded from the
changed source and everything else of Pellucid anew.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import signal
import sys
import traceback

import numpy  # noqa: F401  (before the fork)
import pydantic  # noqa: F401
import pytest
import torch

from mutants.mutate import SOURCE, Mutant

TESTS = SOURCE.parents[1] / "tests"
SECONDS = 120
_ROOMS = {
    "visibility": ["visibility"],
    "nn": ["nn", "models/test_shared_probes.py"],
    "data": ["data/test_objectives.py", "nn/test_losses.py"],
    "models": ["models/test_shared_probes.py", "nn/test_losses.py"],
}

_SMALL = {"vocab_size": 17, "hidden_size": 16, "ffn": {"kind": "gated", "intermediate_size": 16}}
_MODELS = (
    {"layers": ["causal & window(3)", "causal"], "attention": {"num_attention_heads": 4, "num_key_value_heads": 2}},
    {
        "layers": ["causal & (window(3) | sinks(1))"],
        "attention": {"num_attention_heads": 2},
        "position": {"kind": "learned", "max_positions": 40},
        "norm_placement": "post",
        "final_logit_softcapping": 20.0,
    },
    {
        "layers": ["causal | prefix(4)", "causal & chunk(4)"],
        "attention": {"num_attention_heads": 2, "qk_norm": True},
        "position": {"kind": "sinusoidal"},
    },
)


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the mutant's source for its module, and lets all others through."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name, path=None, target=None):
        if name != self.mutant.module:
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(SOURCE / self.mutant.file))

    def exec_module(self, module):
        module.__file__ = str(SOURCE / self.mutant.file)
        exec(compile(self.mutant.source, self.mutant.file, "exec"), module.__dict__)


def killer(mutant: Mutant) -> str | None:
    """Who finds the mutant out: ``audit``, ``tests``, ``time`` (it does not end), or nobody."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        answer = "error"
        try:
            signal.alarm(SECONDS)
            _quiet()
            answer = _judged(mutant)
        except BaseException:  # noqa: BLE001 (whatever a mutant does, it is found out)
            traceback.print_exc()
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "time"
    return None if answer == "alive" else answer


def _quiet() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)


def _judged(mutant: Mutant) -> str:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pellucid", "helpers")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Changed(mutant))
    torch.set_num_threads(1)
    try:
        found = _audited()
    except Exception:  # noqa: BLE001 (a mutant that raises is found out)
        return "audit"
    if found:
        return "audit"
    room = mutant.file.partition("/")[0]
    places = [str(TESTS / place) for place in _ROOMS[room]]
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", *places])
    return "alive" if code == 0 else "tests"


def _audited() -> bool:
    """Whether an audit of one of the tiny models fails."""
    import pellucid as pl

    for model in _MODELS:
        for backend in ("auto", "reference"):
            target = pl.build(pl.ModelConfig(**_SMALL, **model), backend=backend)
            for check in ("future", "window", "packing", "padding", "cache", "loss", "positions", "kernels"):
                found = pl.audit(target, checks=[check], length=12).findings
                if not all(finding.status in ("pass", "not_applicable") for finding in found):
                    return True
            if backend == "auto" and not pl.audit(target, checks=["batch", "modes", "prefix"], length=12).passed:
                return True
    return False
