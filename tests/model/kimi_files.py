"""A toy of the files that hold Kimi's tokenizer."""

import base64
import json

BYTES = [bytes([i]) for i in range(256)]
K2_NAMES = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "[EOT]": 9, "<think>": 22, "</think>": 23, "[UNK]": 254}
THINK = {"<think>", "</think>"}


def write_kimi(directory, tokens, num_special, *, config=None, names=K2_NAMES, eos="[EOS]", generation=None):
    """A directory with tiktoken.model, tokenizer_config.json and config.json; special ids follow the ranks."""
    lines = [base64.b64encode(token) + f" {rank}".encode() for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {str(len(tokens) + i): {"content": n, "special": n not in THINK} for n, i in names.items()}
    settings = {"added_tokens_decoder": added, "eos_token": eos, "tokenizer_class": "TikTokenTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if config is None:
        config = {"text_config": {"vocab_size": len(tokens) + num_special}}
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory
