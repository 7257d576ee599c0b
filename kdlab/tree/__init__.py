"""Tree room: from the draft's candidates to draft trees, and from the target's tokens to accepted paths."""

from kdlab.tree.accept import Acceptance, AcceptStatus, accept
from kdlab.tree.build import build_best_first
from kdlab.tree.check import check_tree
from kdlab.tree.draft_tree import DraftTree
from kdlab.tree.pack import MAX_BUDGET
from kdlab.tree.shapes import build_beam, build_chain, build_root_only

__all__ = [
    "MAX_BUDGET",
    "AcceptStatus",
    "Acceptance",
    "DraftTree",
    "accept",
    "build_beam",
    "build_best_first",
    "build_chain",
    "build_root_only",
    "check_tree",
]
