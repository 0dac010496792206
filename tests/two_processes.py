"""Two processes of one run on loopback, each with one device."""

import os
import socket
import subprocess
import sys
import time

from small_run import RARELY, flags, newest_step

RUN = ("-m", "train.run")


def start(workdir, number, port, *more, program=RUN, env=os.environ, **changes):
    command = [sys.executable, *program, *flags(workdir, *more, **(RARELY | changes))]
    command += ["--distributed.coordinator", f"127.0.0.1:{port}"]
    command += ["--distributed.num-processes", "2", "--distributed.process-id", str(number)]
    env = env | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_two(workdir, *more, then=None, **settings):
    """Exit codes and outputs of both; `then` is given the pair while it runs."""
    port = free_port()
    pair = [start(workdir, number, port, *more, **settings) for number in (0, 1)]
    if then:
        then(pair)
    outputs = [process.communicate(timeout=300) for process in pair]
    return [process.returncode for process in pair], outputs


def wait_for_step(workdir, step, pair):
    while newest_step(workdir) < step:
        assert all(process.poll() is None for process in pair), [p.communicate() for p in pair]
        time.sleep(0.05)
