"""Processes that compile kernels, because threads of one process would share its interpreter."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ...codegen.compile import target

Job = tuple["Future[None]", Callable[[], None], bytes]


class CompileWorkers:
    """Processes that call functions, which fill TileLang's cache for the current GPU without using
    it.

    They are forks of one process, which imports the compiler once. They end after ``close`` when no
    call is left, or with this process, after the calls that they are in.
    """

    def __init__(self, count: int) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._count, self._working, self._lock = count, count, threading.Lock()
        pairs = [socket.socketpair() for _ in range(count)]
        files = [theirs.fileno() for _, theirs in pairs]
        main = f"import sys; sys.path[:] = {sys.path}; from {__name__} import fork; fork({files})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", main], stdin=subprocess.DEVNULL, pass_fds=files,
            env={**os.environ, "TILELANG_DEFAULT_TARGET": target()},
        )  # fmt: skip
        for own, theirs in pairs:
            theirs.close()
            threading.Thread(target=self._serve, args=[own], daemon=True).start()

    def submit(
        self, call: Callable[[], Any], then: Callable[[], None] = lambda: None
    ) -> Future[None]:
        """Make a call, which must be picklable, as soon as a process is idle, and then call
        ``then`` in this process.

        Returns:
            A future that is done after both. Its exception is that of ``then``, or a RuntimeError
            if the call has raised an exception or the process has ended.
        """
        future: Future[None] = Future()
        self._jobs.put((future, then, pickle.dumps(call)))
        return future

    def close(self) -> None:
        """Let the processes end after the calls that are submitted."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _serve(self, own: socket.socket) -> None:
        """Let one process make calls, until there are none or it has ended."""
        with own, own.makefile("rwb") as pipe:
            while (job := self._jobs.get()) is not None:
                future, then, call = job
                try:
                    pipe.write(call)
                    pipe.flush()
                    error = pickle.load(pipe)
                except (OSError, EOFError):
                    future.set_exception(_ended())
                    break
                try:
                    if error:
                        raise RuntimeError(error)
                    then()
                except Exception as raised:
                    future.set_exception(raised)
                else:
                    future.set_result(None)
        with self._lock:
            self._working -= 1
            is_last = not self._working
        if is_last:
            while job is not None:  # all processes have ended before ``close``
                if (job := self._jobs.get()) is not None:
                    job[0].set_exception(_ended())
            self._process.wait()


def _ended() -> RuntimeError:
    return RuntimeError("a process that compiles kernels has ended")


def fork(files: list[int]) -> None:
    """Start a process for each file, which makes the calls that it reads there."""
    os.dup2(2, 1)  # TileLang and nvcc may print
    for file in files:
        if not os.fork():
            for other in set(files) - {file}:
                os.close(other)
            with suppress(BrokenPipeError):  # the process that asked has ended
                _serve_file(file)
            os._exit(0)
    for file in files:
        os.close(file)
    for _ in files:
        os.wait()


def _serve_file(file: int) -> None:
    with socket.socket(fileno=file) as own, own.makefile("rwb") as pipe:
        while True:
            try:
                pickle.load(pipe)()
                error = ""
            except EOFError:
                return
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            pickle.dump(error, pipe)
            pipe.flush()
