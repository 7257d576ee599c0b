"""`python -m kdlab.mini.fetch`: fetches the pinned packages that the corpus is built from, by pip and apt."""

import argparse
import subprocess
import sys
from pathlib import Path

from kdlab.errors import ArgumentError

_LISTS = Path(__file__).resolve().parent / "packages"
DOCUMENTATION = "python3.11-doc"


def pinned(form: str) -> list[str]:
    """Return the name==version lines of packages/FORM.txt; `form` is "wheels" or "sdists"."""
    lines = (_LISTS / f"{form}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def fetch(downloads: Path) -> None:
    """Fill `downloads` with wheels/, sdists/ and html/; what is already there is left alone.

    Raises:
        ArgumentError: a package cannot be fetched.
    """
    for form in ("wheels", "sdists"):
        folder = downloads / form
        folder.mkdir(parents=True, exist_ok=True)
        for line in pinned(form):
            name = line.split("==")[0]
            choice = ["--only-binary=:all:"] if form == "wheels" else [f"--no-binary={name}"]
            _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *choice, "-d", str(folder), line])
    if not (downloads / "html").exists():
        package = downloads / DOCUMENTATION
        package.mkdir(parents=True, exist_ok=True)
        _run(["apt-get", "download", DOCUMENTATION], cwd=package)
        _run(["dpkg", "-x", str(next(package.glob("*.deb"))), str(package / "files")])
        (downloads / "html").symlink_to((package / "files/usr/share/doc/python3.11/html").resolve())


def _run(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise ArgumentError("packages", "a command that succeeds", f"{' '.join(command)}: {done.stderr[-500:]}")


def main() -> None:
    """Read the command line and fetch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--downloads", type=Path, default=Path(".mini/downloads"))
    fetch(parser.parse_args().downloads)


if __name__ == "__main__":
    main()
