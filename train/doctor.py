"""What a user of mixed precision must know of this machine: `python -m train.doctor`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from train.exits import InputError, exit_code, leave
from train.machine import devices, versions

PROG = "python -m train.doctor"
ABOUT = """Say what devices JAX uses, whether the installed versions fit together, which settings
change numbers, what each dtype is worth here (measured), and which policy to take. The exit code is
0 where all fits, 1 where something does not, 2 for bad input."""
WORTH = 1.5  # times float32's matmul: what 16 bits must be measured to be worth on their own


class Advice(NamedTuple):
    """A policy and why; `auto` is what `--policy auto` takes."""

    policy: str
    reason: str
    auto: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def main(args: Sequence[str] | None = None) -> int:
    """Prints what was found; the exit code is 1 where something does not fit."""
    given = sys.argv[1:] if args is None else args
    return exit_code(lambda: _doctor(given), "--json", "name another --json")


def _doctor(given: Sequence[str]) -> int:
    parser = _Parser(PROG, description=ABOUT, allow_abbrev=False)
    parser.add_argument("--json", type=Path, help="a new file for what was found, for tools")
    path = parser.parse_args(given).json
    if path is not None:
        _check(path)
    found = versions.versions()
    misfits = versions.misfits(found)
    try:
        import jax  # versions that do not fit may raise here
    except Exception as error:
        misfits.append(f"JAX does not start: {' '.join(str(error).split())}")
        results: dict[str, Any] = {"versions": found, "misfits": misfits}
    else:
        results = _examine(jax, found, misfits)
    print(render(results))
    if path is not None:
        with path.open("x") as file:
            json.dump(results, file, indent=2)
        print(f"wrote {path}")
    return 1 if misfits else 0


def _check(path: Path) -> None:
    if path.exists():
        raise InputError(f"--json {path}: is there already; name another file")
    if not path.parent.is_dir():
        raise InputError(f"--json {path}: no such directory")


def _examine(jax: Any, found: dict[str, str], misfits: list[str]) -> dict[str, Any]:
    """All that is found, as JSON's types; what does not fit is added to `misfits`."""
    from jaxamp.policy import auto_policy
    from train.chips import usable_memory
    from train.machine import rates
    from train.machine.settings import settings
    from train.progress import note

    device = jax.devices()[0]
    asked = jax.config.jax_platforms
    if line := devices.unused(devices.accelerators(), device.platform, found, asked):
        misfits.append(line)
    note("measuring what each dtype is worth ...")
    size = rates.size_for(device)
    matmuls, refused = rates.matmuls(device, size)
    return {
        "device": devices.device_name(device),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "memory_bytes": usable_memory([device]),
        "instructions": devices.cpu_instructions() if device.platform == "cpu" else [],
        "versions": found,
        "misfits": misfits,
        "settings": [one._asdict() for one in settings(jax.config, os.environ)],
        "side": size.side,
        "matmuls": [row._asdict() for row in matmuls],
        "refused": refused,
        "elementwise": [row._asdict() for row in rates.elementwise(device, size)],
        "subnormals": rates.subnormals(device),
        "advice": advise(auto_policy(device), matmuls)._asdict(),
    }


def advise(auto: Any, matmuls: Sequence[Any]) -> Advice:
    """What `--policy auto` takes, unless what was measured speaks against it.

    Args:
        auto: The policy of `jaxamp.auto_policy`, with its reason.
        matmuls: Rows of `rates.matmuls`.
    """
    by_name = {row.name: row for row in matmuls}
    name = lambda dtype: "float32" if dtype == "float32" else f"mixed_{dtype}"  # noqa: E731
    dtype, reason = str(auto.compute_dtype), auto.reason.removeprefix("auto: ")
    ratios = {d: by_name[d].ratio for d in ("bfloat16", "float16") if d in by_name}
    chosen = name(dtype)
    if dtype == "float32":
        best = max(ratios, key=lambda d: ratios[d], default="")
        if best and ratios[best] >= WORTH:
            reason = (
                f"auto takes float32 ({reason}), but here a {best} matmul runs at "
                f"{ratios[best]:.1f} times float32's speed; a step is more than that, so measure "
                f"it: python -m train.compare --policies float32 {name(best)}"
            )
            return Advice(name(best), reason, chosen)
        shown = ", ".join(f"{d} {ratio:.2f}" for d, ratio in ratios.items()) or "none ran"
        return Advice(chosen, f"{reason}; matmuls as multiples of float32's speed: {shown}", chosen)
    if dtype not in ratios:
        reason = f"auto takes {chosen} ({reason}), but its matmul does not run here"
        return Advice("float32", reason, chosen)
    if by_name["float32"].error > 1e-5:  # float32's own rounding is below that
        reason += (
            f"; float32's default here is wrong by {by_name['float32'].error:.0e}, so it is no "
            f"float32 matmul, and {dtype} runs at {ratios[dtype]:.1f} times its speed"
        )
        return Advice(chosen, reason, chosen)
    if ratios[dtype] < 1:
        reason = (
            f"auto takes {chosen} ({reason}), but here its matmul runs at {ratios[dtype]:.2f} of "
            "float32's speed; see whether something else uses the device, and measure again"
        )
        return Advice("float32", reason, chosen)
    return Advice(chosen, f"{reason}; {ratios[dtype]:.1f} times float32's speed", chosen)


def render(found: dict[str, Any]) -> str:
    """What was found, for people."""
    installed = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [f"versions: {installed}"]
    if "device" in found:
        lines = [*_device_lines(found), *lines, *_setting_lines(found), "", *_rate_lines(found), ""]
        advice = found["advice"]
        lines.append(f"policy: {advice['policy']}; {advice['reason']}")
    lines += [f"does not fit: {line}" for line in found["misfits"]] or ["all fits together"]
    return "\n".join(lines)


def _device_lines(found: dict[str, Any]) -> list[str]:
    has = f"; has {', '.join(found['instructions'])}" if found["instructions"] else ""
    memory = f"{found['memory_bytes'] / 2**30:.1f} GiB"
    return [f"device: {found['devices']} x {found['device']} ({found['platform']}), {memory}{has}"]


def _setting_lines(found: dict[str, Any]) -> list[str]:
    settings = [f"set: {s['name']}={s['value']}: {s['effect']}" for s in found["settings"]]
    return settings or ["settings: none that changes numbers"]


def _rate_lines(found: dict[str, Any]) -> list[str]:
    from train.figures import aligned

    side = found["side"]
    head = [f"matmul {side} x {side}", "TFLOP/s", "x float32", "error", "peak TFLOP/s"]
    rows = [
        [
            row["name"],
            f"{row['per_second'] / 1e12:.3g}",
            f"{row['ratio']:.2f}",
            f"{row['error']:.1e}",
            f"{row['peak'] / 1e12:g}" if row["peak"] else "-",
        ]
        for row in found["matmuls"]
    ]
    wide = [
        [row["name"], f"{row['per_second'] / 1e9:.3g}", f"{row['ratio']:.2f}"]
        for row in found["elementwise"]
    ]
    kept = ", ".join(f"{dtype} {how}" for dtype, how in found["subnormals"].items())
    return [
        *aligned([head, *rows]),
        *found["refused"],
        "",
        *aligned([["x + 1", "GB/s", "x float32"], *wide]),
        "",
        f"subnormal numbers: {kept}",
    ]


if __name__ == "__main__":
    leave(main())
