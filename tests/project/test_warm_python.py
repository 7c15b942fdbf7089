"""tools/warm_python.py runs programs as Python does, and ends with whoever started its server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import warm_python

IMPORTED = "import os\nprocess = os.getpid()\n"
"""Module that records the process that imported it."""
WAS_FORKED = "import imported, os; print(imported.process != os.getpid())"
SHOW = """
import os, sys
print(sys.argv, sys.path[0], __name__, globals().get("__file__"), os.getcwd(), sys.stdin.read())
print("message", file=sys.stderr)
sys.exit(7)
"""
STARTER = """
import os, subprocess, sys
from tools import warm_python
command = warm_python.start(sys.executable, os.environ, ["imported"])
sleep = "import os, time; print(os.getppid(), os.getpid(), flush=True); time.sleep(60)"
program = subprocess.Popen([*command, "-c", sleep], stdout=subprocess.PIPE, text=True)
print(os.path.dirname(command[-1]), program.stdout.readline(), flush=True)
program.wait()
"""
"""Program that waits for a program in a server; prints the server's folder and the ids of both."""

Run = Callable[..., subprocess.CompletedProcess]


def environment(folder: Path) -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with modules that servers import instead of TileWeave."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "imported.py").write_text(IMPORTED)
    (folder / "broken.py").write_text("1 / 0")
    (folder / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    (folder / "show.py").write_text(SHOW)
    (folder / "fails.py").write_text("def f():\n    raise ValueError('é')\n\nf()\n")
    return folder


@pytest.fixture(scope="module")
def warm(folder) -> list[str]:
    return warm_python.start(sys.executable, environment(folder), ["imported"])


@pytest.fixture
def run(folder) -> Run:
    """Return a function that runs a command with an environment, by default the server's."""

    def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
        env = environment(folder) | variables
        return subprocess.run(
            command, input="in", capture_output=True, text=True, env=env, cwd=folder, timeout=60
        )

    return run


def outcome(done: subprocess.CompletedProcess) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "program",
    [
        ("show.py", "a", "-b"),
        ("-c", SHOW, "a"),
        ("-m", "show", "a"),
        ("fails.py",),
        ("-c", "1 / 0"),
        ("-c", "import sys; sys.exit('message')"),
        ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"),
        ("-W", "error", "-c", "import warnings; warnings.warn('refused')"),
        ("missing.py",),
    ],
    ids=lambda program: " ".join(program)[:40],
)
def test_programs_run_as_in_python(warm, run, program):
    assert outcome(run(*warm, *program)) == outcome(run(sys.executable, *program))


def test_a_program_runs_in_a_fork_of_the_server(warm, run):
    assert run(*warm, "-c", WAS_FORKED).stdout == "True\n"


def test_an_equal_environment_for_imports_is_enough(warm, run, folder):
    """A parent that has imported TileLang repeats a folder of PYTHONPATH."""
    twice = os.pathsep.join([str(folder), environment(folder)["PYTHONPATH"]])
    done = run(
        *warm, "-c", f"{WAS_FORKED}; print(os.environ['TMPDIR'])", TMPDIR="/", PYTHONPATH=twice
    )
    assert done.stdout == "True\n/\n"


def test_another_environment_has_its_own_python(warm, run):
    print_variable = f"{WAS_FORKED}; print(os.environ['ANOTHER'])"
    assert run(*warm, "-c", print_variable, ANOTHER="1").stdout == "False\n1\n"


@pytest.mark.parametrize("module", ["broken", "threaded"])
def test_a_server_that_cannot_fork_leaves_programs_to_python(run, folder, module):
    command = warm_python.start(sys.executable, environment(folder), [module, "imported"])
    assert outcome(run(*command, "-c", WAS_FORKED)) == (0, "False\n", "")
    assert outcome(run(*command, "-c", WAS_FORKED)) == (0, "False\n", "")


def test_no_server_leaves_programs_to_python(run, tmp_path):
    client = [sys.executable, "-I", "-S", warm_python.__file__, "run", str(tmp_path / "socket")]
    assert outcome(run(*client, "-c", WAS_FORKED)) == (0, "False\n", "")


def test_no_socket_leaves_programs_to_python(monkeypatch, folder, tmp_path):
    deep = tmp_path / ("long" * 30)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    assert warm_python.start(sys.executable, environment(folder)) == [sys.executable]
    assert not any(deep.iterdir())


def test_programs_of_one_server_run_at_the_same_time(warm, run, folder, tmp_path):
    wait = "import sys; sys.stdin.readline()"
    waiting = subprocess.Popen([*warm, "-c", wait], stdin=subprocess.PIPE, env=environment(folder))
    assert run(*warm, "-c", WAS_FORKED).stdout == "True\n"
    assert waiting.poll() is None
    waiting.communicate(b"\n", timeout=60)
    assert waiting.returncode == 0


def test_a_program_ends_with_its_client(warm, folder):
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    command = [*warm, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(folder)) as client:
        assert client.stdout is not None
        process = int(client.stdout.readline())
        client.kill()
    await_end(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_and_its_programs_end_with_the_starter(folder, number):
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(folder)
    ) as starter:
        assert starter.stdout is not None
        socket_folder, server, program = starter.stdout.readline().split()
        starter.send_signal(number)
    await_end(int(server))
    await_end(int(program))
    assert not Path(os.fsdecode(socket_folder)).exists()


def await_end(process: int) -> None:
    """Wait until a process has ended; fail after ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.02)
    pytest.fail(f"process {process} runs; expected it to end")
