"""Decoded text coloured by how each token came: from the prefill, from the draft at some depth, or as a bonus."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch, Rectangle

from kdlab.checks import check_int
from kdlab.decode.records import Run
from kdlab.errors import ArgumentError
from kdlab.model.tokenizer import Tokenizer
from kdlab.viz import theme

_PREFILL, _BONUS, _DRAFT = theme.BLACK, theme.GREEN, theme.SKY
_DEEPEST_TINT = 8
_OUTPUT_STYLE = "white-space:pre-wrap;word-break:break-word;font-size:15px;line-height:1.7;background-color:#ffffff"


@dataclass(frozen=True, slots=True)
class Origin:
    """How one output token came: in round -1 from the prefill, at depth 1.. from the draft, at depth 0 as a bonus."""

    round: int
    depth: int

    @property
    def is_bonus(self) -> bool:
        """The target's own token at the end of a round."""
        return self.round >= 0 and self.depth == 0

    @property
    def name(self) -> str:
        """The words of the legend and of the tooltips."""
        if self.round < 0:
            return "first token, from the prefill"
        return "bonus, the target's own" if self.is_bonus else f"accepted draft, depth {self.depth}"

    @property
    def fill(self) -> str:
        """Background colour, as #rrggbb."""
        if self.round < 0:
            return _PREFILL
        if self.is_bonus:
            return to_hex(theme.mix(to_rgb(_BONUS), 0.45))
        return to_hex(theme.mix(to_rgb(_DRAFT), 0.15 + 0.85 * min(self.depth, _DEEPEST_TINT) / _DEEPEST_TINT))


def token_origins(run: Run, prompt: int) -> list[Origin]:
    """Name the origin of each output token of one prompt, cut where the output is cut.

    Raises:
        ArgumentError: no such prompt, or the rounds do not spell the output.
    """
    check_int("prompt", prompt, minimum=0, maximum=len(run.output_ids) - 1)
    output = list(run.output_ids[prompt])
    tokens, origins = output[:1], [Origin(-1, 0)]
    for record in run.rounds[prompt]:
        tokens += [*record.accepted_tokens, record.bonus]
        origins += [Origin(record.round, depth) for depth in range(1, len(record.path))] + [Origin(record.round, 0)]
    if tokens[: len(output)] != output:
        raise ArgumentError("run", f"rounds that spell the output of prompt {prompt}", f"{tokens} for {output}")
    return origins[: len(output)]


def text_html(run: Run, prompt: int, tokenizer: Tokenizer) -> str:
    """Return one prompt's output as HTML with a legend; every piece of text is escaped, nothing in it is script.

    Args:
        run: what `generate` returned.
        prompt: index of the prompt.
        tokenizer: gives the text of each token.

    Returns:
        A `<div>` whose colours stand at each span, so that it keeps them in a page that allows no style sheets.
    """
    origins = token_origins(run, prompt)
    spans = [
        _span(origin, _token_html(tokenizer, token), _tooltip(origin))
        for token, origin in zip(run.output_ids[prompt], origins, strict=True)
    ]
    legend = " ".join(_span(origin, f"&nbsp;{escape(origin.name)}&nbsp;", origin.name) for origin in _shown(origins))
    return (
        f'<div><p style="font-size:13px;line-height:1.9">{legend}</p>'
        f'<pre style="{_OUTPUT_STYLE}">{"".join(spans)}</pre></div>'
    )


def plot_text(
    run: Run, prompt: int, tokenizer: Tokenizer, ax: Axes | None = None, *,
    num_chars: int = 72, provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw the coloured text of one prompt, `num_chars` characters a line: the static twin of `text_html`."""
    origins = token_origins(run, prompt)
    texts = [theme.drawable(tokenizer.token_text(int(token))) for token in run.output_ids[prompt]]
    places = _wrap(texts, num_chars)
    num_lines = places[-1][0] + 1 if places else 1
    ax = theme.new_axes(ax, (9.0, 0.3 * num_lines + 1.1))
    for text, origin, (line, column) in zip(texts, origins, places, strict=True):
        ax.add_patch(Rectangle((column, -line - 0.45), len(text), 0.9, facecolor=origin.fill, edgecolor="white"))
        for offset, char in enumerate(text):
            ax.text(column + offset + 0.5, -line, char, ha="center", va="center", fontsize=9.0, family=theme.MONO,
                    color=_ink(origin), weight="bold" if origin.is_bonus else "normal", parse_math=False)  # fmt: skip
    ax.set_xlim(0, num_chars)
    ax.set_ylim(-num_lines + 0.4, 0.6)
    ax.set_axis_off()
    handles = [Patch(facecolor=origin.fill, label=origin.name) for origin in _shown(origins)]
    key = ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.0, 0.0), ncols=3, frameon=False,
                    fontsize=theme.TICK_PT, borderaxespad=0.2)  # fmt: skip
    if provenance is not None:
        theme.add_caption(ax, provenance, below=key)
    return ax


def _shown(origins: Sequence[Origin]) -> list[Origin]:
    """One of each kind of origin, in legend order: prefill, draft by depth, bonus."""
    kinds = {(origin.round < 0, origin.depth) for origin in origins}
    order = sorted(kinds, key=lambda kind: (not kind[0], kind[1] == 0, kind[1]))
    return [Origin(-1 if is_prefill else 0, depth) for is_prefill, depth in order]


def _span(origin: Origin, html: str, tooltip: str) -> str:
    style = f"background-color:{origin.fill};color:{_ink(origin)}"
    if origin.is_bonus:
        style += f";font-weight:bold;border-bottom:2px solid {theme.BLACK}"
    return f'<span style="{style}" title="{escape(tooltip)}">{html}</span>'


def _ink(origin: Origin) -> str:
    return "#ffffff" if origin.round < 0 else theme.BLACK


def _tooltip(origin: Origin) -> str:
    return origin.name if origin.round < 0 else f"round {origin.round}: {origin.name}"


def _token_html(tokenizer: Tokenizer, token: int) -> str:
    text = tokenizer.decode([token])
    # A piece of a character, a control character or nothing at all is shown in its printable form instead.
    if not text or "\ufffd" in text or not text.replace("\n", "").isprintable():
        text = tokenizer.token_text(token)
    return escape(text).replace("\n", "↵\n")


def _wrap(texts: Sequence[str], num_chars: int) -> list[tuple[int, int]]:
    """(line, column) of each token; a token is never split, one longer than a line gets a line of its own."""
    places, line, column = [], 0, 0
    for text in texts:
        if column and column + len(text) > num_chars:
            line, column = line + 1, 0
        places.append((line, column))
        column += len(text)
    return places
