"""Started by tests/test_reliability_runs.py under torchrun: algos/grpo.py with something going wrong on one rank.

    troubles.py TROUBLE [the arguments of grpo.py]     TROUBLE is one of TROUBLES, or the phase in which to fail

The script itself is untouched: what it calls is replaced before it starts.
"""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the scripts are no installed package

from algos import grpo
from common import launch, optim
from common.rewards import Scorer

RANK = int(os.environ["RANK"])


def after_calls(count: int, call: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """`call` for the first `count` times, `then` afterwards."""
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return (call if calls[0] <= count else then)(*args, **kwargs)

    return counted


def fail(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError(f"trouble on rank {RANK}")


def break_engine() -> None:
    """The engine of rank 1 fails in the rollout of step 2 (its first call checks the log-probs)."""
    build = grpo.build_engine

    def build_broken(*args: Any) -> Any:
        llm = build(*args)
        if RANK == 1:
            llm.generate = after_calls(2, llm.generate, fail)
        return llm

    grpo.build_engine = build_broken


def make_bad_numbers() -> None:
    """Each rank prints a checksum of its weights and moments after every update. Of the updates

    2 has a reward on rank 1 that is NaN, 3 a gradient on rank 0 that is infinite, and those from 5 on a loss on
    rank 1 that is NaN.
    """
    call, watch, apply = Scorer.__call__, optim.Updates.watch, optim.Updates.apply
    updates = [1]

    def score(self: Scorer, *args: Any) -> Any:
        scores, metrics = call(self, *args)
        if updates[0] == 2 and RANK == 1:
            scores[3] = math.nan
        return scores, metrics

    def watch_bad(self: optim.Updates, samples: Any, loss: torch.Tensor, numbers: torch.Tensor) -> None:
        if updates[0] >= 5 and RANK == 1:
            loss = loss * math.nan
        watch(self, samples, loss, numbers)

    def apply_bad(self: optim.Updates, model: Any, optimizer: Any, **options: Any) -> float:
        if updates[0] == 3 and RANK == 0:
            next(p for p in model.parameters() if p.grad is not None).grad.to_local().fill_(math.inf)
        try:
            return apply(self, model, optimizer, **options)
        finally:
            tensors = [p.detach().to_local() for p in model.parameters()]
            tensors += [v.to_local() for state in optimizer.state.values() for k, v in state.items() if k != "step"]
            total = sum(t.double().abs().sum() for t in tensors)
            # One write: print gives the end of the line a second one, and the other rank's line may come between.
            sys.stdout.write(f"checksum {RANK} {updates[0]} {float(total):.17g}\n")
            updates[0] += 1

    Scorer.__call__, optim.Updates.watch, optim.Updates.apply = score, watch_bad, apply_bad


def fail_in_phase(wanted: str) -> None:
    """Rank 1 fails when it enters a phase for the second time, or for the first if it never comes again.

    The engine, whose failure has a test of its own, is replaced by one that always says the same, which starts sooner.
    """

    def rollout(*, prompts: list, group_size: int, **_options: Any) -> list[grpo.Sample]:
        ids = [[5 + j] * (3 + j) for j in range(group_size)]
        return [grpo.Sample(prompt, row, [-1.0] * len(row), "#### 7") for prompt in prompts for row in ids]

    grpo.build_engine = grpo.sync_weights = lambda *_args: None
    grpo.check_engine = lambda *_args: 0.0
    grpo.rollout = rollout
    enter, begun = launch.Phases.__call__, [0]

    def enter_or_fail(self: launch.Phases, name: str) -> Any:
        begun[0] += name == wanted
        if RANK == 1 and name == wanted and begun[0] == (1 if name == "set-up" else 2):
            fail()
        return enter(self, name)

    launch.Phases.__call__ = enter_or_fail


TROUBLES = {"engine": break_engine, "numbers": make_bad_numbers}

if __name__ == "__main__":
    trouble = sys.argv.pop(1)
    if trouble in TROUBLES:
        TROUBLES[trouble]()
    else:
        fail_in_phase(trouble)
    launch.launch(grpo.main, grpo.Args)
