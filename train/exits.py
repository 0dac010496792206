"""How a program ends: with one line for what the user can mend, and an exit code."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn


class InputError(ValueError):
    """What the user gave cannot be used; one line says what, where, and what to do."""


def exit_code(program: Callable[[], int], place: str, mend: str) -> int:
    """What `program` returns; 2 for bad input and 130 for an interrupt, each with one line.

    Args:
        program: All that the command does.
        place: Where an error of the system that names no file happened.
        mend: What to do after such an error.
    """
    try:
        return program()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or place}: {error.strerror}; {mend}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {mend}", file=sys.stderr)
        return 130


def leave(code: int) -> NoReturn:
    """The end of a program whose `main` returned this exit code.

    After a failed write orbax's threads wait for what will not come, and Python waits for them: ten
    minutes in which a restart loop stands still. After an interrupt a computation of XLA may still
    run, and dies with Python. So what ends badly ends at once.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)
