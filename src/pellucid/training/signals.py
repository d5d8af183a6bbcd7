"""Ctrl-C and SIGTERM: before the first step they stop a run at once, then they ask; asked twice, it stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptedBySignal(KeyboardInterrupt):
    """A signal that stopped a run at once."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped at once by {number.name}")
        self.signal = number


class SignalHandler:
    """While the block runs, signals come here; outside the main thread nothing is changed.

    Until :meth:`begin` a signal raises :class:`InterruptedBySignal`; after it the first one only sets
    :attr:`requested`, and the second raises. What comes after one that raised is
    ignored, so that what was begun can be taken back.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._begun = False
        self._stopped: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalHandler:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: not Python's to put back
                signal.signal(number, handler)

    def begin(self) -> None:
        """From now on there is something to finish. One that came before and was swallowed on its way is raised."""
        if self._stopped is not None:
            raise InterruptedBySignal(self._stopped)
        self._begun = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stopped is not None:
            return
        if self._begun and self.requested is None:
            self.requested = signal.Signals(number)
            return
        self._stopped = signal.Signals(number)
        raise InterruptedBySignal(self._stopped)
