"""What all verbs share: how they are declared, and read: an unknown option is refused with the verb's own usage."""

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read a command line; on a usage error the parser that holds the option prints its usage and exits with 2.

    Args:
        parser: its verbs set `verb_parser` to their own parsers.
        argv: the words; `sys.argv` when None.
    """
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        verb: argparse.ArgumentParser = arguments.verb_parser
        verb.error(f"unrecognized arguments: {' '.join(unknown)}{_suggestion(verb, unknown)}")
    return arguments


def add_verb(
    verbs: Any, name: str, verb: Callable[[argparse.Namespace], int], text: str, examples: str, notes: str = ""
) -> argparse.ArgumentParser:
    """Add a verb and return its parser.

    Args:
        verbs: of `add_subparsers` or `add_group`.
        name: of the verb.
        verb: is called with what was parsed, and returns the exit status.
        text: what it does.
        examples: command lines, one a line.
        notes: further paragraphs of its help.
    """
    parser = _add_parser(verbs, name, text, examples, notes)
    parser.set_defaults(verb=verb)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser


def add_group(verbs: Any, name: str, text: str, examples: str, things: str, notes: str = "") -> Any:
    """Add a verb that is several, and return what `add_verb` adds them to.

    Args:
        verbs, name, text, examples, notes: as in `add_verb`.
        things: what the several are, in the plural.
    """
    parser = _add_parser(verbs, name, text, examples, notes)
    return parser.add_subparsers(title=things, required=True, metavar=things.removesuffix("s").upper())


def names(text: str) -> list[str]:
    """Read an option of names with commas between them."""
    return [name for name in text.split(",") if name]


def numbers(text: str) -> list[int]:
    """Read an option of whole numbers with commas between them."""
    return [int(number) for number in names(text)]


def new_file(text: str) -> str:
    """Read an option of a file to write: a folder, or a place below a file, is refused before the work it is for."""
    if not text or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got {text!r}, a folder" if text else "expected a file")
    above = next(folder for folder in Path(text).absolute().parents if folder.exists())
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got {text!r}, but {str(above)!r} is no folder")
    return text


def _add_parser(verbs: Any, name: str, text: str, examples: str, notes: str) -> argparse.ArgumentParser:
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"examples:\n{lines}\n\n{notes}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(verb_parser=parser)
    return parser


def _suggestion(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    known = re.findall(r"--[a-z][a-z-]*", parser.format_usage())
    words = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    close = [match for word in words for match in difflib.get_close_matches(word, known, n=1)]
    return f" (did you mean {', '.join(close)}?)" if close else ""
