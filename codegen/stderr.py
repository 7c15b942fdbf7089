"""Output of TileLang and its C++ library on the error stream."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Iterator

_FATAL = re.compile(rb"^\[[\d:]+\] \S*: Fatal: ", re.MULTILINE)
"""Start of the text that TVM prints of an error before it raises it."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress what TileLang and its C++ library print about parts of a program."""
    with warnings.catch_warnings(), open(os.devnull, "wb") as null, _redirect(null.fileno()):
        warnings.simplefilter("ignore")
        yield


class _Held:
    """Holds the error stream while one thread or several compile, and prints it at their end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the stream. Drop what TVM prints of an error that it raises."""
        with self._lock:
            if not self._users:
                self._file = self._stack.enter_context(tempfile.TemporaryFile())
                self._stack.enter_context(_redirect(self._file.fileno()))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._file.seek(0)
                    text = _FATAL.split(self._file.read())[0]
                    self._stack.close()
                    with contextlib.suppress(OSError):
                        os.write(2, text)


@contextlib.contextmanager
def _redirect(target: int) -> Iterator[None]:
    """Let file descriptor 2 be ``target``."""
    try:
        stderr = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    os.dup2(target, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


without_fatal_text = _Held().held
