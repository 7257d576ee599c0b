"""What `kdlab profile` looks at: rounds and prefills of a model, and the ops of the kernel benchmark, one by one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kdlab.bench.full_width.point import Point, rounds_at
from kdlab.bench.full_width.random_pair import check_k26, k26_pair
from kdlab.bench.full_width.routing import plan_routing
from kdlab.bench.kernels.suite import HEADS, OPS, cases_of, in_turns
from kdlab.bench.kernels.table import case_words
from kdlab.bench.mini_rounds import KINDS, mini_prompts
from kdlab.bench.timing import require_gpu
from kdlab.checks import check_int
from kdlab.decode import Engine
from kdlab.decode.engine import prefill
from kdlab.decode.round import Round
from kdlab.decode.settings import make_settings
from kdlab.kernels.stage import stage
from kdlab.model.pair import Pair, load_pair
from kdlab.model.prompts import Prompt, PromptSet, prompt_token_ids
from kdlab.model.ranks import Ranks
from kdlab.provenance import run_provenance
from kdlab.study.step_cost import Step, round_stages

K26, MINI = "k2.6", "bundled"
_G = 0.8  # of the planned routing, as in the middle of `bench round`
_PREFILL_TOKENS, _PROMPT_TOKENS, _MANY_TOKENS = 512, 128, 96

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of work for `kdlab.profiling`, see `Work` there."""

    subject: str
    case: str
    sizes: Mapping[str, int | None]
    run: Call
    simulated: bool = False
    prepare: Callable[[], None] = lambda: None
    capture: Callable[[], Call] | None = None


@dataclass(frozen=True, slots=True)
class Profiled:
    """Pieces of work, made one after another, and the provenance that they share."""

    works: Iterator[Piece]
    provenance: dict[str, Any] = field(default_factory=dict)


def profiled(subject: str, **options: Any) -> Profiled:
    """Return `profiled_round` or `profiled_kernels`, as the subject "round" or "kernels" says."""
    return profiled_kernels(**options) if subject == "kernels" else profiled_round(**options)


def profiled_round(
    model: str = K26,
    *,
    rows: int = 33,
    streams: int = 1,
    context: int = 1024,
    ranks: int = 8,
    experts: str = "tp",
    layers: int | None = None,
    device: str | None = None,
) -> Profiled:
    """Return a DDTree round of a model and a prefill.

    Args:
        model: "k2.6", one rank's slice at its true shapes with random weights on a GPU, or what `load_pair` takes.
        rows: verified of each stream, 2 at least.
        streams: S.
        context: committed rows, of "k2.6" alone; of a loaded pair they are the shipped prompts.
        ranks, experts, layers: of the slice; None takes all layers.
        device: of a loaded pair; None takes a GPU where there is one.

    Raises:
        UnsupportedDevice: "k2.6" without a GPU, or without room for its weights.
        ArgumentError: what `load_pair`, `kdlab.generate` or the slice refuses.
    """
    check_int("rows", rows, minimum=2)
    for name, value in (("streams", streams), ("context", context)):
        check_int(name, value, minimum=1)
    if model == K26:
        check_k26(ranks, experts, layers)
        require_gpu(f"a round of {K26}")
        here = torch.device("cuda", torch.cuda.current_device())
        pair = k26_pair(Ranks.slice_of(0, ranks, experts), layers, here)
        return _profiled_slice(pair, Point(rows, streams, context, _G))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    pair = load_pair(model, device=device, dtype="float32" if device == "cpu" else "bfloat16")
    return Profiled(_pair_works(pair, rows, streams), _provenance(pair))


def profiled_kernels(ops: Sequence[str] = OPS, heads: Sequence[int] = HEADS) -> Profiled:
    """Return the ops of `kdlab bench kernels` at the cases of a short run, as the form that a user gets.

    Args:
        ops: some of `OPS`.
        heads: some of `HEADS`.

    Raises:
        UnsupportedDevice: there is no GPU.
    """
    require_gpu("kernels")
    cases = in_turns([case for case in cases_of(op, tuple(heads)) if case.default] for op in ops)
    floors: dict[str, Any] = {}  # filled as the inputs are made, which say what a call costs at least
    provenance = run_provenance(device="cuda", dtype="bfloat16", impl="auto") | {"floors": floors}
    goals = ((case, name) for case in cases for name, arm in case.arms.items() if arm.goal)
    return Profiled((_op_work(case, name, floors) for case, name in goals), provenance)


def _op_work(case: Any, name: str, floors: dict[str, Any]) -> Piece:
    arm, inputs = case.arms[name], case.make(0)
    words, least = f"{case.op} {case_words(case.sizes)} ({name})", case.cost(inputs)
    floors[words] = {case.op: [least.bytes, least.flops, 1]}
    inputs = arm.prepare(inputs) if arm.prepare else inputs

    def run() -> None:
        with stage(case.op):
            arm.run(inputs)

    places = {"rows": "rows", "streams": "streams", "context": "prefix"}
    sizes = {column: case.sizes.get(name) for column, name in places.items()}
    return Piece("kernels", words, sizes, run, simulated=True)


def _provenance(pair: Pair, floors: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`floors` are the fewest bytes, operations and launches of each stage, by case."""
    return run_provenance(
        device=pair.device, dtype=pair.dtype, target_config=pair.target.config, target_sha256=pair.target_sha256,
        drafter_config=None if pair.drafter is None else pair.drafter.config, drafter_sha256=pair.drafter_sha256,
        ranks=pair.ranks.size, experts=pair.ranks.experts, method="ddtree", impl="auto", floors=floors or {},
    )  # fmt: skip


def _profiled_slice(pair: Pair, point: Point) -> Profiled:
    rounds, step = rounds_at(pair, point)
    config, drafter = pair.target.config, None if pair.drafter is None else pair.drafter.config
    name = f"{K26} slice 1/{pair.ranks.size}, {config.num_hidden_layers} layers"
    case = f"{name}, {point.rows} rows x {_streams(point.streams)}, context {point.context:,}"
    least = round_stages(config, drafter, step)
    floors = {one.name: [one.cost.bytes, one.cost.flops, one.launches] for one in least}
    sizes = {"rows": point.rows, "streams": point.streams, "context": point.context}

    def works() -> Iterator[Piece]:
        layers = {"layers": config.num_hidden_layers}
        yield _round_work(case, sizes | layers, rounds.round, rounds.place, simulated=True)
        tokens = min(_PREFILL_TOKENS, point.context)
        plan_routing(pair.target, tokens, Step.routed(config, tokens, _G).distinct)
        ids = torch.randint(config.vocab_size, (1, tokens), device=pair.device)
        yield _prefill_work(name, pair, rounds.round, ids, simulated=True)

    return Profiled(works(), _provenance(pair, {case: floors}))


def _pair_works(pair: Pair, rows: int, streams: int) -> Iterator[Piece]:
    prompts = _prompts(pair, streams)
    settings = make_settings(
        pair, streams, budget=rows - 1, max_new_tokens=_MANY_TOKENS, streams=streams, graph="off", stop_token_ids=[]
    )
    engine = Engine(pair, prompts, settings)
    one = engine.round
    saved = {name: getattr(one.streams, name).clone() for name in ("start", "anchor", "running", "num_tokens", "stop")}

    def place() -> None:
        for name, values in saved.items():
            getattr(one.streams, name).copy_(values)

    name = f"{'mini' if pair.name == MINI else pair.name}, DDTree B={rows - 1}, {_streams(streams)}"
    layers = pair.target.config.num_hidden_layers
    context = int(saved["start"].max())
    sizes = {"rows": rows, "streams": streams, "context": context, "layers": layers}
    yield _round_work(name, sizes, one, place, simulated=False)
    ids = torch.tensor([engine.transcripts[0].prompt_ids], device=pair.device)
    yield _prefill_work(name, pair, one, ids, simulated=False)


def _prompts(pair: Pair, streams: int) -> PromptSet:
    """The beginnings of shipped prompts, of about equal lengths: the profile is about shapes, not about texts."""
    shipped = mini_prompts(-(-streams // len(KINDS))).prompts[:streams]
    ids = {prompt.id: prompt_token_ids(prompt, pair.tokenizer)[:_PROMPT_TOKENS] for prompt in shipped}
    cut = [Prompt(prompt.id, prompt.kind, token_ids=tuple(ids[prompt.id])) for prompt in shipped]
    return PromptSet.of("profiled", cut)


def _streams(number: int) -> str:
    return f"{number} stream" if number == 1 else f"{number} streams"


def _round_work(
    case: str, sizes: Mapping[str, int | None], one: Round, place: Callable[[], None], *, simulated: bool
) -> Piece:
    def capture() -> Call:
        one.streams.running.fill_(False)  # the warm-up of a capture must write nothing
        one.capture()
        place()
        return one.run

    able = capture if one.pair.device.type == "cuda" else None
    return Piece("round", case, sizes, one.run, simulated, place, able)


def _prefill_work(name: str, pair: Pair, one: Round, ids: torch.Tensor, *, simulated: bool) -> Piece:
    tokens, context = ids.shape[1], None if one.context is None else one.context.stream(0)
    run = torch.inference_mode()(partial(prefill, pair, ids, one.cache.stream(0), context))
    sizes = {"rows": tokens, "streams": 1, "context": 0, "layers": pair.target.config.num_hidden_layers}
    return Piece("round", f"{name}, prefill of {tokens} tokens", sizes, run, simulated)
