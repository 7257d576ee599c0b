"""Decoded text coloured by how each token came: from the prefill, from the draft at some depth, or as a bonus."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from matplotlib.colors import to_hex, to_rgb

from kdlab.checks import check_int
from kdlab.decode.records import Run
from kdlab.errors import ArgumentError
from kdlab.model.tokenizer import Tokenizer
from kdlab.viz import theme

# Another hue than the nodes of a tree drawing, whose shade means probability: here it means depth.
_PREFILL, _BONUS, _DRAFT = theme.PALE, theme.GREEN, theme.PURPLE
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
        return "bonus, the target's own" if self.is_bonus else f"drafted at depth {self.depth}"

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
    shown = _shown(origins)
    legend = " ".join(_span(origin, escape(origin.name), origin.name, chip=True) for origin in shown)
    if any(origin.depth for origin in shown):
        legend += " Shades tell the depth in the tree, not a probability."
    return (
        f'<div><p style="font-size:13px;line-height:1.9">{legend}</p>'
        f'<pre style="{_OUTPUT_STYLE}">{"".join(spans)}</pre></div>'
    )


def _shown(origins: Sequence[Origin]) -> list[Origin]:
    """One of each kind of origin, in legend order: prefill, draft by depth, bonus."""
    kinds = {(origin.round < 0, origin.depth) for origin in origins}
    order = sorted(kinds, key=lambda kind: (not kind[0], kind[1] == 0, kind[1]))
    return [Origin(-1 if is_prefill else 0, depth) for is_prefill, depth in order]


def _span(origin: Origin, html: str, tooltip: str, *, chip: bool = False) -> str:
    """One coloured piece of text; a chip of the legend is never broken across lines."""
    style = f"background-color:{origin.fill};color:{theme.BLACK}"
    if chip:
        style += ";display:inline-block;white-space:nowrap;padding:0 0.4em"
    # Browsers print no background: a line below tells the target's own tokens apart on paper too.
    if not origin.depth:
        style += f";font-weight:bold;border-bottom:2px solid {theme.BLACK}"
    return f'<span style="{style}" title="{escape(tooltip)}">{html}</span>'


def _tooltip(origin: Origin) -> str:
    return origin.name if origin.round < 0 else f"round {origin.round}: {origin.name}"


def _token_html(tokenizer: Tokenizer, token: int) -> str:
    text = tokenizer.decode([token])
    # A piece of a character, a control character or nothing at all is shown in its printable form instead.
    if not text or "\ufffd" in text or not text.replace("\n", "").isprintable():
        text = tokenizer.token_text(token)
    return escape(text).replace("\n", "↵\n")
