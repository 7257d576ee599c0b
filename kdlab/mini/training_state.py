"""What a training run needs to go on where it stopped, and the optimiser that both stages use."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_SAVE_EVERY_S = 150.0


def make_optimizer(modules: Iterable[nn.Module], *, rate: float, decay: float) -> torch.optim.AdamW:
    """Return AdamW of what takes gradients: matrices decay, norms and biases do not."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                # By name, as the drafter's norms of all layers stand in one matrix.
                (vectors if name.endswith(("norm", "bias")) else matrices).append(parameter)
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = matrices[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)


class StateFile:
    """Saves a run's modules and optimiser now and then, and reads them back."""

    def __init__(self, path: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.path, self.modules, self.optimizer = path, modules, optimizer
        self._saved_s = 0.0

    def resume(self) -> tuple[int, float]:
        """Load what the file holds; returns the next step and the seconds spent, both 0 where there is no file."""
        if not self.path.is_file():
            return 0, 0.0
        state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self._saved_s = state["spent_s"]
        return state["step"], state["spent_s"]

    def save_if_due(self, step: int, spent_s: float) -> None:
        """Save if the last time is long ago."""
        if spent_s - self._saved_s > _SAVE_EVERY_S:
            self.save(step, spent_s)

    def save(self, step: int, spent_s: float) -> None:
        """Write the file whole, then give it its name."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        modules = {name: module.state_dict() for name, module in self.modules.items()}
        state = {"step": step, "spent_s": spent_s, "modules": modules, "optimizer": self.optimizer.state_dict()}
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)
        self._saved_s = spent_s
