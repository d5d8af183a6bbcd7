"""Chat templates rendered where they can do no harm: a process of its own, with limits on time and size.

The process is started when it is first needed, as a fresh Python that knows nothing of this one, and killed when
an answer takes too long. The next template gets a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.errors import ArgumentError, UnsupportedError

MEMORY = 256 << 20
"""Bytes that the process may use, where the system can limit that (Linux; most others ignore it)."""

_START_SECONDS = 60.0
_SCRIPT = Path(__file__).with_name("sandbox_worker.py")
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "PATH")
_LARGEST_REPLY = 256 << 20


class Limits(NamedTuple):
    """What a template may cost."""

    seconds: float = 5.0
    """By the clock."""
    output: int = 4 << 20
    """Characters that it writes."""
    template: int = 1 << 18
    """Characters of the template itself."""


DEFAULT = Limits()


def render(template: str, variables: Mapping[str, Any], specials: Mapping[str, str], limits: Limits = DEFAULT) -> str:
    """What ``template`` writes. A key of ``specials`` that its own text spells out is written as its value.

    Raises:
        ArgumentError: the template is wrong, refuses its messages, or costs too much; nothing of it was run here.
    """
    if len(template) > limits.template:
        raise ArgumentError(
            f"the chat template has {len(template)} characters, at most {limits.template} are read; is it a template?"
        )
    request = {
        "template": template,
        "variables": dict(variables),
        "specials": list(specials),
        "marks": list(specials.values()),
        "output": limits.output,
        "seconds": limits.seconds,
    }
    reply = _worker.request(request, limits.seconds)
    if "error" in reply:
        raise ArgumentError(f"the chat template cannot be used: {reply['error']}; correct it or choose another")
    return str(reply["text"])


class _EndedError(Exception):
    """The process went away."""


class _Worker:
    """One process that answers one request at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def request(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The reply to ``request``, within ``seconds``."""
        with self._lock:
            try:
                reply = _within(self._running(), seconds, request)
                if reply.get("spent"):
                    self.close()
                return reply
            except _EndedError:
                self.close()
                raise ArgumentError(
                    "the chat template cannot be used: it ended the process that renders it; choose another"
                ) from None
            except TimeoutError:
                self.close()
                raise ArgumentError(
                    f"the chat template cannot be used: it takes longer than {seconds:g} s; choose another"
                ) from None
            except BaseException:  # a reply that nobody reads must not become the next one's
                self.close()
                raise

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._process = _start()
        try:
            _within(self._process, _START_SECONDS, None)
        except (_EndedError, TimeoutError):
            self.close()
            raise UnsupportedError(
                "no process for chat templates could be started; is jinja2 installed, and may new processes be started?"
            ) from None
        return self._process

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        _close_pipes(process)

    def forget(self) -> None:
        """After a fork: the process is the parent's; this one starts its own."""
        process, self._process, self._lock = self._process, None, threading.Lock()
        if process is not None:
            process.returncode = 0
            _close_pipes(process)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was left unsent
            pipe.close()


def _start() -> subprocess.Popen[bytes]:
    """A fresh Python (not a copy of this one), without this one's environment, that can import jinja2 and no more."""
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    folders = sorted({str(Path(spec.origin).parent.parent) for spec in specs if spec is not None and spec.origin})
    return subprocess.Popen(
        [sys.executable, "-I", str(_SCRIPT), str(MEMORY), json.dumps(folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in _KEPT if name in os.environ},
        start_new_session=True,  # Ctrl-C is for us
    )


def _within(process: subprocess.Popen[bytes], seconds: float, request: Mapping[str, Any] | None) -> dict[str, Any]:
    """Send ``request``, if any, and read one message; the process is killed when that takes too long."""
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        return _exchange(process, request)
    except (_EndedError, OSError, ValueError):
        raise (TimeoutError() if late.is_set() else _EndedError()) from None
    finally:
        timer.cancel()
        timer.join()
        if late.is_set():
            process.wait()


def _exchange(process: subprocess.Popen[bytes], request: Mapping[str, Any] | None) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    if request is not None:
        data = json.dumps(request).encode()
        process.stdin.write(len(data).to_bytes(8, "big") + data)
        process.stdin.flush()
    prefix = process.stdout.read(8)
    size = int.from_bytes(prefix, "big")
    if len(prefix) < 8 or size > _LARGEST_REPLY:
        raise _EndedError
    data = process.stdout.read(size)
    if len(data) < size:
        raise _EndedError
    reply: dict[str, Any] = json.loads(data)
    return reply


_worker = _Worker()
atexit.register(_worker.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_worker.forget)
