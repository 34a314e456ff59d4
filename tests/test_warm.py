"""Warm starts: a command runs in a fork of the warm process, and is for its caller what it would be alone."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support import until

from seqrec import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


def start(variables, *arguments, folder="."):
    command, environment = [sys.executable, "-m", "seqrec", *arguments], {**os.environ, **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def server(warm_steps):
    """The warm process."""
    ours = warm_steps[warm.SOCKET].encode()  # other tests may have a warm process as well
    return next(pid for pid in children(os.getpid()) if ours in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.fixture
def stopped(warm_steps, server):
    """A command that would take a moment, and its fork of the warm process, stopped at once."""
    with start(warm_steps, "prepare", "--help") as command:
        (fork,) = until(lambda: children(server))
        os.kill(fork, signal.SIGSTOP)
        yield command, fork
        command.kill()
    until(lambda: not children(server))


def test_output_status_folder_and_environment_are_those_of_the_command(warm_steps, tmp_path):
    answers = []
    for found in ({}, warm_steps):
        for arguments in (("leaderboard", "--reports", "nowhere"), ("finetune", "--help"), ("no-command",)):
            with start({**found, "COLUMNS": "60"}, *arguments, folder=tmp_path) as command:
                answers.append((*command.communicate(), command.returncode))

    assert answers[:3] == answers[3:]
    assert [status for *_, status in answers[:3]] == [1, 0, 2]
    printed, said, _ = answers[0]
    assert printed == ""
    assert said.startswith("leaderboard: ")
    assert "Traceback" not in said
    assert max(map(len, answers[1][0].splitlines())) <= 60


def test_the_number_of_threads_is_that_of_the_command(warm_steps):
    command = [sys.executable, "-m", "seqrec.warm", "-m", "timeit", "-n", "1", "-r", "1"]
    command += ["-s", "import torch", "print(torch.get_num_threads())"]
    for threads in ("1", "2"):
        environment = {**os.environ, **warm_steps, "OMP_NUM_THREADS": threads}
        assert subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True).stdout[0] == threads


def test_a_terminated_command_ends_its_fork_and_says_so(stopped):
    command, fork = stopped

    command.terminate()
    with suppress(subprocess.TimeoutExpired):  # a kernel may keep the signal until the fork goes on
        command.wait(2)
    with suppress(ProcessLookupError):
        os.kill(fork, signal.SIGCONT)

    assert command.wait(60) == 128 + signal.SIGTERM


def test_nothing_is_left_of_a_killed_command(stopped):
    command, fork = stopped

    command.kill()

    assert until(lambda: not Path(f"/proc/{fork}").exists())


def test_a_command_and_its_fork_may_be_killed_in_the_same_moment(stopped, server, warm_steps):
    command, fork = stopped

    os.kill(server, signal.SIGSTOP)
    until(lambda: ") T" in Path(f"/proc/{server}/stat").read_text())
    os.kill(fork, signal.SIGKILL)
    until(lambda: ") Z" in Path(f"/proc/{fork}/stat").read_text())
    command.kill()
    command.wait()
    os.kill(server, signal.SIGCONT)

    assert until(lambda: not children(server))
    with start(warm_steps, "prepare", "--help"):
        assert until(lambda: children(server))  # it still answers


@pytest.mark.parametrize("sent", [None, b"", b'{"argv": ["seqrec"'])
def test_a_command_killed_before_it_has_asked_leaves_the_warm_process_as_it_was(server, warm_steps, sent):
    files = Path(f"/proc/{server}/fd")
    before = len(list(files.iterdir()))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(warm_steps[warm.SOCKET])
        if sent is not None:
            socket.send_fds(connection, [b"."], [0, 1, 2])
            connection.sendall(sent)

    with start(warm_steps, "--version") as command:
        assert until(lambda: children(server))  # it still answers
        assert command.stdout.read().strip()
    until(lambda: not children(server))
    assert until(lambda: len(list(files.iterdir())) == before)


def test_without_a_warm_process_a_command_runs_alone(tmp_path):
    with start({warm.SOCKET: str(tmp_path / "gone")}, "--version") as command:
        assert command.stdout.read().strip()
    assert command.returncode == 0


def test_the_warm_process_ends_with_its_block():
    before = set(children(os.getpid()))
    with warm.process():
        assert len(set(children(os.getpid())) - before) == 1
    assert set(children(os.getpid())) == before
