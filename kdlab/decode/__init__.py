"""Prompts in, tokens and one record a round out; no timers, no prints."""

from kdlab.decode.decoding import generate, start
from kdlab.decode.engine import Engine
from kdlab.decode.field import DraftField, PromptField
from kdlab.decode.recording import record
from kdlab.decode.records import RoundRecord, Run
from kdlab.decode.storage import load_field, load_run, save_field, save_run

__all__ = [
    "DraftField",
    "Engine",
    "PromptField",
    "RoundRecord",
    "Run",
    "generate",
    "load_field",
    "load_run",
    "record",
    "save_field",
    "save_run",
    "start",
]
