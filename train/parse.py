"""A config from the command line, a TOML file, or what a run wrote down; errors in one line."""

import argparse
import contextlib
import difflib
import io
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
from pydantic import BaseModel, ValidationError

import jaxamp
from train.config import Config, ConfigError

T = TypeVar("T")


def parse(args: Sequence[str] | None, prog: str, description: str) -> Config:
    """The config of a command line: defaults, then the file of `--config`, then the flags.

    With `--resume` and no `--config` it starts from what the run wrote down.

    Raises:
        ConfigError: an unknown key or a value that cannot be; one line.
        SystemExit: `--help` was asked for, and printed.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config")
    finder.add_argument("--workdir")
    finder.add_argument("--resume", action="store_true")
    try:
        default = _start(finder.parse_known_args(args)[0])
    except argparse.ArgumentError:
        default = Config()  # a flag without its value: tyro says so
    return parse_flags(Config, args, prog, description, default)


def parse_flags(
    kind: type[T], args: Sequence[str] | None, prog: str, about: str, start: T | None = None
) -> T:
    """A `kind` from command-line flags; a flag that is not given is as in `start`.

    Raises:
        ConfigError: a flag that is unknown or has a value that cannot be; one line.
        SystemExit: `--help` was asked for, and printed.
    """
    printed = io.StringIO()
    default: Any = tyro.MISSING_NONPROP if start is None else start
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(kind, args=args, prog=prog, description=about, default=default)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_one_line(printed.getvalue(), stop)) from None


def _start(flags: argparse.Namespace) -> Config:
    if flags.config is not None:
        return load_toml(flags.config)
    if flags.resume and flags.workdir is not None:
        written = Path(flags.workdir) / "config.json"
        if written.is_file():
            return load_json(written.read_text(), str(written))
    return Config()


def load_toml(path: str) -> Config:
    """The config of a TOML file.

    Raises:
        ConfigError: no such file, no TOML, an unknown key, a value that cannot be.
    """
    try:
        settings = tomllib.loads(Path(path).read_text())
    except OSError as error:
        near = difflib.get_close_matches(path, map(str, Path("configs").glob("*.toml")), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--config {path}: {error.strerror}{hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not TOML: {error}") from None
    try:
        return Config.model_validate(settings | {"config": path})
    except ValidationError as error:
        raise ConfigError(f"--config {path}: {describe(error)}") from None


def load_json(text: str, where: str) -> Config:
    """The config that a run wrote down.

    Raises:
        ConfigError: it is not one of this version.
    """
    try:
        return Config.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe(error)}") from None


def parse_policy(name: str, flag: str) -> jaxamp.Policy:
    """The policy that a flag names.

    Raises:
        ConfigError: there is none of that name; the line names the flag.
    """
    try:
        return jaxamp.get_policy(name)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def describe(error: ValidationError) -> str:
    """The first problem of a validation, in one line: key, what is wrong, what was given."""
    problem = error.errors()[0]
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_nearest(problem['loc'])}"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    shown = "" if isinstance(given, dict | BaseModel) else f", got {given!r}"
    return f"{key}: {message}{shown}" if key else message


def _nearest(location: Sequence[Any]) -> str:
    model: Any = Config
    for name in location[:-1]:
        model = model.model_fields[name].annotation
    names = list(model.model_fields)
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(names)}"


def _one_line(printed: str, stop: BaseException) -> str:
    cause = stop.__context__
    while cause is not None and not isinstance(cause, ValidationError):
        cause = cause.__context__
    # tyro prints a box: its words without the title, the frame and the pointer to --help.
    body = printed.partition("\n")[2] or printed
    text = " ".join(re.split(r"For full helptext|Argument helptext", body)[0].split())
    text = " ".join(re.sub(r"[^\x00-\x7f]|(?<!\S)-{3,}(?!\S)", " ", text).split())
    if cause is None:
        return text
    part = re.search(r"Error parsing (\w+):", text)
    inside = part is not None and part[1] in Config.model_fields
    return f"{part[1]}.{describe(cause)}" if inside and part else describe(cause)
