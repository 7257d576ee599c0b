"""A griffe extension for `make docs`: a docstring line that describes several names becomes a line for each."""

import re

import griffe

_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)$", re.MULTILINE)


def each_name(docstring: str) -> str:
    """Return the text with `a, b: words` as `a: words` and `b: words`; a description may go on below its line."""
    return _SEVERAL.sub(lambda m: "\n".join(f"{m[1]}{name}: {m[3]}" for name in m[2].split(", ")), docstring)


class EachName(griffe.Extension):
    """Splits such lines in every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = each_name(obj.docstring.value)
