"""The command line `kdlab`: every verb is one library call, errors are one line, exit statuses are documented."""

import contextlib
import os
import sys
from collections.abc import Sequence

from kdlab.cli.parser import make_parser
from kdlab.cli.usage import parse_arguments
from kdlab.errors import (
    ArgumentError,
    CheckpointError,
    ComparisonError,
    ConfigError,
    KdlabError,
    NotebookError,
    ParameterError,
    SchemaError,
    UnsupportedDevice,
)

DONE, FAILED, BAD_VALUE, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 130
_BAD_VALUES = (
    ArgumentError,
    CheckpointError,
    ComparisonError,
    ConfigError,
    ParameterError,
    SchemaError,
    UnsupportedDevice,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    UnicodeDecodeError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` when None) and return its exit status."""
    try:
        arguments = parse_arguments(make_parser(), argv)
        arguments.argv = sys.argv[1:] if argv is None else list(argv)
        status = int(arguments.verb(arguments))
        sys.stdout.flush()
        return status
    except SystemExit as stop:  # argparse: --help is 0, a usage error 2
        return stop.code if isinstance(stop.code, int) else BAD_VALUE
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read us has gone; what Python still holds for it must go elsewhere, or it complains at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except NotebookError as error:
        return _say(error, UNFINISHED)
    except _BAD_VALUES as error:
        return _say(error, BAD_VALUE)
    except (KdlabError, OSError, MemoryError) as error:
        return _say(error, FAILED)


def _say(message: object, status: int) -> int:
    text = " ".join(str(message).split()) or type(message).__name__
    print(f"kdlab: {text}", file=sys.stderr)
    return status
