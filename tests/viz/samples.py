"""Made-up rounds, runs and recordings, small enough to know by heart."""

import numpy as np

from kdlab.decode import DraftField, PromptField, RoundRecord, Run
from kdlab.model.character_tokenizer import CharacterTokenizer
from kdlab.model.prompts import Prompt
from kdlab.tree import DraftTree

TOKENIZER = CharacterTokenizer(128)
DEPTH, VOCAB = 4, 16


class Words(CharacterTokenizer):
    """A tokenizer whose tokens are the given words."""

    def __init__(self, words):
        super().__init__(128)
        self.words = words

    def decode(self, ids, *, skip_special=False):
        return "".join(self.words[token] for token in ids)

    def token_text(self, token_id):
        return self.words[token_id]


def make_record(tokens, parents, path, bonus, *, logp=None, prompt=0, index=0, position=10):
    """One round; tokens and bonus are characters or ids, the root's first."""
    ids = [token if isinstance(token, int) else ord(token) for token in tokens]
    if logp is None:
        logp = [0.0]
        for row in range(1, len(ids)):
            logp.append(logp[parents[row]] - 0.4 - 0.1 * row)
    tree = DraftTree.from_parents(ids, parents, logp)
    bonus = bonus if isinstance(bonus, int) else ord(bonus)
    targets = np.full(len(ids), 33, dtype=np.int32)
    return RoundRecord(prompt, index, position, tree, targets, tuple(path), bonus)


def branched_record(**options):
    """a -> b -> c, with x beside b and y beside c; b and y accepted; then the target wants z."""
    return make_record("abxcy", [-1, 0, 0, 1, 1], (0, 1, 4), "z", **options)


def chain_record(length):
    """A chain that is accepted whole."""
    rows = range(length + 1)
    tokens, parents = [97 + row % 26 for row in rows], [row - 1 for row in rows]
    return make_record(tokens, parents, tuple(rows), "!", logp=[0.0] * (length + 1))


def make_run(rounds=None, outputs=None):
    """Two prompts: the output of the first is `abyz` and whatever `make_record` says, the second has no round."""
    if rounds is None:
        second = make_record("zq", [-1, 0], (0,), "<", index=1, position=13)
        rounds, outputs = [[branched_record(), second], []], [[ord(char) for char in "abyz<"], [ord("a")]]
    prompts = [Prompt(f"p{index}", "prose", "text", None) for index in range(len(rounds))]
    ids = [[ord(char) for char in "<b>hi "] for _ in rounds]
    texts = [TOKENIZER.decode(output) for output in outputs]
    return Run(prompts, ids, outputs, texts, rounds, ["length"] * len(rounds), {})


def make_field(num_prompts=6, num_positions=40, top_k=VOCAB):
    """Draft fields of random text, in which the draft's better candidates are the target's more often."""
    rng = np.random.default_rng(3)
    prompts = [_prompt_field(rng, index, num_positions, top_k) for index in range(num_prompts)]
    return DraftField(prompts, top_k, VOCAB, DEPTH, {})


def _prompt_field(rng, index, num_positions, top_k):
    text = rng.integers(0, VOCAB, num_positions + DEPTH + 1).astype(np.int32)
    following = text[np.arange(num_positions)[:, None] + 1 + np.arange(DEPTH)]
    logits = rng.normal(size=(num_positions, DEPTH, VOCAB))
    np.put_along_axis(logits, following[..., None], 2.2 - 0.4 * np.arange(DEPTH)[None, :, None], axis=2)
    log_probs = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    order = np.argsort(-log_probs, axis=2, kind="stable")
    return PromptField(
        prompt=index,
        prompt_id=f"p{index}",
        kind=("prose", "sums")[index % 2],
        prompt_ids=np.arange(3, dtype=np.int32),
        output_ids=text[:num_positions],
        tail_ids=text[num_positions:],
        num_starts=num_positions,
        token_ids=order[..., :top_k].astype(np.int32),
        log_probs=np.take_along_axis(log_probs, order, axis=2)[..., :top_k].astype(np.float32),
        next_log_prob=np.take_along_axis(log_probs, following[..., None], axis=2)[..., 0].astype(np.float32),
        next_rank=(order == following[..., None]).argmax(axis=2).astype(np.int32),
    )
