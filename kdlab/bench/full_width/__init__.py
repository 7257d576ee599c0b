"""Rounds at a model's true shapes on one GPU: one rank's slice with random weights, whole and stage by stage."""
