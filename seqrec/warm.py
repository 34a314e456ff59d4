"""Warm starts: a process that has imported torch once runs each command in a fork of itself.

While `seqrec repro` runs, `python -m seqrec STAGE` hands its arguments, folder, environment and terminal to that
process, and waits for the fork. Each stage is still a process of its own; only its imports are not paid again. Without
the variable `SOCKET`, or where the process is gone, a command runs as usual. `python -m seqrec.warm -m MODULE ...` does
the same for any module, as KFP's local runner asks for one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SOCKET = "SEQREC_WARM"
HEAVY = (
    "seqrec.stages.pretrain",
    "seqrec.stages.finetune",
    "seqrec.stages.evaluate",
    "torch._dynamo",  # optimisers ask it
)


@contextlib.contextmanager
def process(*modules: str, wait: bool = False, **variables: str) -> Iterator[dict[str, str]]:
    """Keep a warm process while the block runs; yield the variables with which commands find it.

    It imports while the block runs; a command that starts before it is ready runs alone. Where processes cannot be
    forked in this way, there is none, and the variables are empty. If this process was itself given one, that is used.

    Args:
        modules: what it imports besides `HEAVY`.
        wait: whether the block starts only when it is ready.
        variables: additions to its environment while it imports.
    """
    if sys.platform != "linux":
        yield {}
        return
    if Path(os.environ.get(SOCKET, "")).is_socket():
        yield {SOCKET: os.environ[SOCKET]}
        return
    with tempfile.TemporaryDirectory() as folder:  # which only this user may enter
        path = str(Path(folder, "socket"))
        command, environment = [sys.executable, "-m", "seqrec.warm", path], {**os.environ, **variables}
        with subprocess.Popen([*command, *HEAVY, *modules], stdin=subprocess.PIPE, env=environment) as server:
            try:
                while wait and not Path(path).is_socket() and server.poll() is None:
                    time.sleep(0.05)
                yield {SOCKET: path}
            finally:
                server.kill()


def call(module: str, arguments: Sequence[str]) -> int | None:
    """Run a module in a fork of the warm process; return its exit status, or None if there is no such process."""
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(os.environ[SOCKET])
        except (KeyError, OSError, AttributeError):
            return None
        request = {"argv": [module, *arguments], "folder": str(Path.cwd()), "environment": dict(os.environ)}
        socket.send_fds(connection, [b"."], [0, 1, 2])
        connection.sendall(json.dumps(request).encode() + b"\n")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the fork as well
        signal.signal(signal.SIGTERM, lambda number, _: connection.sendall(bytes([number])))
        answer = connection.recv(4)
    status = int.from_bytes(answer, "big", signed=True) if answer else -signal.SIGKILL
    return status if status >= 0 else 128 - status  # as a shell reports a signal


class Fork(NamedTuple):
    """A running command: its process, and the connection of who waits for it."""

    pid: int
    connection: socket.socket


def serve(listener: socket.socket) -> list[str]:
    """Fork for each connection until the input of this process ends.

    Returns:
        In a fork, its module and arguments. The process itself never returns.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    for other in selector.get_map().values():
                        if isinstance(other.data, Fork):
                            os.kill(other.data.pid, signal.SIGKILL)
                    sys.exit()
                if key.fileobj is not listener:
                    _attend(selector, key)
                    continue
                connection, _ = listener.accept()
                request, files = _receive(connection)
                if request is None:  # its command was killed before it had asked
                    connection.close()
                    continue
                if pid := os.fork():
                    for file in files:
                        os.close(file)
                    fork = Fork(pid, connection)
                    selector.register(connection, selectors.EVENT_READ, fork)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, fork)
                    continue
                for other in [*selector.get_map().values()]:
                    if isinstance(other.data, Fork):
                        os.close(other.fd)
                connection.close()
                return _become(request, files)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return what a command asks, None if it has ended before that, and its three open files."""
    files: list[int] = []
    try:
        files = socket.recv_fds(connection, 1, 3)[1]
        return json.loads(connection.makefile("rb").readline()), files
    except (OSError, ValueError):
        for file in files:
            os.close(file)
        return None, []


def _attend(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Pass on a signal to a fork, kill it if nobody waits for it any more, or report its end."""
    fork: Fork = key.data
    if fork.connection.fileno() < 0:  # both have ended in the same moment
        return
    if key.fileobj is fork.connection:
        number = fork.connection.recv(1)
        os.kill(fork.pid, number[0] if number else signal.SIGKILL)
        if not number:
            selector.unregister(fork.connection)
        return
    _, status = os.waitpid(fork.pid, 0)
    selector.unregister(key.fd)
    os.close(key.fd)
    with contextlib.suppress(KeyError):
        selector.unregister(fork.connection)
    with fork.connection, contextlib.suppress(OSError):
        fork.connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def _become(request: dict[str, Any], files: Sequence[int]) -> list[str]:
    """Take over the terminal, the folder and the environment of a command; return its module and arguments."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    del os.environ[SOCKET]  # what it starts itself is not a stage
    if os.environ.get("OMP_NUM_THREADS", "").isdigit() and "torch" in sys.modules:  # which it reads on import alone
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return request["argv"]


def _be_warm(path: str, modules: Sequence[str]) -> list[str]:
    """Be the warm process; return in a fork, with its module and arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # a fork that collects garbage would copy every page
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        argv = serve(listener)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return argv


def _leave(status: Sequence[int]) -> None:
    """End at once if the command has ended with a `status`: clearing modules would copy the warm process's pages."""
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])


if __name__ == "__main__":
    ended: list[int] = []
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        if (status := call(sys.argv[0], sys.argv[1:])) is not None:
            sys.exit(status)
    else:
        atexit.register(_leave, ended)  # registered first, it is called last
        sys.argv = _be_warm(sys.argv[1], sys.argv[2:])
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        ended += [end.code or 0] if isinstance(end.code, int | None) else []
        raise
    ended.append(0)
