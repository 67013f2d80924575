"""Where a run's numbers go: the console, metrics.jsonl, samples.jsonl, Weights & Biases, curve.png.

A run has one folder, runs/<script>-<time>-<seed>/:

    args.json       every argument, secrets blanked out
    versions.json   Python, packages, git commit
    <script>.py     the script as it was when the run started
    metrics.jsonl   one line a step with every metric, {"step": 3, "time/elapsed_s": 4.2, ...}, and one an evaluation
    samples.jsonl   prompts, responses and rewards
    curve.png       written by `Tracker.plot`
    summary.json    written by `Tracker.summary`

Only rank 0 writes; on the other ranks every method but the constructor does nothing.
"""

import dataclasses
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.launch import UserError

HEADER_EVERY = 20  # console rows between two headers
LINE_WIDTH = 100  # columns of the narrowest terminal that a row must fit in
REDACTED = "<redacted>"

# Names of arguments whose values are never written down, by whole word: "hf_token" is secret, "tokenizer" is not.
_SECRET_WORDS = {"token", "secret", "password", "passwd", "credential", "credentials", "key", "apikey", "auth"}
# Values that are secret whatever the argument is called: well-known token prefixes, a password inside a URL.
_SECRET_VALUE = re.compile(r"^(hf_|sk-|ghp_|github_pat_|glpat-|xox[bp]-|wandb_v\d|AKIA)\w{8,}|://[^/\s:@]+:[^/\s@]+@")


def redact(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the values of secret ones replaced, nested dicts and lists included."""

    def clean(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return redact(value)
        if isinstance(value, (list, tuple)):
            return [clean(name, item) for item in value]
        if not isinstance(value, str) or not value:
            return value if isinstance(value, (bool, int, float, type(None))) else str(value)
        secret_name = not _SECRET_WORDS.isdisjoint(re.split(r"[_\-. ]", name.lower()))
        return REDACTED if secret_name or _SECRET_VALUE.search(value) else value

    return {str(name): clean(str(name), value) for name, value in args.items()}


def versions(script: str) -> dict[str, Any]:
    """Versions of what the run depends on, and the git commit of the script's repository (None outside of one)."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    # By the start of their names, because the engine and the device plug-ins are called differently on each device.
    for package in importlib.metadata.distributions():
        if package.name and package.name.startswith(("torch", "vllm", "transformers", "tokenizers", "numpy", "flash")):
            found[package.name] = package.version
    folder = str(Path(script).resolve().parent)
    commit = _git(folder, "rev-parse", "HEAD")
    found["git_commit"] = commit
    found["git_dirty"] = bool(_git(folder, "status", "--porcelain", "--untracked-files=no")) if commit else None
    return found


def _git(folder: str, *command: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def format_duration(seconds: float) -> str:
    """Seconds as m:ss below an hour, else h:mm:ss."""
    seconds = max(0, round(seconds))
    hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of the console table: which metric, its short heading, how its number is written."""

    key: str  # name of the metric; a step that lacks it shows "-"
    header: str
    format: str = ".3f"  # format spec of Python, such as ".3f", ",.0f" or ".1%"

    @property
    def width(self) -> int:
        """Characters of the column: room for its heading and for a number of usual size."""
        return max(len(self.header), 7)

    def cell(self, metrics: Mapping[str, float]) -> str:
        value = metrics.get(self.key)
        if value is None:
            return "-"
        return format(value, self.format) if math.isfinite(value) else str(value)


RL_COLUMNS = [
    Column("reward", "reward"),
    Column("accuracy", "acc"),
    Column("response_length", "length", ".1f"),
    Column("entropy", "entropy"),
    Column("mismatch_abs", "mismatch", ".1e"),
    Column("grad_norm", "grad", ".2f"),
    Column("perf/tokens_per_s", "tok/s", ",.0f"),
    Column("time/step", "s/step", ".1f"),
]
"""The console of the scripts that sample."""

RL_CURVES = {
    "accuracy": ["accuracy", "eval/accuracy"],
    "response length (tokens)": ["response_length", "eval/response_length"],
}
"""The panels of their picture."""

PAIR_COLUMNS = [
    Column("iteration", "iter", ".0f"),
    Column("loss", "loss", ".4f"),
    Column("pair_accuracy", "pairacc"),
    Column("margin", "margin"),
    Column("response_length", "length", ".1f"),
    Column("mismatch_abs", "mismatch", ".1e"),
    Column("grad_norm", "grad", ".2f"),
    Column("time/step", "s/step", ".1f"),
]
"""The console of a script that samples one side of its pairs."""

PAIR_CURVES = RL_CURVES | {"loss": ["loss"]}
"""The panels of its picture."""


class Tracker:
    """Writes down what happens in a run.

    args: the script's dataclass of arguments; `args.seed`, where there is one, becomes part of the folder's name.
    script: path of the running script (`__file__`).
    total_steps: the step after which the run ends; gives the time left.
    columns: console columns between "step" and "left". They must fit into 100 characters.
    run_dir: the run's folder; None makes runs/<script>-<time>-<seed> in the working directory.
    resume: the folder belongs to a run that goes on (call `resume(step)` before the first `log`). Without it a folder
        that already holds metrics is refused, so that two runs never mix.
    wandb_project: log to Weights & Biases too (WANDB_MODE=offline needs no network); None does not.

    The constructor is collective: with a process group all ranks must call it, and all learn the same `run_dir`.
    Raises UserError, on all ranks, when the folder cannot be made or is already taken.
    """

    def __init__(
        self,
        args: Any,
        *,
        script: str,
        rank: int,
        total_steps: int,
        columns: Sequence[Column],
        run_dir: str | Path | None = None,
        resume: bool = False,
        wandb_project: str | None = None,
    ) -> None:
        self.rank = rank
        self.total_steps = total_steps
        self.columns = list(columns)
        width = len(self._row("step", [column.header for column in self.columns], "left"))
        if width > LINE_WIDTH:
            raise ValueError(f"the console columns need {width} characters, a row has {LINE_WIDTH}")
        self._wandb = None
        self._rows_printed = 0
        self._start = time.monotonic()
        self._ticks: list[tuple[float, int]] = []  # (time, step) of the last rows, for the time left

        outcome: tuple[str | None, str | None] = (None, None)  # run_dir, error
        if rank == 0:
            try:
                outcome = (str(self._make_folder(args, script, run_dir, resume)), None)
            except (OSError, UserError) as error:
                outcome = (None, str(error))
        if dist.is_available() and dist.is_initialized():
            box = [outcome]
            dist.broadcast_object_list(box, src=0)
            outcome = box[0]
        folder, error = outcome
        if error is not None:
            raise UserError(error)
        self.run_dir = Path(folder)
        if rank == 0:
            self._metrics = open(self.run_dir / "metrics.jsonl", "a", encoding="utf-8")
            self._samples = open(self.run_dir / "samples.jsonl", "a", encoding="utf-8")
            if wandb_project:
                self._start_wandb(wandb_project, redact(_as_dict(args)))
            self._print(f"run folder: {self.run_dir}")

    # ---- the folder

    def _make_folder(self, args: Any, script: str, run_dir: str | Path | None, resume: bool) -> Path:
        values = _as_dict(args)
        if run_dir is None:
            if resume:
                raise UserError("resuming needs the folder of the run that goes on (run_dir)")
            name = f"{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{values.get('seed', 0)}"
            folder = self._make_new(Path("runs"), name)
        else:
            folder = Path(run_dir)
            if not resume and (folder / "metrics.jsonl").exists():
                raise UserError(f"run folder {folder}: it already holds a run; resume it or name another folder")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"run folder {folder}: cannot be made ({error.strerror})") from error
        self._lock_folder(folder)
        # A resumed run keeps the papers of its start and adds its own beside them.
        suffix, number = "", 1
        while (folder / f"args{suffix}.json").exists():
            suffix, number = f".resume{number}", number + 1
        try:
            _write_json(folder / f"args{suffix}.json", redact(values))
            _write_json(folder / f"versions{suffix}.json", versions(script))
            shutil.copyfile(script, folder / f"{Path(script).stem}{suffix}.py")
        except OSError as error:
            raise UserError(f"run folder {folder}: cannot be written ({error.strerror})") from error
        return folder

    def _lock_folder(self, folder: Path) -> None:
        """Refuse a folder that another living process writes into. The lock goes with the process, however it ends."""
        self._lock = open(folder / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"run folder {folder}: another process is writing into it; end that one first") from error
        except OSError:
            pass  # a file system without locks

    @staticmethod
    def _make_new(parent: Path, name: str) -> Path:
        """Make parent/name, or parent/name-2, ... where a run that started in the same second was faster."""
        for number in range(1, 1000):
            folder = parent / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError as error:
                if not folder.is_dir():
                    raise UserError(f"run folder {folder}: cannot be made ({error.strerror})") from error
            except OSError as error:
                raise UserError(f"run folder {folder}: cannot be made ({error.strerror})") from error
        raise UserError(f"run folder {parent / name}: no free name")

    def resume(self, step: int) -> None:
        """Forget what was logged after `step`, so that the files go on like those of an uninterrupted run."""
        if self.rank != 0:
            return
        self._metrics.close()
        self._samples.close()
        last = _truncate(self.run_dir / "metrics.jsonl", step)
        _truncate(self.run_dir / "samples.jsonl", step)
        self._start = time.monotonic() - last.get("time/elapsed_s", 0.0)
        self._metrics = open(self.run_dir / "metrics.jsonl", "a", encoding="utf-8")
        self._samples = open(self.run_dir / "samples.jsonl", "a", encoding="utf-8")
        self._print(f"resumed after step {step}")

    # ---- logging

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One training step: a line in metrics.jsonl, a point in W&B, one row on the console."""
        if self.rank != 0:
            return
        row = self._write_metrics(step, metrics)
        now = time.monotonic()
        self._ticks = [*self._ticks[-20:], (now, step)]
        cells = [column.cell(row) for column in self.columns]
        self._print_row(f"{step}/{self.total_steps}", cells, self._time_left(step))

    def log_eval(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One evaluation: a line of its own in metrics.jsonl, a point in W&B, one line on the console."""
        if self.rank != 0:
            return
        row = self._write_metrics(step, metrics)
        shown = [f"{key.removeprefix('eval/')} {value:.4g}" for key, value in row.items() if _is_shown(key, value)]
        self._print(self._bold("  eval   ") + "   ".join(shown))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append prompts, responses, rewards (any JSON-able columns) to samples.jsonl."""
        if self.rank != 0:
            return
        for row in rows:
            self._samples.write(json.dumps({"step": step, **row}, ensure_ascii=False, default=str) + "\n")
        self._samples.flush()

    def note(self, text: str) -> None:
        """A line for the reader of the console, between the rows (rank 0 only)."""
        if self.rank == 0:
            self._print(text)

    def _write_metrics(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        row = {key: float(value) for key, value in metrics.items()}
        row.setdefault("time/elapsed_s", round(time.monotonic() - self._start, 3))
        # JSON has no NaN or infinity: such a metric keeps its key and gets null.
        line = {key: value if math.isfinite(value) else None for key, value in row.items()}
        self._metrics.write(json.dumps({"step": step, **line}) + "\n")
        self._metrics.flush()
        if self._wandb is not None:
            # "step" is a metric of its own (see _start_wandb): W&B drops rows whose built-in step goes backwards.
            self._wandb.log({"step": step, **row})
        return row

    # ---- console

    def _row(self, step: str, cells: Sequence[str], left: str) -> str:
        step_width = max(4, 2 * len(str(self.total_steps)) + 1)
        parts = [step.rjust(step_width)]
        parts += [cell.rjust(column.width) for cell, column in zip(cells, self.columns, strict=True)]
        return "  ".join([*parts, left.rjust(7)])

    def _print_row(self, step: str, cells: Sequence[str], left: str) -> None:
        if self._rows_printed % HEADER_EVERY == 0:
            self._print(self._bold(self._row("step", [column.header for column in self.columns], "left")))
        self._rows_printed += 1
        self._print(self._row(step, cells, left))

    def _time_left(self, step: int) -> str:
        (first_time, first_step), (last_time, last_step) = self._ticks[0], self._ticks[-1]
        if last_step == first_step:  # the first row: no step's duration is known yet
            return "-"
        return format_duration((last_time - first_time) / (last_step - first_step) * (self.total_steps - step))

    @staticmethod
    def _print(text: str) -> None:
        print(text, flush=True)

    @staticmethod
    def _bold(text: str) -> str:
        """Bold in a terminal, plain in a log file."""
        styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        return f"\033[1m{text}\033[0m" if styled else text

    # ---- Weights & Biases

    def _start_wandb(self, project: str, config: dict[str, Any]) -> None:
        import wandb  # only a run that asks for it pays for the import

        id_file = self.run_dir / "wandb_id.txt"
        self._wandb = wandb.init(
            project=project,
            id=id_file.read_text() if id_file.exists() else None,  # None: a new run
            resume="allow",
            name=self.run_dir.name,
            dir=str(self.run_dir),
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
        )
        id_file.write_text(self._wandb.id)
        self._wandb.define_metric("step")
        self._wandb.define_metric("*", step_metric="step")
        offline = f"offline; upload later with: wandb sync {self.run_dir}/wandb/offline-run-*"
        self._print(f"wandb: {offline if self._wandb.offline else self._wandb.url}")

    # ---- the end

    def plot(self, panels: Mapping[str, Sequence[str]], title: str = "") -> Path | None:
        """Draw curve.png from metrics.jsonl and return its path (None on other ranks).

        panels: label of the y axis -> metrics to draw in that panel, for example
            {"accuracy": ["train/accuracy", "eval/accuracy"], "response length (tokens)": ["response/length"]}
        Metrics that start with "eval/" are drawn as dots, the others as a thin line with its running mean.
        """
        if self.rank != 0:
            return None
        path = self.run_dir / "curve.png"
        draw_curve(read_metrics(self.run_dir / "metrics.jsonl"), panels, path, title or self.run_dir.name)
        return path

    def summary(self, lines: Mapping[str, Any]) -> None:
        """Print the run's outcome as an aligned list and keep it in summary.json."""
        if self.rank != 0:
            return
        _write_json(self.run_dir / "summary.json", {key: _json_safe(value) for key, value in lines.items()})
        width = max(len(key) for key in lines)
        self._print("")
        for key, value in lines.items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            self._print(f"  {key.ljust(width)}   {shown}")
        self._print("")
        if self._wandb is not None:
            self._wandb.summary.update({key: _json_safe(value) for key, value in lines.items()})

    def conclude(self, step: int, *, panels: Mapping[str, Sequence[str]]) -> None:
        """The end of a run: the picture, the outcome (its first and its last evaluation) and `finish`."""
        if self.rank != 0:
            return
        lines: dict[str, Any] = {"steps": step}
        # From the file: a resumed run made its first evaluation, and perhaps its last one, before it was interrupted.
        rows = read_metrics(self.run_dir / "metrics.jsonl")
        evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
        for key, after in (evaluations[-1] if evaluations else {}).items():
            if key.startswith("eval/") and after is not None:
                before = evaluations[0].get(key)
                is_one = len(evaluations) == 1 or before is None
                lines[key.removeprefix("eval/")] = f"{after:.3f}" if is_one else f"{before:.3f} -> {after:.3f}"
        lines |= {"run folder": str(self.run_dir), "learning curve": str(self.plot(panels))}
        self.summary(lines)
        self.finish()

    def finish(self) -> None:
        """Close the files and end the W&B run."""
        if self.rank != 0:
            return
        for file in (self._metrics, self._samples, self._lock):
            file.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a kill cut in half is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def draw_curve(rows: Sequence[Mapping[str, Any]], panels: Mapping[str, Sequence[str]], path: Path, title: str) -> None:
    """One panel above the other over a shared step axis; see `Tracker.plot`."""
    import matplotlib

    matplotlib.use("Agg")  # draws into a file: no display needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(8, 2.6 * len(panels) + 0.6), layout="constrained"
    )
    figure.suptitle(title, fontsize=11)
    for axis, (label, keys), color in zip(axes[:, 0], panels.items(), ("#1f6feb", "#d1570a", "#2a7f3f", "#7a3fb0") * 9):
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if not points:
                continue
            steps, values = zip(*points)
            if key.startswith("eval/"):
                axis.plot(steps, values, "o-", color="black", markersize=5, linewidth=1, label=key, zorder=3)
            else:
                axis.plot(steps, values, color=color, alpha=0.3, linewidth=1)
                axis.plot(steps, _running_mean(values), color=color, linewidth=2, label=key)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=9)
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _running_mean(values: Sequence[float], half_window: int = 4) -> list[float]:
    """Mean over the points around each one; centred, so that the line does not lag behind what it shows."""
    means = []
    for index in range(len(values)):
        reach = min(half_window, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        means.append(sum(window) / len(window))
    return means


def _truncate(path: Path, step: int) -> dict[str, Any]:
    """Keep the lines up to and including `step`, atomically; returns the last one kept ({} when none)."""
    kept, last = [], {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut in half by a kill
        if row["step"] <= step:
            kept.append(line if line.endswith("\n") else line + "\n")
            last = row
    new = path.with_suffix(".tmp")
    new.write_text("".join(kept), encoding="utf-8")
    os.replace(new, path)
    return last


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _as_dict(args: Any) -> dict[str, Any]:
    return dataclasses.asdict(args) if dataclasses.is_dataclass(args) else dict(args)


def _json_safe(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _is_shown(key: str, value: float) -> bool:
    """Which metrics of an evaluation the console shows: not the clocks, not what is unknown."""
    return not key.startswith("time/") and not math.isnan(value)
