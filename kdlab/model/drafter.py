"""The DFlash drafter: one pass over [anchor, mask, mask, ...] predicts all slots of a block at once."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from kdlab.checks import check_float, check_shape
from kdlab.config import DrafterConfig
from kdlab.errors import ArgumentError, ConfigError
from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.skinny_linear import skinny_linear
from kdlab.kernels.stage import stage
from kdlab.model.checkpoint import Checkpoint
from kdlab.model.draft_context import DraftContext
from kdlab.model.drafter_layers import DraftHeads, DraftLayer
from kdlab.model.layers import Part, parts, prefixed, weight, wholes
from kdlab.model.ranks import ONE_RANK, Ranks
from kdlab.model.reading import Planned, Progress

_PREFIX = "model."
_DFLASH2_MODULES = ("candidate_selector", "attention_conv", "mlp_conv")


class Drafter(nn.Module):
    """DFlash as published: a small bidirectional decoder conditioned on hidden states of the target.

    Embedding and output head are the target's. A new drafter holds no values: load it, or initialise every parameter
    before use. Parameters want no gradient until asked (`requires_grad_()`).

    Attributes:
        config: its constants.
        ranks: that share it; this is one's slice.
        rope: its rotary embedding, with the caller's amplitude.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rope_amplitude: float = 1.0,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Make the modules.

        Args:
            config: the constants.
            dtype: of weights and activations.
            device: of the weights.
            rope_amplitude: factor on cos and sin on top of the config's own; some engines run YaRN drafters at
                0.1 ln(factor) + 1 where the config says 1.
            ranks: that share the drafter; this one's slice is made.

        Raises:
            ArgumentError: the amplitude is not a finite number above 0, or the ranks do not divide what they share.
        """
        super().__init__()
        rope_amplitude = check_float("rope_amplitude", rope_amplitude, above=0.0)
        self.config, self.ranks = config, ranks
        self.rope = replace(config.rope, amplitude=config.rope.amplitude * rope_amplitude)
        width = config.hidden_size
        # Rows of fc, not columns: each output then is the same sum as on one rank, and fewer values are exchanged.
        self.features = ranks.span(width, name="the drafter's hidden_size")
        held = self.features.stop - self.features.start
        self.fc = weight(held, len(config.target_layer_ids) * width, dtype=dtype, device=device)
        self.hidden_norm = weight(width, dtype=dtype, device=device)
        self.heads = DraftHeads(config, dtype=dtype, device=device, ranks=ranks)
        layers = nn.ModuleList(
            DraftLayer(config, layer, self.heads, dtype=dtype, device=device, ranks=ranks)
            for layer in range(config.num_hidden_layers)
        )
        self.layers = cast("Sequence[DraftLayer]", layers)
        self.norm = weight(width, dtype=dtype, device=device)

    def views(self) -> dict[str, Part]:
        """Return every weight by its name in a checkpoint: to load or to export."""
        found = parts(0, self.features, self.config.hidden_size, fc=self.fc)
        found |= wholes(hidden_norm=self.hidden_norm, norm=self.norm)
        for i, layer in enumerate(self.layers):
            found |= prefixed(f"layers.{i}.", layer)
        return found

    def new_context(
        self, num_streams: int, max_positions: int, device: torch.device | str, dtype: torch.dtype
    ) -> DraftContext:
        """Return an empty context of `num_streams` streams with room for `max_positions` committed tokens each."""
        heads = self.heads.kv_heads
        held = replace(self.config, num_key_value_heads=heads.stop - heads.start)
        return DraftContext.allocate(held, self.rope, num_streams, max_positions, device, dtype)

    def extend(
        self, context: DraftContext, taps: Tensor, start: Tensor, count: Tensor, impl: str = "auto"
    ) -> None:
        """Add committed tokens to the context, in place.

        Args:
            context: of S streams.
            taps: [S, n, T*D] float, the target's hidden states after the T layers of `target_layer_ids`, in that
                order; rows from count on are ignored whatever they hold.
            start: [S] int, absolute position of row 0 of each stream.
            count: [S] int, rows of each stream that are real.
            impl: of the ops: "auto" runs the CUDA ops on a GPU where they have a form, "reference" is plain torch.

        Raises:
            ShapeError: a shape does not fit.
            ArgumentError: see `DraftContext.advance`.
        """
        check_shape("taps", taps, (context.num_streams, "n", self.fc.shape[1]))
        start, count = start.int(), count.int()
        context.advance(start, count, taps.shape[1])
        with stage("draft context"):
            features = self.ranks.join(skinny_linear(taps.flatten(0, 1), self.fc, impl=impl), "drafter")
            _, features = add_norm(features, None, self.hidden_norm, self.config.rms_norm_eps, impl=impl)
            self.heads.extend(context, features, start, count, impl)

    def forward(self, block: Tensor, start: Tensor, context: DraftContext, impl: str = "auto") -> Tensor:
        """Draft one block in each stream; slot i of the result predicts the token at absolute position start + i.

        Args:
            block: [S, b, D] float, the target's embeddings of the anchor and b - 1 mask tokens.
            start: [S] int, absolute position of the anchor: the block sees context positions 0..start-1.
            context: of S streams, or of one stream that all S blocks share.
            impl: of the ops, see `extend`.

        Returns:
            [S, b, D], after the final norm; slot 0 predicts nothing. The context stays as it was.

        Raises:
            ShapeError: the block is not as wide as the drafter's, or the streams do not match.
            ArgumentError: see `DraftContext.check_start`.
        """
        check_shape("block", block, ("S", self.config.block_size, self.config.hidden_size))
        check_shape("start", start, (block.shape[0],))
        if context.num_streams not in (1, block.shape[0]):
            raise ArgumentError("context", f"1 or {block.shape[0]} streams", context.num_streams)
        context.check_start(start)
        start, x, eps = start.int(), block.flatten(0, 1), self.config.rms_norm_eps
        update: Tensor | None = None
        for layer in self.layers:
            with stage("draft layers"):
                x, h = add_norm(x, update, layer.input_norm, eps, impl=impl)
            x, update = layer(x, h, context, start, impl)
        with stage("draft layers"):
            _, hidden = add_norm(x, update, self.norm, eps, impl=impl)
            return hidden.view(block.shape)


def load_drafter(
    directory: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    rope_amplitude: float = 1.0,
    progress: Progress | None = None,
) -> Drafter:
    """Load a DFlash directory; see `plan_drafter` for the arguments and errors."""
    return plan_drafter(directory, dtype=dtype, rope_amplitude=rope_amplitude).read(device, progress)


def plan_drafter(
    directory: str | Path, *, dtype: torch.dtype, rope_amplitude: float = 1.0, ranks: Ranks = ONE_RANK
) -> Planned[Drafter]:
    """Check a DFlash directory from its config and headers; `read` of what comes back takes memory and reads.

    Args:
        directory: holds config.json and safetensors; names may all carry the prefix `model.`.
        dtype: of weights and activations.
        rope_amplitude: factor on the drafter's cos and sin, see `Drafter`.
        ranks: that share the drafter; this one's slice is planned.

    Raises:
        ArgumentError: the ranks do not divide what is split over them.
        ConfigError: the config or the tensors are of a drafter that kdlab does not run.
        CheckpointError: tensors are missing, unknown, or of a wrong shape or dtype.
    """
    config = DrafterConfig.load(directory)
    checkpoint = Checkpoint(directory)

    def new(place: torch.device | str) -> Drafter:
        return Drafter(config, dtype=dtype, device=place, rope_amplitude=rope_amplitude, ranks=ranks)

    return Planned.check(new, checkpoint, _stored_names(checkpoint))


def _stored_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the names without a prefix that all share -> the names on disk."""
    foreign = [name for name in checkpoint.names if any(part in name.split(".") for part in _DFLASH2_MODULES)]
    if foreign:
        raise ConfigError(f"{checkpoint.directory}: DFlash2 is not supported: its slots are not independent: {foreign}")
    prefix = _PREFIX if all(name.startswith(_PREFIX) for name in checkpoint.names) else ""
    return {name.removeprefix(prefix): name for name in checkpoint.names}
