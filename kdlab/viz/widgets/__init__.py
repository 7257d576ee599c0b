"""Widgets on top of the plots, each with its own script and style where it has one."""
