"""The targets for speed beside what limits.py, throughput.py and vs_trl.py have measured: reached or missed.

    python benchmarks/targets.py                  # reads their JSON in benchmarks/results/throughput

`make bench` runs the three and then this. A line whose figure was not measured says so. The targets are for two CPU
cores and a shape of 8 x 8 x 64; below the table stands which shape and dtype the figures are of.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import launch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from workload import table

Results = dict[str, Any]
"""The three files by name: limits, throughput, vs_trl."""


@dataclass
class Args:
    folder: str = "benchmarks/results/throughput"
    """Where limits.json, throughput.json and vs_trl.json are."""


@dataclass(frozen=True)
class Target:
    """`figure` finds its number in the results; it is at least, or with `is_limit` at most, `bound`."""

    name: str
    bound: float | Callable[[Results], float]
    figure: Callable[[Results], float]
    unit: str
    is_limit: bool = False

    def row(self, results: Results) -> list[str]:
        """Name, bound, figure and verdict as text."""
        try:
            bound = self.bound(results) if callable(self.bound) else self.bound
            figure = self.figure(results)
        except KeyError:
            return [self.name, "", "not measured", ""]
        is_reached = figure <= bound if self.is_limit else figure >= bound
        sign = "<=" if self.is_limit else ">="
        return [self.name, f"{sign} {self.text(bound)}", self.text(figure), "reached" if is_reached else "MISSED"]

    def text(self, value: float) -> str:
        return f"{value:.1%}" if self.unit == "%" else f"{value:.2f} {self.unit}".rstrip()


def sync_bound(results: Results) -> float:
    """Two copies of the weights at the machine's copy rate, and the engine's own reload of ready weights."""
    limits = results["limits"]["figures"]
    return 2 * limits["weight_bytes"] / limits["copy_bytes_per_s"] + limits["reload_s"]


def of_bare_engine(results: Results) -> float:
    """Of the engine that took turns with the script where there was one, else of the one that limits.py started."""
    figures = results["throughput"]["figures"]
    bare = figures["bare_rollout"] if "bare_rollout" in figures else results["limits"]["figures"]["generate_s"]
    return bare / figures["rollout"]


def of_matmul_rate(results: Results) -> float:
    """Of the larger one of the two rates that were measured."""
    record = results["throughput"]
    rate = max(record["matmul_flops"], results["limits"]["figures"][f"matmul_{record['args']['dtype']}_flops"])
    return record["figures"]["update_flops_per_s"] / rate


def two_ranks(results: Results) -> float:
    """Step time of two ranks over that of one, the work the same."""
    runs = {run["ranks"]: run for run in results["throughput"]["scans"]["ranks"]}
    return runs[2]["step"] / runs[1]["step"]


def ratio(engine: str, name: str) -> Callable[[Results], float]:
    return lambda results: results["vs_trl"]["results"][engine]["ratios"][name]


TARGETS = (
    Target("update, times as fast as TRL's (transformers)", 3.0, ratio("transformers", "update"), ""),
    Target("update, times as fast as TRL's (vLLM)", 3.0, ratio("vllm", "update"), ""),
    Target("step, times as fast as TRL with transformers", 3.0, ratio("transformers", "step"), ""),
    Target("step, times as fast as TRL with vLLM", 2.0, ratio("vllm", "step"), ""),
    Target("peak memory, share of TRL's with vLLM", 0.6, lambda r: 1 / ratio("vllm", "peak_memory_gib")(r), "%", True),
    Target("update, share of the matmul rate", 0.4, of_matmul_rate, "%"),
    Target("rollout, share of bare llm.generate's rate", 0.95, of_bare_engine, "%"),
    Target(
        "sync: two copies and the engine's reload", sync_bound, lambda r: r["throughput"]["figures"]["sync"], "s", True
    ),
    Target("step of 2 ranks, times that of 1", 1.15, two_ranks, "", True),
)


def read(folder: Path) -> Results:
    """What is there of the three files."""
    paths = {name: folder / f"{name}.json" for name in ("limits", "throughput", "vs_trl")}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main(args: Args) -> None:
    results = read(Path(args.folder))
    launch.require(
        bool(results), f"--folder {args.folder}: none of limits.json, throughput.json and vs_trl.json is there"
    )
    first = next(iter(results.values()))
    print(table(["target", "bound", "measured", ""], [target.row(results) for target in TARGETS]))
    hardware = first["hardware"]
    for name, record in results.items():
        shape = record.get("shape") or record["figures"]["shape"]
        clock = f"{record['clock']} time, load {record['load_average']:.1f}"
        print(f"{name}: {shape} tokens, {record['args']['dtype']}, {clock}, {record['date']}")
    print(f"{hardware['cpus']} x {hardware['cpu']} ({hardware.get('instructions', hardware.get('accelerator'))})")
    if "limits" in results and not hardware.get("bf16_instructions", True):
        rates = {name: results["limits"]["figures"][f"matmul_{name}_flops"] / 1e9 for name in ("fp32", "bf16")}
        print(
            f"The targets are meant in bf16, for which this processor has no instructions: {rates['bf16']:.1f} GFLOP/s "
            f"against {rates['fp32']:.1f} in fp32. So both sides compute in fp32, and shares are of the fp32 rate."
        )


if __name__ == "__main__":
    launch.launch(main, Args)
