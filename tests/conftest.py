"""What several test files share: where things are, how to start a script, and small models."""

import functools
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from workers import forked

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "assets" / "tiny-arith"

sys.path.insert(0, str(ROOT))  # `from algos import grpo`: the scripts are no package, but importable as a namespace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes come first: they take longest, and two workers should end at the same time."""
    items.sort(key=lambda item: not (hasattr(item.module, "run_script") or hasattr(item.module, "torchrun_command")))


def environment(**extra: str) -> dict[str, str]:
    """One thread a rank: two ranks with two threads each starve each other on two cores."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    # The workers in tests/workers import the scripts, which are no installed package.
    fixed = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return clean | fixed | extra


def torchrun_command(script: str | Path, *args: object, nproc: int = 1) -> list[str]:
    """The command line that a user would type; --standalone picks a free port, so runs beside each other are safe."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
    return [*launcher, str(ROOT / script), *map(str, args)]


def run_script(
    script: str | Path, *args: object, nproc: int = 1, timeout: float = 180, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """Run a script under torchrun and return its outcome, output included."""
    command = torchrun_command(script, *args, nproc=nproc)
    return subprocess.run(
        command, env=environment(), cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False
    )


@functools.cache
def fork_context() -> multiprocessing.context.ForkServerContext:
    """Processes from it begin with everything imported: a rank is there in a moment and not after ten seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workers.imported"])
    kept = dict(os.environ)
    os.environ.update(environment(PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}"))
    multiprocessing.forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(kept)
    return context


def run_forked(
    script: str | Path, *args: object, nproc: int = 1, timeout: float = 180, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """As `run_script`, without torchrun: for what is no test of how ranks are started and stopped.

    The ranks are processes with torchrun's environment variables. When one fails, the others are killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    variables |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder) / "stdout", Path(folder) / "stderr"
        for path in outputs:
            path.touch()
        ranks = []
        for rank in range(nproc):
            own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            what = (ROOT / script, list(map(str, args)), own, cwd or Path.cwd(), *outputs)
            ranks.append(fork_context().Process(target=forked.run, args=what))
            ranks[-1].start()
        began = time.monotonic()
        while any(rank.is_alive() for rank in ranks):
            multiprocessing.connection.wait([rank.sentinel for rank in ranks if rank.is_alive()], timeout=1.0)
            is_late = time.monotonic() - began > timeout
            if is_late or any(rank.exitcode for rank in ranks):
                for rank in ranks:
                    rank.kill()
        code = next((rank.exitcode for rank in ranks if rank.exitcode not in (0, -9)), ranks[0].exitcode)
        return subprocess.CompletedProcess([str(script), *map(str, args)], code, *(p.read_text() for p in outputs))


def succeeded(run: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """Assert exit code 0, showing the end of the output otherwise."""
    assert run.returncode == 0, f"{run.args}\n{run.stdout[-3000:]}\n{run.stderr[-6000:]}"
    return run


def metrics_of(run_dir: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl without what depends on the clock or the machine."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def samples_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY / "model")


def random_model(folder: Path, *, tied: bool) -> Path:
    """Write a model of random weights, shaped like the embedded one and with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(TINY / "model")
    config.tie_word_embeddings = tied
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "model").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("tied"), tied=True)
