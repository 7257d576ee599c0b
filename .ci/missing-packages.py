"""Say which packages of pyproject.toml (core, and the extras named as arguments) this interpreter lacks.

It uses the standard library alone, so that any interpreter can run it.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 (any interpreter may run this)
    sys.exit(f"kdlab needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}")

import tomllib


def numbers(text: str) -> list[int]:
    """Return the leading numbers of a version: `2.11.0+cu130` -> [2, 11, 0]."""
    return [int(part) for part in re.match(r"[\d.]*", text)[0].strip(".").split(".") if part]


project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
wanted = [*project["dependencies"], *(r for extra in sys.argv[1:] for r in project["optional-dependencies"][extra])]
lacking = []
for requirement in wanted:
    name, minimum = re.match(r"([\w.-]+)(?:>=([\d.]+))?", requirement).groups()
    try:
        found = version(name)
    except PackageNotFoundError:
        lacking.append(requirement)
        continue
    if minimum and numbers(found) < numbers(minimum):
        lacking.append(f"{requirement} (found {found})")
if lacking:
    sys.exit(f"{sys.executable} lacks packages that kdlab needs: {', '.join(lacking)}")
