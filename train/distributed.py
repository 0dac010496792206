"""Several processes as one program: when to start `jax.distributed`, who writes, how it ends."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax

from train.config import ConfigError, DistributedConfig

# A process that is gone is noticed by the others within about this time, in seconds.
HEARTBEAT = 30
# The exit code when another process is gone: a launcher should start all of them again.
OTHERS_GONE = 3


def initialize(config: DistributedConfig) -> bool:
    """Joins the other processes where the flags or the environment say that there are some.

    Must come before anything that asks JAX for its devices.

    Returns:
        Whether there are several processes.

    Raises:
        ConfigError: flags that do not go together.
        SystemExit: not all processes came in time; one line says so, and the code is 2.
    """
    given = {
        "coordinator_address": config.coordinator,
        "num_processes": config.num_processes,
        "process_id": config.process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ConfigError(
            "--distributed.coordinator, --distributed.num-processes and --distributed.process-id "
            "go together: give all three or none"
        )
    if missing and not (config.auto or _in_a_cluster(os.environ)):
        return False
    if not missing:
        _check_numbers(config)
    with _giving_up(config):
        jax.distributed.initialize(
            **given,
            initialization_timeout=config.timeout_seconds + HEARTBEAT,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
        )
    return jax.process_count() > 1


@contextmanager
def _giving_up(config: DistributedConfig) -> Iterator[None]:
    """Ends the process in time: JAX's own end of patience is an abort with a stack trace."""

    def give_up():
        where = config.coordinator or "that the environment names"
        print(
            f"error: the coordinator {where} did not answer, or not all processes came, in "
            f"{config.timeout_seconds} s; start all of them or raise --distributed.timeout-seconds",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)

    timer = threading.Timer(config.timeout_seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_numbers(config: DistributedConfig) -> None:
    host, colon, port = str(config.coordinator).rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ConfigError(f"--distributed.coordinator {config.coordinator}: write HOST:PORT")
    count, number = config.num_processes or 0, config.process_id or 0
    if number >= count:
        raise ConfigError(
            f"--distributed.process-id {number} must be below --distributed.num-processes {count}"
        )


def _in_a_cluster(environment: Any) -> bool:
    """Whether a launcher that JAX knows has started more than one process."""
    tasks = (
        environment.get("SLURM_NTASKS", "1") if "SLURM_PROCID" in environment else "1",
        environment.get("OMPI_COMM_WORLD_SIZE", "1"),
    )
    workers = environment.get("TPU_WORKER_HOSTNAMES", "")
    return "," in workers or any(count.isdigit() and int(count) > 1 for count in tasks)


def is_writer() -> bool:
    """Whether this process is the one that writes logs and prints."""
    return jax.process_index() == 0


def say(line: str) -> None:
    """Prints it once, not once a process."""
    if is_writer():
        print(line, flush=True)


@contextmanager
def ending_with_the_others() -> Iterator[None]:
    """Ends the process at once where another one is gone: all that follows would wait for it."""
    try:
        yield
    except Exception as error:
        if not others_failed(error):
            raise
        _end_without_them(error)


def others_failed(error: BaseException | None) -> bool:
    """Whether another process is to blame: an error of JAX, also as the cause of one of orbax."""
    if error is None or jax.process_count() == 1:
        return False
    # An array that gloo could not fill fails in numpy's hands, which knows no error of JAX.
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
    return of_jax or others_failed(error.__cause__)


def _end_without_them(error: BaseException) -> NoReturn:
    """One line, and out: the usual way out would wait for the processes that are gone."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    print(
        f"error: another process of this run is gone ({first[:200]}); start all of them again "
        "with --resume: the newest checkpoint is whole",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(OTHERS_GONE)
