"""Checkpoints to target, drafter, tokenizer and latent cache."""
