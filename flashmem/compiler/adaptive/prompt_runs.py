"""How many tokens of a prompt a run reads: a longer run where the device and the budget make it worth its memory.

Each run loads what does not stay in memory, and on a GPU takes launches that few tokens cannot fill. A longer run does that for
more tokens. Its activations leave less memory for weights that stay, for all variants. `flashmem.runtime.generation` reads the
rest of a prompt in shorter runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

from flashmem.bundle.language import CHECKED_TOKENS, IDS, LONG_RUNS, PROMPT_TOKENS
from flashmem.compiler.adaptive.shape_variants import Variants
from flashmem.compiler.options import Options
from flashmem.compiler.stages.pipeline import GroupedGraph, Pipeline
from flashmem.planning.planner import planning_instance
from flashmem.program.program import Program, fixed_bytes

PROMPT = 512
ANSWER = 128
"""Tokens of the prompt and of the answer for which a longer run must pay."""

WORTH_SECONDS = 0.1
"""The least time that it saves for the prompt: another variant takes time to compile."""

WORTH = 0.1
"""The least part of the prompt's time that it saves. Less is within the error of predicted launches, and to predict a run of
more tokens takes an import and a lowering of the model for them.
"""


@dataclass(frozen=True)
class RunCost:
    """What a run of one variant takes: `compute` seconds, `fixed` bytes beside `weights`, both rates in bytes per second.

    `budget`: the bytes for all of them; None for no limit.
    """

    compute: float
    fixed: int
    weights: int
    cached_rate: float
    disk_rate: float
    budget: int | None

    def seconds(self, fixed: int = 0) -> float:
        """A bound of a later run where variants reserve `fixed` bytes at least: the geometric mean of that with the weight file
        in the page cache, and that with the file on the disk.
        """
        loaded = 0 if self.budget is None else max(0, self.weights + max(fixed, self.fixed) - self.budget)
        return sqrt(max(self.compute, loaded / self.cached_rate) * max(self.compute, loaded / self.disk_rate))


def cost_of(program: Program, options: Options) -> RunCost:
    """Predict a run of a program without a plan."""
    limits = options.request
    instance = planning_instance(program, options.descriptor, options.mode, limits)
    compute = sum(layer.seconds for layer in instance.layers)
    nbytes = sum(weight.nbytes for weight in instance.weights)
    return RunCost(compute, fixed_bytes(program), nbytes, instance.host_bandwidth, instance.load_bandwidth, limits.budget)


def longer_run(costs: dict[int, RunCost], longest: int, cost: Callable[[int], RunCost]) -> int | None:
    """The tokens of a longer run that is worth it, beside those of `PROMPT_TOKENS`; None if none is.

    Args:
        costs: of the runs of 1, `CHECKED_TOKENS` and `PROMPT_TOKENS` tokens.
        longest: tokens that the cache holds.
        cost: predicts a run of so many tokens. It is called for those that may pay, as their computing goes on to grow.
    """
    one = costs[1]
    few = costs[CHECKED_TOKENS]
    known = costs[PROMPT_TOKENS]
    each = max(0.0, known.compute - few.compute) / (PROMPT_TOKENS - CHECKED_TOKENS)

    def prompt(run: RunCost, tokens: int) -> float:
        return PROMPT / tokens * run.seconds()

    def total(run: RunCost, tokens: int) -> float:
        return prompt(run, tokens) + ANSWER * one.seconds(run.fixed)

    def pays(run: RunCost, tokens: int, before: float) -> bool:
        whole = prompt(known, PROMPT_TOKENS)
        saved = whole - prompt(run, tokens)
        return saved >= max(WORTH_SECONDS, WORTH * whole) and total(run, tokens) < before

    best = total(known, PROMPT_TOKENS)
    chosen = None
    for tokens in LONG_RUNS:
        grown = replace(known, compute=known.compute + each * (tokens - PROMPT_TOKENS))
        if tokens > longest or not pays(grown, tokens, best):
            continue
        made = cost(tokens)
        if pays(made, tokens, best):
            best = total(made, tokens)
            chosen = tokens
    return chosen


def with_longer_run(variants: Variants, longest: int, read: Callable[[Options], GroupedGraph]) -> Variants:
    """The variants of a language model for one request, with one more if that is worth it.

    `longest`: tokens that the cache holds; `read`: reads the graph of a further variant. Raises as it does.
    """
    first = variants.options[0]
    further: dict[int, tuple[Options, GroupedGraph]] = {}

    def cost(count: int) -> RunCost:
        options = replace(first, shapes={**first.shapes, IDS: (1, count)})
        graph = read(options)
        further[count] = options, graph
        return cost_of(Pipeline.of(graph, options).drafted().program, options)

    costs = {
        options.shapes[IDS][1]: cost_of(variants.drafts[index].program, options)
        for index, options in enumerate(variants.options)
    }
    chosen = longer_run(costs, longest, cost)
    if chosen is None:
        return variants
    options, graph = further[chosen]
    return Variants.grouped((*variants.options, options), (*variants.graphs, graph))
