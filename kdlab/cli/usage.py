"""Command lines read: what a verb does not know is refused with that verb's own usage and the closest name."""

import argparse
import difflib
import re
from collections.abc import Sequence


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


def _suggestion(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    known = re.findall(r"--[a-z][a-z-]*", parser.format_usage())
    words = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    close = [match for word in words for match in difflib.get_close_matches(word, known, n=1)]
    return f" (did you mean {', '.join(close)}?)" if close else ""
