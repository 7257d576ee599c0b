"""The licence that a wheel or sdist states, and whether the corpus may take from it."""

import re
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

_ADMITTED = re.compile(r"\b(mit|bsd|apache|psf|python software foundation|0bsd|isc)\b", re.IGNORECASE)
_REFUSED = re.compile(r"gpl|mozilla|mpl|affero|proprietary|commercial", re.IGNORECASE)
_LONGEST = 100


def archive_licence(path: Path) -> str:
    """Return the licence expression, classifier or field of an archive's metadata; empty where it states none."""
    fields = message_from_string(_metadata(path))
    classifiers = [value.split("::")[-1].strip() for value in fields.get_all("Classifier", []) if "License ::" in value]
    stated = [fields.get("License-Expression"), *classifiers, fields.get("License")]
    return next((line for line in stated if line and len(line) <= _LONGEST and line != "OSI Approved"), "")


def admitted(licence: str) -> bool:
    """Say whether `licence` is one of BSD, MIT, Apache, ISC or PSF and nothing stricter."""
    return bool(_ADMITTED.search(licence)) and not _REFUSED.search(licence)


def _metadata(path: Path) -> str:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            name = next(n for n in wheel.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA"))
            return wheel.read(name).decode("utf-8", "replace")
    with tarfile.open(path) as sdist:
        for member in sdist:
            if member.name.count("/") == 1 and member.name.endswith("/PKG-INFO"):
                file = sdist.extractfile(member)
                return "" if file is None else file.read().decode("utf-8", "replace")
    return ""
