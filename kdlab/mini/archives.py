"""Text out of wheels, sdists and folders: which files count as code or prose, and how they are cleaned."""

import re
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kdlab.errors import ArgumentError

Document = tuple[str, str]  # (where it comes from, its text)

_MAX_CHARS, _MIN_CHARS = 120_000, 300
_LONGEST_LINE = 300
_DATA_CHARS = re.compile(r"[0-9\\,]")
_NOT_LIBRARY = {"site-packages", "__pycache__", "idlelib", "turtledemo", "lib2to3"}
_PROSE_SUFFIXES = (".rst", ".txt", ".md")


def archive_texts(path: Path, suffixes: tuple[str, ...]) -> Iterator[Document]:
    """Yield (archive name and member path, text) of every UTF-8 member of a wheel or sdist with one of `suffixes`."""
    for name, data in sorted(_members(path, suffixes)):
        try:
            yield f"{path.name}:{name}", data.decode("utf-8")
        except UnicodeDecodeError:
            continue


def _members(path: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if name.endswith(suffixes):
                    yield name, wheel.read(name)
    elif path.name.endswith(".tar.gz"):
        with tarfile.open(path) as sdist:
            for member in sdist:
                file = sdist.extractfile(member) if member.isfile() and member.name.endswith(suffixes) else None
                if file is not None:
                    yield member.name, file.read()
    else:
        raise ArgumentError("archive", "a .whl or a .tar.gz", path)


def code_documents(archives: list[Path]) -> Iterator[Document]:
    """Yield the Python files of the running interpreter's standard library, then those of wheels and sdists."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        inner = file.relative_to(root)
        if not _NOT_LIBRARY & set(inner.parts):
            where = f"cpython-{sys.version_info.major}.{sys.version_info.minor}:{inner}"
            yield where, clean_code(file.read_text(encoding="utf-8", errors="replace"))
    for path in archives:
        for name, text in archive_texts(path, (".py",)):
            yield name, clean_code(text)


def rst_documents(archives: list[Path]) -> Iterator[Document]:
    """Yield the documentation pages of sdists, without markup that is not prose."""
    for path in archives:
        for name, text in archive_texts(path, _PROSE_SUFFIXES):
            folders = PurePosixPath(name.split(":", 1)[1]).parts[1:-1]
            if folders and folders[0] in ("doc", "docs"):
                yield name, clean_rst(text)


def clean_code(text: str) -> str:
    """Drop the leading comment (a licence, an encoding), trailing blanks and carriage returns."""
    lines = [line.rstrip() for line in text.replace("\r", "").expandtabs(4).split("\n")]
    first = next((i for i, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines[first:])).strip() + "\n"


def clean_rst(text: str) -> str:
    """Turn reStructuredText into plain paragraphs: directives, targets and roles go, their words stay."""
    text = re.sub(r"(?m)^\s*\.\. .*$", "", text.replace("\r", "").expandtabs(4))
    text = re.sub(r"(?m)^\s*:[\w ]+:.*$", "", text)
    text = re.sub(r":[\w:+-]+:`~?\.?([^`<]*?)\s*(?:<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]*?)\s*(?:<[^`>]*>)?`_{0,2}", r"\1", text)
    text = re.sub(r"(?m)^([=\-~^\"'*+#])\1{2,}\s*$", "", text).replace("``", "").replace("::\n", ":\n")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?m)[ ]+$", "", text)).strip() + "\n"


def usable_code(text: str) -> bool:
    """Say whether a file looks like written code: no data tables, no minified or foreign text."""
    if not _MIN_CHARS <= len(text) <= _MAX_CHARS or not _mostly_ascii(text):
        return False
    if max(map(len, text.split("\n"))) > _LONGEST_LINE:
        return False
    return len(_DATA_CHARS.findall(text)) < 0.12 * len(text)


def usable_prose(text: str) -> bool:
    """Say whether a page is prose enough: long, ASCII, and made of words."""
    if not _MIN_CHARS <= len(text) <= 4 * _MAX_CHARS or not _mostly_ascii(text):
        return False
    return sum(c.isalpha() or c == " " for c in text) > 0.7 * len(text)


def _mostly_ascii(text: str) -> bool:
    return len(text.encode("utf-8")) < 1.01 * len(text)
