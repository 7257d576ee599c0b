"""How a token is written in drawings and tables: one line, every character visible."""

_VISIBLE = {" ": "␣", "\n": "⏎"}


def _visible(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def printable(text: str) -> str:
    """Return `text` on one line: space as `␣`, newline as `⏎`, other unprintable characters as escapes.

    Args:
        text: any string; a token's own text.

    Returns:
        A string that holds only printable characters and no blank.
    """
    return "".join(map(_visible, text))


def printable_bytes(data: bytes) -> str:
    r"""Return `printable` of UTF-8 `data`; bytes that are no whole character are shown as `\xNN`."""
    return printable(data.decode("utf-8", errors="backslashreplace"))
