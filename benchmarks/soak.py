"""Kill runs at random moments and resume them, again and again: do they end as if nothing had happened?

    python benchmarks/soak.py                      # 50 kills of all nine scripts: half an hour on two CPU cores
    python benchmarks/soak.py --kills 10 --only ppo --seed 7 --out soak.md

For each script one run goes through undisturbed. Then, round after round, a run of the same command is killed with
SIGKILL, at a random moment and at a random place (all its processes, torchrun alone, or one rank), and continued with
--resume, up to KILLS times, until it is let through to its end. Its metrics, samples and exported weights must then
equal those of the undisturbed run bit for bit. Also: 200 weight syncs must not make the process grow.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from workload import ROOT, TORCHRUN, environment

ROLLOUTS = (
    *("--prompts-per-step", "8", "--max-prompt-length", "64", "--micro-batch-tokens", "1000", "--lr", "1e-3"),
    *("--save-every", "1", "--eval-every", "5"),
)
SEVERAL = ("--steps", "10", "--group-size", "4", "--num-minibatches", "2", "--kl-coef", "0.01")

SCRIPTS = {
    "grpo": (*ROLLOUTS, *SEVERAL),
    "rloo": (*ROLLOUTS, *SEVERAL),
    "remax": (*ROLLOUTS, *SEVERAL),
    "gspo": (*ROLLOUTS, *SEVERAL),
    "ppo": (*ROLLOUTS, *SEVERAL, "--kl-target", "0.01", "--kl-horizon", "100", "--critic-warmup", "2"),
    "spin": (*ROLLOUTS, "--iterations", "2", "--steps-per-iteration", "5"),
    "distill": (*ROLLOUTS, "--steps", "10"),
    "sft": ("--steps", "40", "--batch-size", "8", "--save-every", "3", "--eval-every", "20"),
    "reward_model": ("--steps", "40", "--batch-size", "8", "--save-every", "3", "--eval-every", "20"),
}
"""Arguments of each script that is put under fire; test files, and those of sft.py, are made by `make_data`."""

RANKS = 2

KILLS = 4
"""At most so many kills before a run is let through."""


def start(arguments: tuple[str, ...], run_dir: Path, *, resume: bool, log: Path) -> subprocess.Popen:
    """Start torchrun; its output is appended to `log`."""
    command = [*TORCHRUN, *arguments, "--run-dir", str(run_dir)]
    with open(log, "ab") as output:
        return subprocess.Popen(
            [*command, *(["--resume"] if resume else [])], env=environment(), stdout=output, stderr=subprocess.STDOUT
        )


def stat_of(pid: int) -> list[str] | None:
    """State, parent, ... of a process; None when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


def is_alive(pid: int) -> bool:
    stat = stat_of(pid)
    return stat is not None and stat[0] != "Z"


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Process ids of torchrun's living children."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if is_alive(pid) and int((stat_of(pid) or ["", -1])[1]) == launcher.pid]


def kill(launcher: subprocess.Popen, target: str, limit_s: float = 60.0) -> float:
    """SIGKILL `target`: "all", "torchrun" or "one rank". Returns the seconds until the last process was gone.

    Raises TimeoutError when one outlives the limit.
    """
    ranks = ranks_of(launcher)
    victims = {"all": [launcher.pid, *ranks], "torchrun": [launcher.pid], "one rank": ranks[-1:]}[target]
    began = time.monotonic()
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    while launcher.poll() is None or any(map(is_alive, ranks)):
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"processes outlived a kill of {target} by {limit_s} s")
        time.sleep(0.05)
    return time.monotonic() - began


def steps_done(run_dir: Path) -> int:
    """The last step in metrics.jsonl; -1 before the first line."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return steps[-1] if steps else -1


def differences(run_dir: Path, reference: Path) -> list[str]:
    """In what a finished run differs from the undisturbed one; clocks and memory do not count."""

    def metrics(folder: Path) -> list[dict]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]

    found = []
    if metrics(run_dir) != metrics(reference):
        found.append("metrics.jsonl")
    for name in ("samples.jsonl", "hf/model.safetensors"):
        if (run_dir / name).read_bytes() != (reference / name).read_bytes():
            found.append(name)
    return found


def make_data(folder: Path) -> tuple[str, ...]:
    """Rows for sft.py; returns the arguments that name them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    generator = random.Random(0)
    numbers = [(generator.randrange(1000), generator.randrange(1000)) for _ in range(200)]
    rows = [{"prompt": f"{a}+{b}=?", "response": f"#### {a + b}"} for a, b in numbers]
    pq.write_table(pa.Table.from_pylist(rows[:160]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[160:]), folder / "test.parquet")
    return ("--train-files", f"{folder}/train.parquet", "--test-files", f"{folder}/test.parquet")


def command_of(script: str, folder: Path) -> tuple[str, ...]:
    """Arguments of torchrun; a short evaluation, so that most of a run is what can be lost."""
    import pyarrow.parquet as pq

    if script == "sft":
        files = make_data(folder)
    elif script == "reward_model":
        files = ()
    else:
        pq.write_table(pq.read_table(ROOT / "assets/tiny-arith/test.parquet").slice(0, 33), folder / "test.parquet")
        files = ("--test-files", f"{folder}/test.parquet")
    return ("--nproc_per_node", str(RANKS), f"{ROOT}/algos/{script}.py", *SCRIPTS[script], *files)


class Soak:
    """The rounds of one script and what came of them."""

    def __init__(self, name: str, arguments: tuple[str, ...], folder: Path, generator: random.Random) -> None:
        self.name = name
        self.arguments = arguments
        self.folder = folder
        self.generator = generator
        self.reference = folder / "reference"
        self.kills: Counter[str] = Counter()
        self.moments: Counter[str] = Counter()
        self.resumed_from: Counter[str] = Counter()
        self.runs = 0
        self.gone_s: list[float] = []
        self.failures: list[str] = []
        began = time.monotonic()
        launcher = start(arguments, self.reference, resume=False, log=folder / "reference.log")
        if launcher.wait(timeout=300) != 0:
            raise RuntimeError(f"{name}: the undisturbed run failed:\n{(folder / 'reference.log').read_text()[-3000:]}")
        self.duration = time.monotonic() - began
        self.steps = steps_done(self.reference)

    def round(self) -> None:
        """One run: killed and resumed up to KILLS times, then let through and compared."""
        self.runs += 1
        run_dir, log = self.folder / f"run{self.runs}", self.folder / f"run{self.runs}.log"
        for number in range(self.generator.randint(1, KILLS) + 1):
            resume = run_dir.exists() and (run_dir / "metrics.jsonl").exists()
            launcher = start(self.arguments, run_dir, resume=resume, log=log)
            before = steps_done(run_dir)
            if number < KILLS:
                self._kill_at_random(launcher, run_dir, before)
            if launcher.poll() is None:
                launcher.wait(timeout=300)
            if launcher.returncode == 0:
                break
        else:  # every start was killed
            launcher = start(self.arguments, run_dir, resume=True, log=log)
            launcher.wait(timeout=300)
        if launcher.returncode != 0:
            self.failures.append(f"run {self.runs} ended with {launcher.returncode}: {log.read_text()[-2000:]}")
        elif different := differences(run_dir, self.reference):
            self.failures.append(f"run {self.runs}: {', '.join(different)} differ")
        else:
            shutil.rmtree(run_dir)

    def _kill_at_random(self, launcher: subprocess.Popen, run_dir: Path, before: int) -> None:
        """Kill after a random further step has been logged, and a moment later; or while the run is still starting."""
        if self.generator.random() < 0.15:
            time.sleep(self.generator.uniform(0.2, 0.6) * self.duration)
        else:
            wanted = before + self.generator.randint(1, max(1, self.steps // 3))
            while launcher.poll() is None and not before < steps_done(run_dir) >= min(wanted, self.steps):
                time.sleep(0.02)
                before = min(before, steps_done(run_dir))  # a resumed run forgets what came after its checkpoint
            time.sleep(self.generator.uniform(0.0, 0.8))
        if launcher.poll() is not None:
            return
        target = self.generator.choice(["all", "all", "torchrun", "one rank"])
        folders = sorted(path.name for path in (run_dir / "checkpoints").glob("*"))
        self.moments["while a checkpoint was written" if any(f.endswith(".tmp") for f in folders) else "otherwise"] += 1
        self.gone_s.append(kill(launcher, target))
        self.kills[target] += 1

    def report(self) -> list[str]:
        """Rows of the Markdown table."""
        targets = ", ".join(f"{count} x {target}" for target, count in sorted(self.kills.items()))
        return [
            f"| {self.name}.py | {self.runs} | {sum(self.kills.values())} ({targets}) | "
            f"{self.moments['while a checkpoint was written']} | {max(self.gone_s, default=0):.1f} s | "
            f"{self.runs - len(self.failures)} of {self.runs} |"
        ]


def sync_growth(folder: Path) -> dict[str, float]:
    """Growth of the process over 200 weight syncs, in MB a sync; see tests/workers/syncs.py."""
    out = folder / "syncs.json"
    command = [*TORCHRUN, "--nproc_per_node", "1"]
    worker = [str(ROOT / "tests/workers/syncs.py"), "--out", str(out), "--syncs", "200"]
    subprocess.run([*command, *worker], env=environment(), check=True, timeout=300, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and resume runs at random.", allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=50, help="begin no further run after so many")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="scripts to kill")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and places of the kills")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file too")
    options = parser.parse_args()
    began = time.monotonic()
    soaks: list[Soak] = []
    with tempfile.TemporaryDirectory() as name:
        growth = sync_growth(Path(name))
        for place, script in enumerate(options.only):
            folder = Path(name) / script
            folder.mkdir()
            generator = random.Random(options.seed * 100 + place)
            soaks.append(Soak(script, command_of(script, folder), folder, generator))
        # The scripts take turns, until the kills are done and each has had its turn.
        for soak in itertools.cycle(soaks):
            if soak.runs and sum(sum(other.kills.values()) for other in soaks) >= options.kills:
                break
            soak.round()
            print(*soak.report(), *soak.failures[-1:], sep="\n", flush=True)
    minutes = (time.monotonic() - began) / 60
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "transformers"))
    only = f" --only {' '.join(options.only)}" if len(options.only) < len(SCRIPTS) else ""
    lines = [
        f"`python benchmarks/soak.py --kills {options.kills} --seed {options.seed}{only}` took {minutes:.0f} minutes "
        f"on {os.cpu_count()} CPU cores ({platform.machine()}, Python {platform.python_version()}, {versions}); "
        f"{RANKS} ranks each.",
        "",
        "| script | runs | kills (SIGKILL) | while a checkpoint was being written | slowest process gone after | "
        "runs that ended bit for bit as the undisturbed one |",
        "|---|---|---|---|---|---|",
        *[line for soak in soaks for line in soak.report()],
        "",
        f"{sum(sum(soak.kills.values()) for soak in soaks)} kills, "
        f"{sum(soak.moments['while a checkpoint was written'] for soak in soaks)} of them while a checkpoint was being "
        f"written; {sum(soak.runs - len(soak.failures) for soak in soaks)} of {sum(soak.runs for soak in soaks)} runs "
        "ended as the undisturbed one.",
        "",
        f"{growth['syncs']:.0f} weight syncs: the process grows by {growth['mb_per_sync']:.3f} MB a sync (limit 0.1), "
        f"one sync takes {growth['seconds_per_sync'] * 1000:.0f} ms.",
    ]
    failures = [f"FAILED {soak.name}: {failure}" for soak in soaks for failure in soak.failures]
    print("", *lines, *failures, sep="\n")
    if options.out:
        options.out.write_text("\n".join([*lines, *failures]) + "\n")
    return int(bool(failures) or growth["mb_per_sync"] > 0.1)


if __name__ == "__main__":
    sys.exit(main())
