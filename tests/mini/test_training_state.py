"""What the optimiser of both stages lets decay."""

import kdlab
from kdlab.mini.training_state import make_optimizer


def test_matrices_decay_and_norms_do_not_however_they_are_stacked():
    pair = kdlab.load_pair("tiny")
    optimizer = make_optimizer([pair.target.requires_grad_(True), pair.drafter.requires_grad_(True)], rate=1, decay=0.1)
    decayed = {id(one) for group in optimizer.param_groups if group["weight_decay"] for one in group["params"]}
    named = [*pair.target.named_parameters(), *pair.drafter.named_parameters()]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(named)
    for name, parameter in named:
        assert (id(parameter) in decayed) == (not name.endswith(("norm", "bias"))), name
    layers = pair.drafter.config.num_hidden_layers
    assert pair.drafter.heads.q_norm.shape[0] == layers, "norms stand in one matrix"
    pair.target.embedding.requires_grad_(False)
    frozen = make_optimizer([pair.target], rate=1, decay=0.1)
    assert all(one is not pair.target.embedding for group in frozen.param_groups for one in group["params"])
