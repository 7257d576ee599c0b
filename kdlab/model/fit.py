"""Whether a model fits in memory: bytes a rank from configs alone, and how many ranks it takes."""

import torch

from kdlab.errors import UnsupportedDevice


def check_room(nbytes: int, device: torch.device) -> None:
    """Raise UnsupportedDevice where a GPU has less free memory than weights of `nbytes` take."""
    if device.type != "cuda":
        return
    free = torch.cuda.mem_get_info(device)[0]
    if nbytes > free:
        raise UnsupportedDevice(
            f"{device}: expected {nbytes / 2**30:.1f} GiB of free memory for the weights, got {free / 2**30:.1f} GiB; "
            "`kdlab doctor --model DIR` says how many ranks they need"
        )
