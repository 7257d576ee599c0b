"""kdlab: a research workbench for DDTree speculative decoding of Kimi K2.6.

`load_pair`, `generate`, `record` and the rooms `tree`, `study`, ... are loaded when first used, so that importing kdlab
costs nothing and touches no device.
"""

import importlib
from typing import TYPE_CHECKING, Any

from kdlab.source import VERSION as __version__

if TYPE_CHECKING:
    from kdlab import bench, decode, kernels, model, report, study, tree, viz
    from kdlab.decode import generate, load_field, load_run, record, save_field, save_run
    from kdlab.model.human_eval import load_human_eval
    from kdlab.model.pair import load_pair
    from kdlab.model.prompts import load_prompts

_ROOMS = ("kernels", "model", "tree", "decode", "study", "bench", "viz", "report")
_NAMES = {
    "load_pair": "kdlab.model.pair",
    "load_prompts": "kdlab.model.prompts",
    "load_human_eval": "kdlab.model.human_eval",
    "generate": "kdlab.decode",
    "record": "kdlab.decode",
    "save_run": "kdlab.decode",
    "load_run": "kdlab.decode",
    "save_field": "kdlab.decode",
    "load_field": "kdlab.decode",
}

__all__ = [
    "__version__", "bench", "decode", "generate", "kernels", "load_field", "load_human_eval", "load_pair",
    "load_prompts", "load_run", "model", "record", "report", "save_field", "save_run", "study", "tree", "viz",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"kdlab.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'kdlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
