"""How fast a script trains: seconds and tokens a second of each phase, memory, and its share of the matmul rate.

    python benchmarks/throughput.py --model models/smollm2
    python benchmarks/throughput.py --script algos/ppo.py --ranks 2
    python benchmarks/throughput.py --no-engine                                   # the update alone, without vLLM
    python benchmarks/throughput.py --scan response-length group-size --no-engine
    python benchmarks/throughput.py --ranks 8 --model models/qwen --micro-batch-tokens 16384 --dtype bf16

The script itself runs, under torchrun, with responses of exactly --response-length tokens (run_script.py says what is
put in its place for that); the seconds are those it logs. Every figure is the median of --steps steps after a first one
that is not counted. On a CPU, bare `llm.generate` takes turns with a single rank, step by step (run_engine.py): what
the rollout could reach. The model's operations are 6 x parameters x tokens, the head counted for response tokens only,
whatever the script really computes; the share is of the matmul rate as limits.py measures it, with the threads of all
ranks.

--scan runs the script once for each value of a dimension, the others as given; numbers of ranks take turns. Response
lengths from 64 to 2048 keep the number of response tokens, with fewer prompts. Prints tables and writes JSON (--out).
"""

import contextlib
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from common import launch
from common.device import Device, get_device

sys.path.insert(0, str(Path(__file__).resolve().parent))
import limits
import workload
from workload import PHASES, ROOT, Shape, Side, medians, seconds, table

Dimension = Literal["micro-batch-tokens", "response-length", "group-size", "ranks"]


@dataclass
class Args:
    script: str = "algos/grpo.py"
    """Training script: one that samples responses."""
    model: str = "models/smollm2"
    """Folder of a Hugging Face causal language model."""
    prompts: int = 8
    """Prompts of a step, over all ranks."""
    group_size: int = 8
    """Responses to each prompt."""
    response_length: int = 64
    """Tokens of every response."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute dtype of engine and trainer; auto: bf16 where the hardware multiplies it, else fp32."""
    micro_batch_tokens: int = 2048
    """--micro-batch-tokens of the script."""
    ranks: int = 1
    """Ranks that torchrun starts."""
    threads: int | None = None
    """Threads of each rank; default: the processors shared out."""
    engine: bool = True
    """Run the rollout and the sync too; without, the update alone is measured, and vLLM need not be installed."""
    steps: int = 3
    """Steps of which the median is taken, after one that is not counted."""
    scan: tuple[Dimension, ...] = ()
    """Also vary these, one at a time."""
    script_args: str = ""
    """More arguments for the script: --script-args="--gradient-checkpointing --logits-chunk-rows 256"."""
    clock: Literal["wall", "processor"] = "wall"
    """processor: seconds of one thread on a processor instead, for a machine that is shared with others."""
    out: str = "benchmarks/results/throughput/throughput.json"
    """Where the figures go; "" writes none."""


def shape_of(args: Args) -> Shape:
    return Shape(args.prompts, args.group_size, args.response_length)


def threads_of(args: Args) -> int:
    """Threads of each rank."""
    return args.threads or workload.threads_for(args.clock, args.ranks)


def script_command(args: Args, folder: Path) -> list[str]:
    """The command that trains with the script step by step, its files in `folder`."""
    shape = shape_of(args)
    prompts = workload.write_prompts(folder, shape.prompts)
    given = {
        "script": ROOT / args.script, "folder": folder, "model": args.model, "train-files": prompts,
        "prompts-per-step": shape.prompts, "group-size": shape.group_size,
        "max-prompt-length": workload.MAX_PROMPT_LENGTH, "max-response-length": shape.response_length,
        "dtype": args.dtype, "micro-batch-tokens": args.micro_batch_tokens, "steps": args.steps + 1, "lr": 1e-6,
        "warmup-steps": 0, "eval-every": 0, "run-dir": folder / "run",
    }  # fmt: skip
    switches = ["--no-export", *(["--engine"] if args.engine else []), *shlex.split(args.script_args)]
    script = str(ROOT / "benchmarks" / "run_script.py")
    return [*workload.TORCHRUN, "--nproc_per_node", str(args.ranks), script, *workload.flags(given), *switches]


def engine_command(args: Args, folder: Path) -> list[str]:
    """The command that generates with a bare engine what the script's rollouts do."""
    given = workload.work_of(args) | {"folder": folder}
    return [sys.executable, str(ROOT / "benchmarks" / "run_engine.py"), *workload.flags(given)]


def measure(*runs: Args) -> list[dict[str, float]]:
    """Medians of each run's figures: seconds of the phases, tokens of a step, peak memory of a rank. In turns.

    A first run of one rank on a CPU also has "bare_rollout", the seconds of a bare engine that takes turns with them.
    """
    first = runs[0]
    is_compared = first.engine and first.ranks == 1 and not get_device().is_accelerator
    commands = [(run.script, script_command, run) for run in runs]
    commands += [("the bare engine", engine_command, first)] * is_compared
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        sides = []
        for i, (name, command, run) in enumerate(commands):
            folder = Path(scratch) / str(i)
            folder.mkdir()
            sides.append(stack.enter_context(Side(name, command(run, folder), folder, threads=threads_of(run))))
        results = [medians(records) for records in workload.take_turns(sides, steps=first.steps)]
    if is_compared:
        results[0]["bare_rollout"] = results.pop()["rollout"]
    return results


def add_rates(figures: dict[str, Any], args: Args, counts: tuple[int, int], peak: float) -> dict[str, Any]:
    """The figures with the utilisation of the update and tokens a second; `peak` in operations a second."""
    tokens, response_tokens = figures["tokens"], shape_of(args).response_tokens
    flops = workload.model_flops(counts, tokens=tokens, response_tokens=response_tokens)
    return figures | {
        "update_flops_per_s": flops / figures["update"],
        "update_utilisation": flops / figures["update"] / peak,
        "rollout_tokens_per_s": response_tokens / figures["rollout"],
        "update_tokens_per_s": tokens / figures["update"],
        "step_tokens_per_s": tokens / figures["step"],
    }


def scan_values(dimension: Dimension, args: Args) -> list[Args]:
    """The runs of a scan."""
    if dimension == "micro-batch-tokens":
        return [replace(args, micro_batch_tokens=tokens) for tokens in (256, 512, 1024, 2048, 4096, 8192)]
    if dimension == "group-size":
        return [
            replace(args, group_size=size, prompts=max(1, args.prompts * args.group_size // size))
            for size in (2, 4, 8, 16)
        ]
    if dimension == "ranks":
        processors = torch.cuda.device_count() if get_device().is_accelerator else os.cpu_count() or 1
        counts = [2**i for i in range(processors.bit_length()) if args.prompts % 2**i == 0]
        return [replace(args, ranks=count, threads=workload.threads_for(args.clock, count)) for count in counts]
    lengths = [64 * 2**i for i in range(6)]
    budget = args.prompts * args.response_length
    return [
        replace(
            args,
            response_length=length,
            prompts=max(1, budget // length),
            micro_batch_tokens=max(args.micro_batch_tokens, length + workload.MAX_PROMPT_LENGTH),
        )
        for length in lengths
    ]


def show(figures: dict[str, Any], args: Args) -> None:
    tokens = {"rollout": shape_of(args).response_tokens}
    rows = [
        [phase, seconds(figures[phase]), f"{tokens.get(phase, figures['tokens']) / figures[phase]:,.0f}"]
        for phase in PHASES
        if phase in figures and (args.engine or phase == "update")
    ]
    if "bare_rollout" in figures:
        rows.append(["rollout, of the bare engine's rate", f"{figures['bare_rollout'] / figures['rollout']:.1%}", ""])
    rows.append(["update, of the matmul rate", f"{figures['update_utilisation']:.1%}", ""])
    rows.append(["peak memory of a rank", f"{figures['peak_memory_gib']:.2f} GiB", ""])
    title = f"{args.script}, {shape_of(args)} tokens, {args.dtype}, {args.ranks} x {threads_of(args)} threads"
    print(table([title, "seconds", "tokens/s"], rows), flush=True)


def show_scan(dimension: Dimension, runs: list[Args], results: list[dict[str, Any]]) -> None:
    names = [phase for phase in PHASES if phase in results[0] and (runs[0].engine or phase == "update")]
    field = dimension.replace("-", "_")
    rows = [
        [
            f"{getattr(run, field)} ({shape_of(run)})",
            *(seconds(result[name]) for name in names),
            f"{result['update_utilisation']:.1%}",
            f"{result['peak_memory_gib']:.2f}",
        ]
        for run, result in zip(runs, results, strict=True)
    ]
    print(table([dimension, *names, "of peak", "GiB"], rows), flush=True)


def matmul_peak(args: Args, device: Device) -> float:
    """Operations a second of matrix products: of all ranks' accelerators, or of a CPU with the threads of all ranks."""
    if not device.is_accelerator:
        torch.set_num_threads(args.ranks * threads_of(args))  # `make` sets one, which is meant for a rank
    longest = workload.MAX_PROMPT_LENGTH + args.response_length
    shapes = limits.matmul_shapes(args.model, min(args.micro_batch_tokens, 16 * longest), device)
    rate = limits.matmul_rate(shapes, limits.DTYPES[args.dtype], repeats=5, device=device)
    return rate * args.ranks if device.is_accelerator else rate


def main(args: Args) -> None:
    device = get_device()
    workload.check_model(args.model)
    os.environ[workload.CLOCK] = args.clock
    launch.require((ROOT / args.script).is_file(), f"--script {args.script}: no such file")
    launch.require(args.prompts % args.ranks == 0, f"--prompts {args.prompts} do not go to --ranks {args.ranks} evenly")
    if args.dtype == "auto":
        args.dtype = "bf16" if device.default_dtype() == torch.bfloat16 else "fp32"
    counts = workload.parameter_counts(args.model)
    peak = matmul_peak(args, device)
    device.empty_cache()  # this process keeps nothing of the memory that the ranks need
    args.threads = threads_of(args)
    known: dict[str, dict[str, Any]] = {}  # figures by arguments, so that no run is measured twice

    def measure_new(runs: list[Args], *, in_turns: bool) -> None:
        new = list({str(run): run for run in runs if str(run) not in known}.values())
        measured = measure(*new) if in_turns else [measure(run)[0] for run in new]
        for run, result in zip(new, measured, strict=True):
            known[str(run)] = add_rates(result, run, counts, peak)

    measure_new([args, *(scan_values("ranks", args) if "ranks" in args.scan else [])], in_turns=True)
    show(known[str(args)], args)
    scans = {}
    for dimension in args.scan:
        runs = scan_values(dimension, args)
        measure_new(runs, in_turns=False)
        results = [known[str(run)] for run in runs]
        show_scan(dimension, runs, results)
        field = dimension.replace("-", "_")
        scans[dimension] = [
            {field: getattr(run, field), "shape": str(shape_of(run))} | result
            for run, result in zip(runs, results, strict=True)
        ]
    figures = known[str(args)]
    written = {"matmul_flops": peak, "shape": str(shape_of(args)), "figures": figures, "scans": scans}
    workload.write_results(args.out, args, device, written)


if __name__ == "__main__":
    launch.launch(main, Args)
