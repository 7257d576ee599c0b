"""A target's tensors in a checkpoint: the names as the model knows them, and rules for what is skipped."""

from dataclasses import dataclass

from kdlab.errors import CheckpointError
from kdlab.model.checkpoint import Checkpoint
from kdlab.model.layers import Part
from kdlab.model.reading import check_parts, read_parts

PREFIX = "language_model."
VISION = ("vision_tower.", "mm_projector.")
_LAYERS = "model.layers."
# A layer past the last one that lacks it is no multi-token prediction: the config says too few layers.
_MTP = "eh_proj.weight"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Tensors of the checkpoint that a text decoder does not use, by rule."""

    vision: int = 0  # vision tower and projector
    mtp: int = 0  # layers from num_hidden_layers on: multi-token prediction


def load_tensors(parts: dict[str, Part], checkpoint: Checkpoint, *, num_layers: int, int4: bool) -> Skipped:
    """Check and fill every part.

    Args:
        parts: name -> part of a tensor, as `Target.views` gives them.
        checkpoint: where the tensors are.
        num_layers: decoder layers; later ones are skipped where they predict further tokens (MTP).
        int4: the routed experts lie on disk as INT4 words, scales and shapes.

    Raises:
        CheckpointError: tensors are missing, unknown, there twice, or of a wrong shape or dtype.
    """
    names, skipped = target_names(checkpoint, num_layers)
    check_parts(parts, checkpoint, names, int4=int4)
    read_parts(parts, checkpoint, names, int4=int4)
    return skipped


def target_names(checkpoint: Checkpoint, num_layers: int) -> tuple[dict[str, str], Skipped]:
    """Return the names without `language_model.` -> the names on disk, less what is skipped.

    Raises:
        CheckpointError: a name is there with the prefix and without it.
    """
    stored: dict[str, str] = {}
    vision = mtp = 0
    plain_names = {name.removeprefix(PREFIX) for name in checkpoint.names}
    for name in checkpoint.names:
        plain = name.removeprefix(PREFIX)
        if name.startswith(VISION):
            vision += 1
        elif (layer := _layer(plain)) >= num_layers and f"{_LAYERS}{layer}.{_MTP}" in plain_names:
            mtp += 1
        elif plain in stored:
            places = f"{checkpoint.where(stored[plain])} or {checkpoint.where(name)}"
            raise CheckpointError(f"expected one of {places}, got both")
        else:
            stored[plain] = name
    return stored, Skipped(vision, mtp)


def _layer(name: str) -> int:
    """Return the layer number in `model.layers.N.…`, -1 for other names."""
    number, dot, _ = name.removeprefix(_LAYERS).partition(".")
    return int(number) if dot and name.startswith(_LAYERS) and number.isdecimal() else -1
