"""Runs a training script of algos/ for a benchmark: responses of exact length, step by step, figures written down.

Started by throughput.py and vs_trl.py. It is the script's own `main` that runs; only these are put in the place of what
the script would do:

    a response never ends before --max-response-length
    rewards are computed as ever, and then set to 1 and 0 in turn, so that no group's advantages are all 0
    without --engine: no vLLM; rollouts are made-up tokens, and there is nothing to send weights to

Arguments that are not its own go to the script.
"""

import argparse
import functools
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from common import data, engine, launch, tracking

sys.path.insert(0, str(Path(__file__).resolve().parent))
import workload


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def fix_lengths(module: ModuleType) -> None:
    """Let no response end early: nothing is a stop token, not even the EOS."""
    engine.stop_token_ids = lambda *_args: []
    build_engine = module.build_engine

    def build_engine_and_fix(*arguments: Any) -> Any:
        llm = build_engine(*arguments)
        generate = llm.generate

        def generate_all(inputs: list[Any], params: list[Any], **settings: Any) -> list[Any]:
            for request in params:
                request.ignore_eos = True
            return generate(inputs, params, **settings)

        llm.generate = generate_all
        return llm

    module.build_engine = build_engine_and_fix


def made_up_rollout(
    module: ModuleType, *, prompts: list[data.Prompt], step: int, group_size: int, max_tokens: int, **_settings: Any
) -> list[Any]:
    """Samples of `max_tokens` tokens out of the prompts' own, with made-up log-probs: P prompts -> P x G samples."""
    generator = torch.Generator().manual_seed(step + 1)
    samples = []
    for prompt in prompts:
        known = torch.tensor(prompt.prompt_ids)
        for _ in range(group_size):
            ids = known[torch.randint(len(known), (max_tokens,), generator=generator)].tolist()
            samples.append(module.Sample(prompt, ids, [-5.0] * max_tokens, truncated=True))
    return samples


def replace_engine(module: ModuleType) -> None:
    """Train without vLLM."""
    module.build_engine = lambda *_args: SimpleNamespace(sleep=lambda level: None)
    module.sync_weights = lambda *_args: None
    module.check_engine = lambda *_args: 0.0
    module.rollout = functools.partial(made_up_rollout, module)


def spread_rewards(module: ModuleType) -> None:
    """Half of every group is right."""
    score = module.score

    def score_and_spread(scorer: Any, samples: list[Any]) -> dict[str, float]:
        metrics = score(scorer, samples)
        for i, sample in enumerate(samples):
            sample.reward = float(i % 2)
        return metrics

    module.score = score_and_spread


def use_clock() -> None:
    """Let the phases be timed by the clock that the benchmark has chosen."""
    launch.time = SimpleNamespace(**vars(time) | {"perf_counter": workload.now})


def follow_turns(folder: Path, response_length: int) -> Callable[[], None]:
    """Wait before each step; after it, rank 0 writes the seconds of each phase as the script itself logs them.

    They are written when the script asks for the next step: what it does in between, drawing its curve for one, must
    not go on in another side's turn. Returns what writes those of the last step, to be called at the end of the run.
    """
    done: dict[int, dict[str, float]] = {}

    def write() -> None:
        while done:
            workload.write_step(folder, *done.popitem())

    class PacedPhases(launch.Phases):
        turn = 0

        def start_step(self) -> None:
            write()
            self.turn += 1
            if dist.get_rank() == 0:
                workload.wait_for_turn(folder, self.turn)
            dist.barrier()
            super().start_step()

    log = tracking.Tracker.log

    def log_and_keep(self: tracking.Tracker, step: int, metrics: dict[str, float]) -> None:
        log(self, step, metrics)
        length = metrics["response_length"]
        if length != response_length:
            raise RuntimeError(f"responses of {length} tokens instead of {response_length}: the figures would mislead")
        record = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
        record["peak_memory_gib"] = metrics["perf/peak_memory_gib"]
        record["tokens"] = metrics["perf/tokens_per_s"] * metrics["time/step"]
        if dist.get_rank() == 0:
            done[step] = record

    launch.Phases, tracking.Tracker.log = PacedPhases, log_and_keep
    return write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--max-response-length", type=int, required=True)
    mine, rest = parser.parse_known_args()
    module = load_script(mine.script)
    if mine.engine:
        fix_lengths(module)
    else:
        replace_engine(module)
    spread_rewards(module)
    use_clock()
    write_last = follow_turns(mine.folder, mine.max_response_length)

    def train(args: Any) -> None:
        module.main(args)
        write_last()

    sys.argv = [str(mine.script), "--max-response-length", str(mine.max_response_length), *rest]
    launch.launch(train, module.Args)


if __name__ == "__main__":
    main()
