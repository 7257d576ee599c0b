"""Decode prompts: `generate`, and the engine's start, run and provenance for callers that want single rounds."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from kdlab.decode.engine import Engine
from kdlab.decode.records import Run
from kdlab.decode.settings import Settings, make_settings
from kdlab.errors import ArgumentError
from kdlab.model.pair import Pair
from kdlab.model.prompts import PromptSet, as_prompt_set
from kdlab.provenance import run_provenance

Progress = Callable[[int, int], None]  # (prompts done, prompts in all)


def generate(
    pair: Pair,
    prompts: object,
    *,
    method: str = "ddtree",
    budget: int = 32,
    width: int | None = None,
    top_k: int | None = None,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token_ids: Iterable[int] | None = None,
    streams: int | None = None,
    impl: str = "auto",
    graph: str = "auto",
    record_experts: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Decode prompts by AR, a chain, DDTree or a beam; every method writes the same tokens.

    Args:
        pair: from `load_pair`.
        prompts: one prompt or many: text, token ids, Prompt or PromptSet.
        method: "ar", "chain", "ddtree" or "beam".
        budget: tree nodes without the root: the tree of "ddtree", the longest "chain", the most nodes of a "beam".
        width: nodes a depth of "beam"; None for the others.
        top_k: draft candidates a slot; None takes what the budget can use.
        max_new_tokens: cap on the output of each prompt; the context limit may come first.
        temperature: 0 is greedy; above, the target's own token is drawn at every row with noise keyed by (seed, prompt
            index, position), so the text does not depend on the method or the budget.
        top_p: 0 < top_p <= 1, applied after the temperature.
        seed: 0 <= seed < 2^64.
        stop_token_ids: None takes the pair's own; [] stops at the cap alone.
        streams: prompts decoded together; None takes up to 8.
        impl: the implementation of the ops. "auto" takes the CUDA ops on a GPU and plain torch on the CPU, "reference"
            plain torch on either; "naive", "mma", "wgmma" and "flashmla" take the CUDA ops with this attention. What
            ran stands in the provenance as `impl`: "reference", or the CUDA ops and their attention, with the ops that
            were left to torch as this pair's sizes or dtype have no kernel.
        graph: "on" captures a round in a CUDA graph once and replays it, "off" runs it op by op. "auto" is "on" on a
            GPU where its ops run and build the method's trees, which "beam" and budgets above 1,024 or 256 candidates
            leave to the host. The provenance's `graph` says which: "graph" or "eager".
        record_experts: keep the expert ids that every row used.
        progress: called with (prompts done, prompts in all) after every round.

    Returns:
        The Run: texts, rounds and where they come from.

    Raises:
        ArgumentError: an argument has a wrong value, or a prompt does not fit the context.
        NotSupported: a value that this version does not run.
        UnsupportedDevice: an `impl` that this machine cannot run.
        KdlabError: the target's logits are not finite; the prompt and position are named.
    """
    engine = start(
        pair,
        prompts,
        method=method,
        budget=budget,
        width=width,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_token_ids=stop_token_ids,
        streams=streams,
        impl=impl,
        graph=graph,
        record_experts=record_experts,
    )
    run_all(engine, progress)
    return collect(engine)


def start(pair: Pair, prompts: object, **options: Any) -> Engine:
    """Make an engine that has prefilled its first streams; `options` are the keywords of `generate`."""
    if not hasattr(pair, "target"):  # a toy with the same parts will do
        raise ArgumentError("pair", "a Pair, as load_pair returns", type(pair).__name__)
    chosen = as_prompt_set(prompts)
    settings = make_settings(pair, len(chosen), **options)
    if pair.ranks.size > 1:
        pair.ranks.check_same(_shared(pair, chosen, settings), pair.device)
    return Engine(pair, chosen, settings)


def _shared(pair: Pair, prompts: PromptSet, settings: Settings) -> dict[str, object]:
    """Return what the rounds of all ranks follow from, by its name among the arguments, the narrowest first."""
    target, drafter, method = pair.target.config, pair.drafter, settings.method
    models = {
        "target": pair.target_sha256,
        "drafter": pair.drafter_sha256,
        "dtype": pair.dtype,
        "experts": pair.ranks.experts,
        "latent_norm_eps": target.latent_norm_eps,
        "rope_amplitude": None if drafter is None else drafter.rope.amplitude,
        "target's config": target,
        "drafter's config": None if drafter is None else drafter.config,
    }
    options = {field.name: getattr(settings, field.name) for field in fields(settings)}
    options |= {"method": method.name, "budget": method.budget, "width": method.width, "top_k": method.top_k}
    return {**models, "prompts": prompts.digest, **options}


def run_all(engine: Engine, progress: Progress | None = None) -> None:
    """Step an engine to its end."""
    while not engine.done:
        engine.step()
        if progress is not None:
            progress(engine.num_done, len(engine.transcripts))


def collect(engine: Engine) -> Run:
    """Gather the transcripts of a finished engine into a Run."""
    transcripts = engine.transcripts
    return Run(
        prompts=list(engine.prompts),
        prompt_ids=[list(transcript.prompt_ids) for transcript in transcripts],
        output_ids=[transcript.output_ids for transcript in transcripts],
        text=[engine.pair.tokenizer.decode(transcript.output_ids) for transcript in transcripts],
        rounds=[transcript.rounds for transcript in transcripts],
        finish=[transcript.finish for transcript in transcripts],
        provenance=decode_provenance(engine.pair, engine.settings, engine.prompts, impl=engine.impl),
    )


def decode_provenance(pair: Pair, settings: Settings, prompts: PromptSet, **more: Any) -> dict[str, Any]:
    """The run row of a decode: machine, bytes of both models, prompts and every setting; `more` adds and overrides."""
    drafter = None if pair.drafter is None else pair.drafter.config
    fields: dict[str, Any] = dict(
        pair=pair.name,
        target_sha256=pair.target_sha256,
        drafter_sha256=pair.drafter_sha256,
        block_size=None if drafter is None else drafter.block_size,
        target_config=pair.target.config,
        drafter_config=drafter,
        prompt_set_id=prompts.id,
        prompt_set_digest=prompts.digest,
        num_prompts=len(prompts),
        device=pair.device,
        dtype=pair.dtype,
        method=settings.method.name,
        budget=settings.method.budget,
        width=settings.method.width,
        top_k=settings.method.top_k,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed,
        stop_token_ids=settings.stop_token_ids,
        streams=settings.streams,
        graph="graph" if settings.graph else "eager",
        ranks=pair.ranks.size,
    )
    return run_provenance(**fields | more)
