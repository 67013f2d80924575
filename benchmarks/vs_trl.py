"""SoloRL beside TRL's GRPOTrainer: the same model, prompts, response lengths, dtype and updates, step by step in turn.

    python benchmarks/vs_trl.py --model models/smollm2 --trl-python .venv-trl/bin/python

TRL runs in a virtual environment of its own (benchmarks/requirements-trl.txt; `make bench` makes it) and two ways:
with transformers' generation, which is what it does on a CPU today, and with vLLM in its own process. run_trl.py says
what it is given for that beyond its defaults, among it a weight sync that works on a CPU. Both sides compute in micro-
batches of equally many sequences, TRL's own default, without recomputing activations. Figures are medians over --steps
steps, after one that is not counted; the two sides take turns, so what disturbs the machine disturbs both: the ratios
are what counts.

Prints the phases of both sides and writes JSON (--out).
"""

import math
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from common import launch
from common.device import get_device

sys.path.insert(0, str(Path(__file__).resolve().parent))
import throughput
import workload
from workload import PHASES, ROOT, Shape, Side, medians, seconds, table

Engine = Literal["transformers", "vllm"]


@dataclass
class Args:
    trl_python: str = ".venv-trl/bin/python"
    """Python of the virtual environment that has TRL."""
    model: str = "models/smollm2"
    """Folder of a Hugging Face causal language model."""
    prompts: int = 8
    """Prompts of a step."""
    group_size: int = 8
    """Responses to each prompt."""
    response_length: int = 64
    """Tokens of every response."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute dtype of both sides; auto: bf16 where the hardware multiplies it, else fp32."""
    micro_batch_sequences: int = 8
    """Sequences in one forward and backward pass of both sides."""
    engines: tuple[Engine, ...] = ("transformers", "vllm")
    """What TRL generates with."""
    steps: int = 3
    """Steps of which the median is taken, after one that is not counted."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass, on both sides. TRL does so by default."""
    clock: Literal["wall", "processor"] = "wall"
    """processor: seconds of one thread on a processor instead, for a machine that is shared with others."""
    out: str = "benchmarks/results/throughput/vs_trl.json"
    """Where the figures go; "" writes none."""


def micro_batch_tokens(args: Args) -> int:
    """Tokens of --micro-batch-sequences sequences, a group's prompt counted once, as the script counts it."""
    longest = max(map(len, workload.prompt_ids(args.model, args.prompts)))
    groups = math.ceil(args.micro_batch_sequences / args.group_size)
    return groups * longest + args.micro_batch_sequences * args.response_length


def solorl_side(args: Args, folder: Path, threads: int) -> Side:
    folder.mkdir(parents=True)
    settings = throughput.Args(
        model=args.model, prompts=args.prompts, group_size=args.group_size, response_length=args.response_length,
        dtype=args.dtype, micro_batch_tokens=micro_batch_tokens(args), steps=args.steps, threads=threads,
        script_args="--gradient-checkpointing" * args.gradient_checkpointing,
    )  # fmt: skip
    return Side("SoloRL", throughput.script_command(settings, folder), folder, threads=threads)


def trl_side(args: Args, folder: Path, engine: Engine, threads: int) -> Side:
    given = {"folder": folder, "engine": engine, "micro_batch_sequences": args.micro_batch_sequences}
    flags = workload.flags(workload.work_of(args) | given)
    flags += ["--gradient-checkpointing"] if args.gradient_checkpointing else []
    # Not resolved: a virtual environment's Python is a link, and finds its packages by the name it is called.
    python = os.path.abspath(args.trl_python)
    return Side(
        f"TRL with {engine}", [python, str(ROOT / "benchmarks" / "run_trl.py"), *flags], folder, threads=threads
    )


def compare(args: Args, engine: Engine, threads: int) -> dict[str, Any]:
    """Medians of both sides and every step's figures, taken in turn."""
    with tempfile.TemporaryDirectory() as scratch:
        with (
            solorl_side(args, Path(scratch) / "solorl", threads) as ours,
            trl_side(args, Path(scratch) / "trl", engine, threads) as theirs,
        ):
            records = workload.take_turns([ours, theirs], steps=args.steps)
    return {"solorl": medians(records[0]), "trl": medians(records[1]), "records": records}


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """How many times as long TRL takes as SoloRL, by phase; its peak memory likewise."""
    ours, theirs = result["solorl"], result["trl"]
    # What takes no time, as a phase that one side does not have, has no ratio.
    names = [name for name in (*PHASES, "peak_memory_gib") if min(ours.get(name, 0.0), theirs.get(name, 0.0)) > 1e-3]
    return {name: theirs[name] / ours[name] for name in names}


def show(result: dict[str, Any], engine: Engine, args: Args) -> None:
    ours, theirs, times = result["solorl"], result["trl"], ratios(result)
    rows = [
        [
            phase,
            seconds(ours.get(phase, 0.0)),
            seconds(theirs.get(phase, 0.0)),
            f"{times[phase]:.2f}" if phase in times else "",
        ]
        for phase in PHASES
    ]
    memory = [f"{side['peak_memory_gib']:.2f}" for side in (ours, theirs)]
    rows.append(["peak memory, GiB", *memory, f"{times['peak_memory_gib']:.2f}"])
    shape = Shape(args.prompts, args.group_size, args.response_length)
    print(table([f"{shape} tokens, {args.dtype}", "SoloRL", f"TRL, {engine}", "ratio"], rows), flush=True)


def main(args: Args) -> None:
    device = get_device()
    workload.check_model(args.model)
    launch.require(
        Path(args.trl_python).exists(),
        f"--trl-python {args.trl_python}: not found; `make bench` makes it (benchmarks/requirements-trl.txt)",
    )
    sequences = args.prompts * args.group_size
    launch.require(
        sequences % args.micro_batch_sequences == 0,
        f"--micro-batch-sequences {args.micro_batch_sequences} does not divide the {sequences} sequences of a step",
    )
    if args.dtype == "auto":
        args.dtype = "bf16" if device.default_dtype() == torch.bfloat16 else "fp32"
    os.environ[workload.CLOCK] = args.clock
    threads = workload.threads_for(args.clock)
    results = {}
    for engine in args.engines:
        results[engine] = compare(args, engine, threads)
        results[engine]["ratios"] = ratios(results[engine])
        show(results[engine], engine, args)
    shape = Shape(args.prompts, args.group_size, args.response_length)
    workload.write_results(args.out, args, device, {"shape": str(shape), "threads": threads, "results": results})


if __name__ == "__main__":
    launch.launch(main, Args)
