"""Measures jaxamp against what else there is: `python -m train.benchmark WHAT`.

Programs run on the CPU of this machine, or on what `JAX_PLATFORMS` says. Figures of a chip that is
not here are read from programs that are compiled for it ahead of time; where its compiler is not
installed they are skipped, with a line that says how to install it.
"""

import dataclasses
import difflib
import json
import sys
from collections.abc import Sequence

import jax

from train.benchmarks import autocast, memory, peers, step, trace
from train.benchmarks.options import check
from train.config import ConfigError
from train.exits import leave
from train.figures import render, to_json
from train.parse import parse_flags

PROG = "python -m train.benchmark"
BENCHMARKS = {"autocast": autocast, "step": step, "peers": peers, "memory": memory, "trace": trace}


def main(args: Sequence[str] | None = None) -> int:
    """Prints the table; the exit code is 1 where a target is missed, 2 for bad input."""
    name, *flags = list(sys.argv[1:] if args is None else args) or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", asked or "cpu")
    try:
        if name not in BENCHMARKS:
            near = difflib.get_close_matches(name, BENCHMARKS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(BENCHMARKS)}"
            raise ConfigError(f"unknown benchmark {name!r}; {hint}")
        benchmark = BENCHMARKS[name]
        options = parse_flags(benchmark.Options, flags, f"{PROG} {name}", benchmark.ABOUT)
        check(options)
        report = benchmark.measure(options)
        found = to_json(report, {"benchmark": name} | dataclasses.asdict(options))
        options.json.write_text(json.dumps(found, indent=2, default=str) + "\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(render(report))
    print(f"wrote {options.json}")
    return 0 if all(target.passed for target in report.targets) else 1


def _usage() -> str:
    lines = [f"usage: {PROG} WHAT [flags]; {PROG} WHAT --help says more", ""]
    for name, benchmark in BENCHMARKS.items():
        lines.append(f"{name:10}{' '.join(benchmark.ABOUT.split())}")
    return "\n".join(lines)


if __name__ == "__main__":
    leave(main())
