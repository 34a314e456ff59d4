"""Kills each process that imports this, with all of its command, when the stage KILL_STAGE would finish KILL_FILE."""

import os
import signal
import sys


def kill(event, args):
    chosen = event == "os.rename" and os.environ.get("KILL_STAGE") in sys.argv
    if chosen and os.fspath(args[1]).endswith(os.environ["KILL_FILE"]):
        os.killpg(int(os.environ["KILL_GROUP"]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)  # a fork of the warm process is in that one's group


sys.addaudithook(kill)
