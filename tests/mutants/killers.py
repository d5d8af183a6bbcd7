"""Whether a mutant is found out, by the tests of its file or by the audit of tiny models: the quicker one first.

Everything heavy is imported once, with the first mutant; each mutant lives in a forked process, in which its module is
loaded from the changed source and everything else of Pellucid anew.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import jaxtyping
import pytest
import torch

from mutants.mutate import SOURCE, Mutant

TESTS = SOURCE.parents[1] / "tests"
SECONDS = 120  # of computing, so that a busy machine condemns nobody
_HEAVY = ("pydantic", "hypothesis.strategies", "beartype", "sympy", "torch.testing", "torch.distributed")
_LATE = "-Wignore::pytest.PytestAssertRewriteWarning"  # what is loaded before pytest is not rewritten
_PROBES = "models/test_shared_probes.py"
_TESTS = {
    "visibility/": ["visibility"],
    "nn/attend": ["nn/test_backends.py", "nn/test_attend.py"],
    "nn/attention": ["nn/test_attention.py", "nn/test_cross.py"],
    "nn/backends": ["nn/test_backends.py", "nn/test_attend.py"],
    "nn/cache": ["nn/test_cache_places.py", "nn/test_cache.py", "nn/test_cross.py", "nn/test_positions_places.py"],
    "nn/embed": ["nn/test_embed.py"],
    "nn/losses": ["nn/test_losses.py"],
    "nn/positions/": ["nn/test_positions*.py"],
    "nn/runs": ["nn/test_cache_places.py", "nn/test_cache.py", "nn/test_cross.py"],
    "data/objectives": ["data/test_objectives*.py"],
    "models/model": ["models/test_families.py", _PROBES, "nn/test_parts.py", "models/test_heads.py"],
}
"""The tests that are meant to hold a file, by how its name begins."""

_SMALL = {"vocab_size": 17, "hidden_size": 16, "ffn": {"kind": "gated", "intermediate_size": 16}}
_MODELS = (
    {"layers": ["causal & window(3)", "causal"], "attention": {"num_attention_heads": 4, "num_key_value_heads": 2}},
    {
        "layers": ["causal & (window(3) | sinks(1))"],
        "attention": {"num_attention_heads": 2},
        "position": {"kind": "learned", "max_position_embeddings": 40},
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
        exec(compile(self.mutant.source, module.__file__, "exec"), module.__dict__)


def killer(mutant: Mutant) -> str | None:
    """Who finds the mutant out: ``audit``, ``tests``, ``time`` (it does not end), or nobody."""
    _warm()
    stages: list[tuple[str, Callable[[], bool]]] = [("audit", _audited), ("tests", lambda: _tested(mutant))]
    if _PROBES not in _held_by(mutant):
        stages.reverse()
    for name, stage in stages:
        match _in_a_process(mutant, stage):
            case "found":
                return name
            case "":
                return "time"
            case "broken":
                raise RuntimeError(f"{mutant.name} could not be tried by {name}")
    return None


@cache
def _warm() -> None:
    """What every child would have to load by itself."""
    for name in _HEAVY:
        importlib.import_module(name)


def _in_a_process(mutant: Mutant, stage: Callable[[], bool]) -> str:
    """``found``, ``alive``, ``broken`` where the stage itself failed, or nothing where time was up."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        answer = "broken"
        try:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(20 * SECONDS)  # and one that waits for ever ends too
            _quiet()
            _forget()
            sys.meta_path.insert(0, _Changed(mutant))
            torch.set_num_threads(1)
            answer = "found" if stage() else "alive"
        except BaseException:  # noqa: BLE001 (told by the answer)
            traceback.print_exc()
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def _quiet() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)


def _forget() -> None:
    """Pellucid and what imports it are loaded anew, without the hook of a test session that checks shapes."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("jaxtyping")]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pellucid", "helpers", "broken_models")]:
        del sys.modules[name]


def _held_by(mutant: Mutant) -> list[str]:
    return next(names for start, names in _TESTS.items() if mutant.file.startswith(start))


def _tested(mutant: Mutant) -> bool:
    """Whether a test of the file fails."""
    try:
        importlib.import_module(mutant.module)  # before pytest, which reads plugins' packages by itself
    except Exception:  # noqa: BLE001 (a mutant that cannot be loaded is found out)
        return True
    places = [str(place) for name in _held_by(mutant) for place in sorted(TESTS.glob(name))]
    # the hook that checks shapes would load the original: it comes before ours
    jaxtyping.install_import_hook = lambda *_, **__: nullcontext()
    quick = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:pellucid", "-m", "not slow", _LATE]
    code = pytest.main([*quick, *places])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        raise RuntimeError(f"pytest ended with {code}")
    return code != pytest.ExitCode.OK


def _audited() -> bool:
    """Whether an audit of one of the tiny models fails, or anything raises on the way."""
    try:
        return _audit_fails()
    except Exception:  # noqa: BLE001 (a mutant that raises is found out)
        return True


def _audit_fails() -> bool:
    import pellucid as pl

    for model in _MODELS:
        target = pl.build(pl.ModelConfig(**_SMALL, **model))
        for check in ("future", "window", "prefix", "packing", "padding", "cache", "loss", "positions", "kernels"):
            found = pl.audit(target, checks=[check], length=12).findings
            if not all(finding.status in ("pass", "not_applicable") for finding in found):
                return True
    return False
