"""Every exception kdlab raises on purpose. All are `KdlabError`; bad values are `ValueError` as well."""


class KdlabError(Exception):
    """Base of all errors that kdlab raises on purpose."""


class ArgumentError(KdlabError, ValueError):
    """An argument has a wrong value: the message names it, what was expected and what came."""

    def __init__(self, argument: str, expected: str, got: object) -> None:
        super().__init__(argument, expected, got)  # all three, so that the error survives pickling
        self.argument, self.expected, self.got = argument, expected, got

    def __str__(self) -> str:
        return f"{self.argument}: expected {self.expected}, got {self.got}"


class ShapeError(ArgumentError):
    """A tensor has a wrong shape, dtype or device."""


class NotSupported(ArgumentError):
    """A value that the signature admits but that this version of kdlab does not run."""


class ConfigError(KdlabError, ValueError):
    """A `config.json` holds a missing, unknown or contradictory value."""


class CheckpointError(KdlabError, ValueError):
    """A checkpoint lacks a tensor, holds an unknown one, or one of a wrong shape or dtype."""


class TreeError(KdlabError, ValueError):
    """A draft tree breaks an invariant: the message names the stream and the node."""


class SchemaError(KdlabError, ValueError):
    """A result file has an unknown kind or schema version, or lacks columns."""


class ComparisonError(KdlabError, ValueError):
    """Results that differ in more than what is compared were put side by side."""


class ParameterError(KdlabError, ValueError):
    """A notebook parameter is unknown or has a value of the wrong type."""


class NotebookError(KdlabError, RuntimeError):
    """A notebook did not run to its end: the message says where and why."""


class UnsupportedDevice(KdlabError, RuntimeError):
    """The device or machine cannot run what was asked for."""


class BuildError(KdlabError, RuntimeError):
    """A CUDA source did not compile: the message holds file, constants, architecture and the compiler's log."""


class LaunchError(KdlabError, RuntimeError):
    """The driver refused a kernel's launch: the message holds the kernel, its launch configuration and the reason."""
