"""Tensor ops: their specification in plain torch is `reference`; `rope` rotates queries and keys."""
