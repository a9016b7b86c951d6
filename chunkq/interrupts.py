"""Ctrl-C and SIGTERM, taken at points where no library is in the middle of something.

Python runs a signal's handler between any two instructions of the main thread. What it raises there is lost where errors
are ignored (the callbacks of weak references), and between a lock of a library and the block that gives it back it leaves
the lock taken for good: whoever waits for it waits for ever. So a run notes the signal and raises where it looks for one.
Imports nothing of chunkq.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Held:
    """The signals that came since they are held back, and who wants to know of them."""

    def __init__(self, handlers: dict[signal.Signals, Callable[..., Any]]) -> None:
        self.handlers = handlers
        self.waiting: list[int] = []
        self.seen = False

    def note(self, number: int, frame: Any) -> None:
        """Keep the first for a good moment; who sends another does not want to wait."""
        if self.seen:
            self.handlers[signal.Signals(number)](number, frame)
        else:
            self.seen = True
            self.waiting.append(number)

    def deliver(self) -> None:
        """Do what the handlers of the noted signals do, mostly raise."""
        waiting, self.waiting = self.waiting, []
        for number in waiting:
            self.handlers[signal.Signals(number)](number, sys._getframe())


_held: _Held | None = None


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until `check_interrupts`, or the end; a second one goes through at once.

    For the main thread, as no other runs handlers of signals, and for handlers that Python code has set.
    """
    global _held
    if threading.current_thread() is not threading.main_thread() or _held is not None:
        yield
        return
    handlers = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    held = _Held(handlers)
    try:
        _held = held
        for number in handlers:
            signal.signal(number, held.note)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _held = None
        held.deliver()


def check_interrupts() -> None:
    """Raise what was held back; in the main thread only, where all others may ask too."""
    if _held is not None and _held.waiting and threading.current_thread() is threading.main_thread():
        _held.deliver()
