"""The golden pair: output ids, acceptance lengths and every round's tree, for every prompt, budget and the chain."""

import pytest

import kdlab
from tests.pairs import golden_prompts, golden_rounds, tiny_pair

BUDGETS = [0, 1, 4, 7, 16, 32, 64]


def expected_new_tokens(case, output_ids):
    return output_ids[len(case["prompt_ids"]) :][:96]


@pytest.mark.parametrize("budget", BUDGETS)
def test_ddtree_rounds_are_those_of_the_published_decoder(budget):
    run = kdlab.generate(tiny_pair(), golden_prompts(), method="ddtree", budget=budget)
    for i, case in enumerate(golden_rounds()):
        golden = next(entry for entry in case["runs"] if entry["budget"] == budget)
        assert run.output_ids[i] == expected_new_tokens(case, case["ar_output_ids"])
        assert run.output_ids[i] == expected_new_tokens(case, golden["output_ids"])
        assert run.round_lengths[i] == golden["acceptance_lengths"]
        for record, want in zip(run.rounds[i], golden["round_trees"], strict=True):
            assert list(record.path) == want["accepted_indices"]
            assert record.tree.token[0, 1:].tolist() == want["tree"]["node_token_ids"]
            assert record.tree.depth[0, 1:].tolist() == want["tree"]["node_depths"]
            assert record.tree.parent[0].tolist() == want["tree"]["parents"]


def test_chain_rounds_are_those_of_published_dflash():
    run = kdlab.generate(tiny_pair(), golden_prompts(), method="chain")
    for i, case in enumerate(golden_rounds()):
        assert run.output_ids[i] == expected_new_tokens(case, case["chain"]["output_ids"])
        assert run.round_lengths[i] == case["chain"]["acceptance_lengths"]


def test_ar_writes_the_golden_text_one_token_a_round():
    run = kdlab.generate(tiny_pair(), golden_prompts(), method="ar")
    for i, case in enumerate(golden_rounds()):
        assert run.output_ids[i] == expected_new_tokens(case, case["ar_output_ids"])
        assert run.round_lengths[i] == [1] * 96
        assert all(record.tree.capacity == 1 for record in run.rounds[i])
