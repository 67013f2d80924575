"""What surrounds a script: its process group, its errors, its signals, and the clock of its phases.

`launch(main, Args)` is the last line of every script. It parses the command line once, runs `main`, and turns
what can happen to a run into an exit code:

    0    done; also after a SIGTERM, once the step in hand is finished and saved
    1    an exception: the traceback is shown with its rank, and torchrun ends the other ranks
    2    the user's input is wrong: one line says what and how to mend it
    130  Ctrl-C
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common.device import GIB, Device

CTRL_C_GRACE_S = 5.0
"""A rank that waits inside a collective cannot run Python's own handler: it is ended after this many seconds."""


class UserError(Exception):
    """The user's input is wrong. The message is one line: what is wrong, where, and the cure."""


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def init_distributed(device: Device, *, timeout_s: float = 1800.0) -> tuple[int, int]:
    """Join torchrun's process group, or make one of a single process when started with plain `python`.

    Returns (rank, world_size). `timeout_s` bounds every collective: a rank that waits longer raises.
    """
    device.set_current()
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(device.backend, timeout=timeout)
    else:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return dist.get_rank(), dist.get_world_size()


def require(condition: bool, message: str) -> None:
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)


def json_object(text: str, *, flag: str) -> dict[str, Any]:
    """The JSON object given as the value of a flag."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    require(isinstance(value, dict), f"{flag} {text!r} is not a JSON object, such as '{{\"enable_thinking\": false}}'")
    return value


def all_reduce_sums(sums: dict[str, torch.Tensor | float], device: Device) -> dict[str, float]:
    """Sum every value over all ranks, in one collective and one copy to the host. Ranks must have the same keys."""
    values = [torch.as_tensor(value, dtype=torch.float64).to(device.torch_device) for value in sums.values()]
    total = torch.stack(values)
    dist.all_reduce(total)
    return dict(zip(sums, total.tolist(), strict=True))


def all_reduce_means(*parts: tuple[dict[str, torch.Tensor | float], float], device: Device) -> dict[str, float]:
    """Means over all ranks, in one collective. Each part is (sums, count): its sums are divided by its summed count."""
    sums = {name: value for part, _ in parts for name, value in part.items()}
    totals = all_reduce_sums(sums | {f"count {i}": count for i, (_, count) in enumerate(parts)}, device)
    return {name: totals[name] / max(totals[f"count {i}"], 1.0) for i, (part, _) in enumerate(parts) for name in part}


# -- signals ----------------------------------------------------------------------------------------------------------

_signals_seen: list[int] = []


def stop_requested(device: Device) -> bool:
    """Whether any rank was told to stop (SIGTERM: Slurm, preemption). A collective: call it on every rank."""
    flag = torch.tensor([float(signal.SIGTERM in _signals_seen)], device=device.torch_device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _watch_signals() -> None:
    """SIGTERM asks for a stop after the current step; Ctrl-C stops at once; any second signal ends the process.

    The watching thread reads the signals from a pipe, so it also hears them while the main thread waits in C++.
    """

    def handler(number: int, _frame: Any) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    def watch(read_fd: int) -> None:
        while data := os.read(read_fd, 1):
            _signals_seen.append(data[0])
            if data[0] not in (signal.SIGTERM, signal.SIGINT):
                continue
            if len(_signals_seen) > 1:
                os._exit(128 + data[0])
            if data[0] == signal.SIGINT:
                threading.Timer(CTRL_C_GRACE_S, os._exit, args=(130,)).start()
            elif rank() == 0:
                print("SIGTERM: saving after this step, then stopping. A second one stops at once.", flush=True)

    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    threading.Thread(target=watch, args=(read_fd,), daemon=True, name="signals").start()


# -- phases -----------------------------------------------------------------------------------------------------------


class Phases:
    """Times the phases of a step, and names the phase that is stuck.

    with phases("rollout"):
        ...
    phases.seconds  # {"rollout": 1.2}, summed since start_step()

    A phase longer than `watchdog_s` seconds ends the process with exit code 1 after printing the phase, the rank and
    every thread's stack, so that a deadlock never burns a night of accelerator time.
    """

    def __init__(self, device: Device, *, watchdog_s: float) -> None:
        self.device = device
        self.watchdog_s = watchdog_s
        self.seconds: dict[str, float] = {}
        self._step_start = time.perf_counter()
        self._current: tuple[str, float] | None = None
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._current = (name, start)
        yield
        self.device.synchronize()
        self._current = None
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def start_step(self) -> None:
        """Start the clock of a step."""
        self.seconds = {}
        self._step_start = time.perf_counter()

    def metrics(self, *, tokens: float) -> dict[str, float]:
        """time/<phase> and time/step in seconds, tokens per second of the whole step, peak memory in GiB."""
        seconds = time.perf_counter() - self._step_start
        return {f"time/{name}": value for name, value in self.seconds.items()} | {
            "time/step": seconds,
            "perf/tokens_per_s": tokens / seconds,
            "perf/peak_memory_gib": self.device.peak_memory() / GIB,
        }

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self.watchdog_s / 4))
            current = self._current
            if current is not None and time.perf_counter() - current[1] > self.watchdog_s:
                print(
                    f"[rank {rank()}] stuck: phase '{current[0]}' has run for more than {self.watchdog_s:.0f} s "
                    "(--watchdog-s). The stacks of all threads follow.",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=sys.stderr)
                os._exit(1)


# -- the entry point --------------------------------------------------------------------------------------------------


def launch(main: Callable[[Any], None], args_class: type) -> None:
    """Parse the command line into `args_class`, run `main(args)` and exit with the code listed above."""
    # Only one rank talks: eight copies of a usage message help nobody.
    args = tyro.cli(args_class, console_outputs=rank() == 0)
    _watch_signals()
    try:
        main(args)
        code = 0
    except UserError as error:
        code = 2
        if rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        get_error_handler().record_exception(error)  # torchrun repeats the message in its report
    except KeyboardInterrupt:
        code = 130
        if rank() == 0:
            print("interrupted", file=sys.stderr, flush=True)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        print(f"[rank {rank()}] {traceback.format_exc()}", file=sys.stderr, flush=True)
        get_error_handler().record_exception(error)
    _leave(code)


def _leave(code: int) -> None:
    """End the process without the tear-down that the engine hooks into the interpreter's exit.

    vLLM's finaliser destroys the default process group, whoever made it, and prints a traceback when it is gone
    already. At this point files are written and trackers closed, so there is nothing left for it to do.
    """
    if code == 0 and dist.is_initialized():
        dist.barrier()  # no rank closes its sockets while another one still talks to it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
