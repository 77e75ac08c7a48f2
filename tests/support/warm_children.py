"""Python programs in processes of their own, forked from a process that has imported torch already.

`import torch` takes seconds, and the tests start hundreds of programs. `run` stands for
`subprocess.run([sys.executable, ...], capture_output=True, text=True)`: the program is `__main__`, has its own
arguments, environment, folder and import path, ends as interpreters end (functions registered with atexit run, threads
are waited for), and is killed where it takes too long.

Note: what differs from a program that is started as usual
  1. `USUAL` is imported before its first line, and the ambient runtime, where DELTA_BUDGET asks for one, is started
     before it too. What importing these modules prints, warns of or draws at random is not seen.
  2. What the interpreter or a library reads from the environment as it starts (PYTHONHASHSEED, for instance) is what
     the tests' own process has; OMP_NUM_THREADS is followed.
  3. There are no options of the interpreter (-W, -X).
  4. The garbage collector passes over what was imported before.
  5. What the program's own children print once it has ended is lost.

A test that is about one of these uses `subprocess.run`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

SERVER = Path(__file__).with_name("warm_child_server.py")
USUAL = ("torch", "torch._dynamo", "rich.console", "rich.table")
"""What nearly all programs import sooner or later: the first step of an optimizer imports torch._dynamo."""


def run(
    arguments: Sequence[str | Path],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS...` prints, and its exit status.

    Args:
        arguments: a script, "-c" and code, or "-m" and a module; then the program's own arguments.
        cwd: its folder; this process's, unless given.
        env: its whole environment; this process's, unless given.
        timeout: seconds after which the program is killed.

    Raises:
        subprocess.TimeoutExpired: the program has been killed. So it has been behind any other exception.
    """
    given = [str(each) for each in arguments]
    assert given[0] in ("-c", "-m") or not given[0].startswith("-"), "no options (note 3)"
    if not _servers:
        _servers.append(_Server())
    request = {
        "arguments": given,
        "cwd": str(cwd or Path.cwd()),
        "env": dict(os.environ if env is None else env),
    }
    try:
        return _servers[-1].run(given, request, timeout)
    except BaseException:
        # A late answer to the failed request would be taken for one to the next.
        _servers.pop().close()
        raise


class _Server:
    """The process that programs are forked from. It ends when its socket is closed."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        kept = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
        kept.pop("PYTHONPATH", None)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(theirs.fileno()), *USUAL],
                pass_fds=[theirs.fileno()],
                env=kept,
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    def run(
        self, given: list[str], request: Mapping[str, object], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program; see `run`."""
        with (
            tempfile.TemporaryFile() as asked,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            asked.write(json.dumps(request).encode())
            asked.seek(0)
            socket.send_fds(self._socket, [b"?"], [each.fileno() for each in (asked, out, err)])
            self._socket.settimeout(None)  # the server may still be importing
            pid = self._answer()
            try:
                self._socket.settimeout(timeout)
                status = self._answer()
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                if isinstance(error, TimeoutError):
                    told = (_text(out), _text(err))
                    raise subprocess.TimeoutExpired(given, timeout, *told) from None
                raise
            return subprocess.CompletedProcess(given, status, _text(out), _text(err))

    def close(self) -> None:
        """Have the server end."""
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it waits for a program
            self._process.kill()
            self._process.wait()

    def _answer(self) -> int:
        told = b""
        while len(told) < 8:
            more = self._socket.recv(8 - len(told))
            if not more:
                raise RuntimeError("the process that programs are forked from has ended")
            told += more
        return struct.unpack("<q", told)[0]


_servers: list[_Server] = []


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()
