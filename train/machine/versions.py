"""Installed versions, and whether they fit together. Imports no JAX, which may not start."""

import platform
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

OWN = "jaxamp-train"
PLUGINS = (
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("jax-rocm7-plugin", "jax-rocm7-pjrt", "libtpu"),
)
PACKAGES = ("jax", "jaxlib", *PLUGINS, "flax", "optax", "jmp", "numpy", "orbax-checkpoint", OWN)


def versions() -> dict[str, str]:
    """Versions of Python and of what is installed of PACKAGES."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def misfits(found: Mapping[str, str]) -> list[str]:
    """One line for each installed version that another package does not take."""
    lines = []
    python_range, own = own_requirements()
    if not SpecifierSet(python_range).contains(found["python"], prereleases=True):
        lines.append(f"{OWN} needs Python {python_range}; {found['python']} runs")
    for requirement in map(Requirement, own):
        if requirement.name in PACKAGES and requirement.name not in found:
            lines.append(f"{OWN} needs {requirement.name}; pip install '{requirement}'")
    needs = {name: metadata.requires(name) or [] for name in found if name in PACKAGES}
    needs |= {OWN: own}
    for name, requirements in needs.items():
        lines += _unmet(name, [Requirement(text) for text in requirements], found)
    return list(dict.fromkeys(lines))


def own_requirements() -> tuple[str, list[str]]:
    """(range of Python, requirements) of this project: of the checkout, or as installed."""
    file = Path(__file__).parents[2] / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text())["project"]
        if project["name"] == OWN:
            return project["requires-python"], project["dependencies"]
    described = metadata.metadata(OWN)
    return described["Requires-Python"], metadata.requires(OWN) or []


def _unmet(name: str, requirements: list[Requirement], found: Mapping[str, str]) -> Iterator[str]:
    for extra in ("", *_extras_in_use(requirements, found)):
        for requirement in requirements:
            needed = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            version = found.get(needed)
            if version and not requirement.specifier.contains(version, prereleases=True):
                asked = f"{name}[{extra}]" if extra and requirement.marker else name
                yield (
                    f"{asked} {found.get(name, '')} needs {needed}{requirement.specifier}; "
                    f"{version} is installed; pip install '{needed}{requirement.specifier}'"
                )


def _extras_in_use(requirements: list[Requirement], found: Mapping[str, str]) -> list[str]:
    """Extras that ask for a plugin which is installed, such as jax's `cuda13` and `tpu`."""
    extras = [name for r in requirements for name in _extras(r)]
    return [
        extra
        for extra in dict.fromkeys(extras)
        if any(r.name in found and r.name in PLUGINS and extra in _extras(r) for r in requirements)
    ]


def _extras(requirement: Requirement) -> list[str]:
    """The extras that a requirement belongs to."""
    parts = str(requirement.marker or "").split('extra == "')[1:]
    return [part.partition('"')[0] for part in parts]
