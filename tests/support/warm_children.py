"""Python programs in processes of their own, forked from a process that has imported torch already.

`import torch` takes seconds, and the tests start hundreds of programs. `run` stands for
`subprocess.run([sys.executable, ...], capture_output=True, text=True)` and gives the same outcome: the program is
`__main__`, has its own arguments, environment, folder and import path, ends as interpreters end (functions registered
with atexit run, threads are waited for), and is killed where it takes too long.

What differs: torch is there before the first line of the program, and what the interpreter or a library reads from the
environment as it starts (PYTHONHASHSEED, for instance) is what the tests' own process has; OMP_NUM_THREADS is followed.
Programs that are about such variables, about options of the interpreter or about `import torch` itself are started as
usual.
"""

from __future__ import annotations

import atexit
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
    imports: tuple[str, ...] = USUAL,
) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS...` prints, and its exit status.

    Args:
        arguments: a script, "-c" and code, or "-m" and a module; then the program's own arguments.
        cwd: its folder; this process's, unless given.
        env: its whole environment; this process's, unless given.
        timeout: seconds after which the program is killed.
        imports: the modules that are imported beforehand, in a process that all programs with these modules share.

    Raises:
        subprocess.TimeoutExpired: the program has been killed.
    """
    if imports not in _servers:
        _servers[imports] = _Server(imports)
    try:
        return _servers[imports].run(
            [str(each) for each in arguments],
            str(cwd or Path.cwd()),
            dict(os.environ if env is None else env),
            timeout,
        )
    except BaseException:
        del _servers[imports]  # its next answer might be one to what failed
        raise


class _Server:
    """The process that programs are forked from. It ends with this one: its socket is closed then."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        atexit.register(self.close)
        self._socket, theirs = socket.socketpair()
        kept = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
        kept.pop("PYTHONPATH", None)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(theirs.fileno()), *imports],
                pass_fds=[theirs.fileno()],
                env=kept,
                stdin=subprocess.DEVNULL,
            )

    def run(
        self, arguments: list[str], cwd: str, env: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        request = {"arguments": arguments, "cwd": cwd, "env": env}
        with (
            tempfile.TemporaryFile() as asked,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            asked.write(json.dumps(request).encode())
            asked.seek(0)
            socket.send_fds(self._socket, [b"?"], [each.fileno() for each in (asked, out, err)])
            pid = self._answer(120)
            try:
                status = self._answer(timeout)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(
                    arguments, timeout, _text(out), _text(err)
                ) from None
            return subprocess.CompletedProcess(arguments, status, _text(out), _text(err))

    def close(self) -> None:
        """Have the server end, once the program is over that it runs."""
        self._socket.close()
        self._process.wait(timeout=60)

    def _answer(self, timeout: float) -> int:
        self._socket.settimeout(timeout)
        told = b""
        while len(told) < 8:
            more = self._socket.recv(8 - len(told))
            if not more:
                raise RuntimeError("the process that programs are forked from has ended")
            told += more
        return struct.unpack("<q", told)[0]


_servers: dict[tuple[str, ...], _Server] = {}


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()
