"""A report as PDF: a Chromium that is on this machine prints the cleaned HTML, without scripts, network or profile."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from kdlab.errors import KdlabError
from kdlab.report.done_marker import write_whole

BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
TIMEOUT_S = 180.0
_OPTIONS = (
    "--headless=new", "--disable-gpu", "--disable-extensions", "--disable-background-networking", "--disable-sync",
    "--disable-dev-shm-usage", "--no-first-run", "--no-default-browser-check", "--disable-breakpad",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--no-pdf-header-footer", "--generate-pdf-document-outline",
)  # fmt: skip
_PAGE, _PICTURE = re.compile(rb"/Type\s*/Page\b"), re.compile(rb"/Subtype\s*/Image\b")
_IMG = re.compile(r'<img[^>]* src="(data:[^"]+)"')


def find_browser() -> str | None:
    """Return the path of a Chromium or Chrome on this machine, None where there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def next_step(html: Path) -> str:
    """Say what to do for a PDF where no browser was found."""
    return (
        f"no PDF: none of {', '.join(BROWSERS)} is on this machine; install one (Debian and Ubuntu: "
        f"apt-get install chromium) and give the command again, or open {html} in any browser and print it to a file"
    )


def print_pdf(html: str | Path, pdf: str | Path, *, browser: str | None = None) -> int:
    """Print a report as PDF; the file is there whole or not at all.

    Args:
        html: from `build_report`.
        pdf: the file to write; its folder is made when missing.
        browser: a Chromium's path; None takes the first of BROWSERS.

    Returns:
        The number of pages.

    Raises:
        KdlabError: no browser was found, it did not print, or fewer figures than the report has.
        OSError: a file cannot be read or written.
    """
    html, pdf = Path(html), Path(pdf)
    program = browser or find_browser()
    if program is None:
        raise KdlabError(next_step(html))
    with tempfile.TemporaryDirectory(prefix="kdlab-pdf-") as folder:
        printed = Path(folder) / "report.pdf"
        said = _print(program, html.resolve(), printed, Path(folder))
        content = printed.read_bytes() if printed.is_file() else b""
    if not content.startswith(b"%PDF-") or not content.rstrip().endswith(b"%%EOF"):
        raise KdlabError(f"{program} printed no PDF of {html}: {said or 'it said nothing'}")
    figures = set(_IMG.findall(html.read_text(encoding="utf-8")))
    num_printed = len(_PICTURE.findall(content))  # equal pictures are one object
    if num_printed < len(figures):
        raise KdlabError(f"{program} printed {num_printed} of the {len(figures)} figures of {html}")
    write_whole(pdf, content)
    return len(_PAGE.findall(content))


def _print(program: str, html: Path, pdf: Path, folder: Path) -> str:
    """Run the browser and return the last line that it said."""
    # A browser refuses to build its sandbox for root, as which containers run; the page has no script to contain.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    places = [f"--user-data-dir={folder / 'profile'}", f"--crash-dumps-dir={folder}", f"--print-to-pdf={pdf}"]
    command = [program, *_OPTIONS, *sandbox, *places, html.as_uri()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, cwd=folder)
    except subprocess.TimeoutExpired:
        return f"it did not end in {TIMEOUT_S:.0f} s"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else ""
