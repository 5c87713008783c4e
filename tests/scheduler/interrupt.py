"""Ctrl-C, where a test wants it."""

from __future__ import annotations

import _weakrefset
import weakref
from typing import Any

_OF_THE_COLLECTOR = {weakref.__file__, _weakrefset.__file__}
"""Where Python code is that the garbage collector calls, wherever it happens to run: what is raised there is lost."""


class InterruptOnLine:
    """A trace function that raises Ctrl-C once, before a line of a function."""

    def __init__(self, function: str, line: int) -> None:
        self.done = False
        self._function = function
        self._line = line

    def __call__(self, frame: Any, event: str, arg: object) -> Any:
        if frame.f_code.co_name != self._function:
            return None
        lines = iter(range(self._line))

        def on_line(frame: Any, event: str, arg: object) -> Any:
            if event == "line" and not self.done and next(lines, None) is None:
                self.done = True
                raise KeyboardInterrupt
            return on_line

        return on_line


class InterruptAfterCall:
    """A profile function that raises Ctrl-C once, after a call that a function makes, as CPython does."""

    def __init__(self, function: str, call: int) -> None:
        self.done = False
        self._function = function
        self._num_left = call

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        caller = frame if event == "c_return" else frame.f_back if event == "return" else None
        if self.done or caller is None or caller.f_code.co_name != self._function:
            return
        if frame.f_code.co_filename in _OF_THE_COLLECTOR:
            return
        if self._num_left:
            self._num_left -= 1
            return
        self.done = True
        raise KeyboardInterrupt
