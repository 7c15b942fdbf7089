"""Processes that compile kernels, because threads of one process would share its interpreter."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from contextlib import ExitStack, closing
from typing import Any

from tilelang import env
from tilelang.backend.target import determine_target
from tvm import tirx

from ...codegen.compile import compile_by_tilelang


class CompileWorkers(ExitStack):
    """Processes that fill TileLang's cache. They end at the end of the context.

    They compile for the current GPU, but do not use it.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._target = determine_target(env.get_default_target(), return_object=True)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(self.enter_context(closing(_Worker())))

    def compile(self, program: tirx.PrimFunc, **options: Any) -> None:
        """Compile as ``compile_by_tilelang`` does, as soon as a process is idle.

        Raises:
            RuntimeError: the program does not compile, or the process has ended.
        """
        worker = self._idle.get()
        try:
            worker.compile(program, {"target": self._target, **options})
        finally:
            self._idle.put(worker)


class _Worker:
    def __init__(self) -> None:
        main = f"import sys; sys.path[:] = {sys.path}; from {__name__} import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", main], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def compile(self, program: tirx.PrimFunc, options: dict[str, Any]) -> None:
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None and replies is not None
        try:
            pickle.dump((program, options), requests)
            requests.flush()
            error = pickle.load(replies)
        except (BrokenPipeError, EOFError):
            ended = f"a process that compiles kernels has ended with code {self._process.wait()}"
            raise RuntimeError(ended) from None
        if error:
            raise RuntimeError(error)

    def close(self) -> None:
        self._process.communicate()


def serve() -> None:
    """Compile what the process that started this one requests, until it closes the pipe."""
    requests = sys.stdin.buffer
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # TileLang and nvcc may print
        while True:
            try:
                program, options = pickle.load(requests)
            except EOFError:
                return
            try:
                compile_by_tilelang(program, **options)
                error = ""
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            pickle.dump(error, replies)
            replies.flush()
