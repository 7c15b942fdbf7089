"""Run Python programs in forks of a process that has imported TileWeave already.

    python -I -S tools/warm_python.py run SOCKET PROGRAM [ARGUMENT ...]
    python tools/warm_python.py serve LISTENER PARENT MODULE ...

Importing torch, TileLang and TileWeave costs three seconds of CPU, more than most tests. ``serve``
imports the modules once, when the first request arrives. For each request it forks a process that
runs the program with the client's arguments, folder, environment and standard streams. ``run``
exits with the status of that process, or by its signal.

A program runs as in ``python PROGRAM``, where PROGRAM may also be ``-c CODE`` or ``-m MODULE``.
What the server cannot reproduce, ``run`` leaves to a new Python: another option of Python, another
environment, a server that has threads or failed to import. The server ends with the process PARENT,
and its programs end with the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

MODULES = ("torch", "tilelang", "tileweave", "tileweave.language")
PER_PROGRAM = re.compile(
    r"PYTEST_\w+|LIT_\w+|TMP|TMPDIR|TEMP|TEMPDIR|PWD|OLDPWD|SHLVL|_|COLUMNS|LINES|"
    r"RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
)
"""Variables that may differ between programs: no package reads them while it is imported."""
REFUSED, ACCEPTED = b"-", b"+"
PARENT_CHECK_SECONDS = 1.0
REQUEST_SECONDS = 10.0
"""A client that does not send its whole request in this time is dropped."""


def start(
    python: str, environment: Mapping[str, str], modules: Sequence[str] = MODULES
) -> list[str]:
    """Start a server for programs of ``python``; return the command that runs a program in it.

    The server accepts programs with ``environment`` only. It ends with this process. Where no
    socket can be made, as in a temporary folder with a long name, the command is ``python``.
    """
    import atexit
    import shutil
    import subprocess
    import tempfile

    starter = os.getpid()
    folder = tempfile.mkdtemp(prefix="warm-")
    path = os.path.join(folder, "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        # Clients that connect before the server runs wait in this queue.
        try:
            listener.bind(path)
        except OSError:
            os.rmdir(folder)
            return [python]
        listener.listen(128)
        server = subprocess.Popen(
            [python, __file__, "serve", str(listener.fileno()), str(starter), *modules],
            env=dict(environment),
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop() -> None:
        if os.getpid() == starter:
            server.terminate()
            server.wait()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    return [python, "-I", "-S", __file__, "run", path]


def run(path: str, arguments: Sequence[str]) -> NoReturn:
    """Run a program in the server at ``path``, or else in a new Python; exit with its status."""
    with socket.socket(socket.AF_UNIX) as server:
        if ask(server, path, arguments):
            status = server.recv(4)
            if not status:
                sys.exit("warm_python: the server ended while it ran the program")
            exit_with(int.from_bytes(status, "big", signed=True))
    os.execv(sys.executable, [sys.executable, *arguments])


def ask(server: socket.socket, path: str, arguments: Sequence[str]) -> bool:
    """Send a request to the server; return whether it accepts the program."""
    if not (arguments and (arguments[0] in ("-c", "-m") or os.path.isfile(arguments[0]))):
        return False
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    text = json.dumps(request).encode()
    try:
        server.connect(path)
        socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(text)
        return server.recv(1) == ACCEPTED
    except OSError:
        return False


def exit_with(status: int) -> NoReturn:
    """Exit with a status, or by the signal of a negative one, as `subprocess` reports them."""
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


class Server:
    """Server that forks a process for each request."""

    def __init__(self, listener: socket.socket, parent: int, modules: Sequence[str]) -> None:
        self.listener, self.parent, self.modules = listener, parent, modules
        self.environment = import_environment(os.environ)
        self.warm = False
        self.programs: dict[socket.socket, int] = {}
        """Process of each client whose program runs."""

    def serve(self) -> dict[str, Any] | None:
        """Serve until the parent ends, then return None; in a forked process return its request."""
        import select

        # A process that ends wakes `select`.
        awake, wake = socket.socketpair()
        awake.setblocking(False)
        wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        while os.getppid() == self.parent:
            sockets = [self.listener, awake, *self.programs]
            for ready in select.select(sockets, [], [], PARENT_CHECK_SECONDS)[0]:
                if ready is self.listener:
                    request = self.accept()
                    if request is not None:
                        awake.close()
                        wake.close()
                        return request
                elif ready is awake:
                    awake.recv(4096)
                else:  # a client sends nothing after its request: it has ended
                    self.kill(ready)
            self.report_ended()
        return None

    def close(self) -> None:
        """End all programs, and remove the folder of the socket."""
        import shutil

        for client in list(self.programs):
            self.kill(client)
        shutil.rmtree(os.path.dirname(self.listener.getsockname()), ignore_errors=True)

    def accept(self) -> dict[str, Any] | None:
        """Fork a process for the next client; return its request there, else None."""
        client = self.listener.accept()[0]
        streams: list[int] = []
        try:
            client.settimeout(REQUEST_SECONDS)
            request = receive(client, streams)
            if self.can_run(request):
                client.sendall(ACCEPTED)
                process = os.fork()
                if process == 0:
                    self.become(client, streams)
                    return request
                self.programs[client] = process
            else:
                client.sendall(REFUSED)
                client.close()
        except OSError:
            client.close()
        for stream in streams:
            os.close(stream)
        return None

    def can_run(self, request: Mapping[str, Any]) -> bool:
        """Return whether a fork of this process runs a program as a new Python would."""
        if import_environment(request["environment"]) != self.environment:
            return False
        if not self.warm:
            self.import_modules()
        try:
            return len(os.listdir("/proc/self/task")) == 1
        except OSError:
            return False

    def import_modules(self) -> None:
        """Import the modules. Where this fails, the server ends, and clients start Python."""
        import gc
        import importlib

        for module in self.modules:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()
        # From here on there are processes that must end with the server.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        self.warm = True

    def become(self, client: socket.socket, streams: Sequence[int]) -> None:
        """Turn the forked process into one with a client's streams that knows no other client."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgrp()
        for other in (self.listener, client, *self.programs):
            other.close()
        self.programs.clear()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)

    def report_ended(self) -> None:
        """Send each client whose program has ended its status."""
        for client, process in list(self.programs.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del self.programs[client]
                code = os.waitstatus_to_exitcode(status)
                with client, contextlib.suppress(OSError):
                    client.sendall(code.to_bytes(4, "big", signed=True))

    def kill(self, client: socket.socket) -> None:
        """End the program of a client, with the processes that it started."""
        process = self.programs.pop(client)
        client.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that importing a package may depend on."""
    variables = {k: v for k, v in environment.items() if not PER_PROGRAM.fullmatch(k)}
    # TileLang adds a folder whenever it is imported, also if its parent has added it.
    folders = variables.get("PYTHONPATH", "").split(os.pathsep)
    return variables | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(folders))}


def receive(client: socket.socket, streams: list[int]) -> dict[str, Any]:
    """Return the request of a client, and append its standard streams to ``streams``."""
    length, received, *_ = socket.recv_fds(client, 8, 3)
    streams += received
    missing, text = int.from_bytes(length, "big"), b""
    while missing > len(text):
        part = client.recv(missing - len(text))
        if not part:
            raise ConnectionError("the client ended")
        text += part
    if len(streams) != 3:
        raise ConnectionError("no standard streams")
    return json.loads(text)


def execute(request: Mapping[str, Any]) -> None:
    """Run the program of a request as the main program of this process."""
    import builtins
    import importlib.machinery
    import runpy
    import tempfile
    import types

    os.chdir(request["folder"])
    # The others are equal, or were set while the modules were imported.
    for name in filter(PER_PROGRAM.fullmatch, [*os.environ]):
        del os.environ[name]
    for name in filter(PER_PROGRAM.fullmatch, request["environment"]):
        os.environ[name] = request["environment"][name]
    tempfile.tempdir = None
    program, *arguments = request["arguments"]
    if program in ("-c", "-m"):
        folder, sys.argv = ("" if program == "-c" else os.getcwd()), [program, *arguments[1:]]
    else:
        folder, sys.argv = os.path.dirname(os.path.realpath(program)), [program, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    if program == "-m":
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore
    sys.modules["__main__"] = main
    if program == "-c":
        code = compile(arguments[0], "<string>", "exec", dont_inherit=True)
    else:
        path = os.path.abspath(program)
        main.__file__ = path
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    try:
        exec(code, main.__dict__)
    except Exception as error:
        # Python shows no frames of its own.
        error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def main() -> None:
    role, place, *arguments = sys.argv[1:]
    if role == "run":
        run(place, arguments)
    listener = socket.socket(fileno=int(place))
    server = Server(listener, int(arguments[0]), arguments[1:])
    try:
        request = server.serve()
    except BaseException:
        server.close()
        raise
    if request is None:
        server.close()
    else:
        execute(request)


if __name__ == "__main__":
    main()
