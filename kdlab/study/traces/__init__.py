"""Traces that others measured, in the form of `docs/traces.md`: read, checked, written, made into tables."""
