"""Pieces of work for profilers, as far as they can be made without a GPU."""

from contextlib import nullcontext

from kdlab.bench.kernels.case import Arm, Case
from kdlab.bench.profiled import _op_work, _provenance
from kdlab.kernels.cost import Cost
from kdlab.kernels.stage import observed
from kdlab.model.pair import load_pair


def test_a_call_has_the_words_of_the_kernel_table_and_says_what_it_costs_at_least():
    ran, names, floors = [], [], {}
    arm = Arm(ran.append, print, prepare=lambda inputs: inputs | {"prepared": True}, goal=True)
    sizes = {"rows": 15, "prefix": 256, "streams": 1}
    case = Case("draft_topk", sizes, lambda seed: {"x": seed}, {"cuda": arm}, lambda inputs: Cost(100, len(inputs)), 0)
    piece = _op_work(case, "cuda", floors)
    assert piece.case == "draft_topk S=1 N=15 prefix=256 (cuda)"
    assert floors == {piece.case: {"draft_topk": [100, 1, 1]}}
    assert piece.sizes == {"rows": 15, "streams": 1, "context": 256}
    with observed(lambda name: names.append(name) or nullcontext()):
        piece.run()
    assert (ran, names) == ([{"x": 0, "prepared": True}], ["draft_topk"])


def test_rows_say_the_constants_of_both_models():
    facts = _provenance(load_pair("bundled", device="cpu"))
    assert (facts["target_config"]["num_hidden_layers"], facts["drafter_config"]["num_hidden_layers"]) == (6, 3)
