"""What surrounds a script: its process group, its errors, its signals, and the clock of its phases.

`launch(main, Args)` is the last line of every script. It parses the command line once, runs `main`, and turns
what can happen to a run into an exit code:

    0    done; also after a SIGTERM, once the step in hand is finished and saved
    1    an exception: the traceback is shown with its rank, and torchrun ends the other ranks
    2    the user's input is wrong: one line says what and how to mend it
    130  Ctrl-C

When one rank fails, the others fail too, because it does not answer them any more. The first one to fail says so in the
process group's store; whoever comes second says one line and waits for torchrun to end it. So torchrun's report, the
last thing on the screen, shows the error that came first.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro

from common.device import GIB, Device

CTRL_C_GRACE_S = 5.0
"""A rank that waits inside a collective cannot run Python's own handler: it is ended after this many seconds."""

SAME_REQUEST_S = 2.0
"""Two SIGTERMs within this time are one request: sent to a whole process group, it also comes again from torchrun."""

LEAVING_S = 20.0
"""How long a rank that failed after another one waits for torchrun to end it; then it leaves by itself."""

COLLECTIVE_MARGIN_S = 60.0
"""Collectives give up this much later than the watchdog, which knows better what is stuck."""


class UserError(Exception):
    """The user's input is wrong. The message is one line: what is wrong, where, and the cure."""


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def init_distributed(device: Device, *, timeout_s: float = 1800.0) -> tuple[int, int]:
    """Join torchrun's process group, or make one of a single process when started with plain `python`.

    Returns (rank, world_size). A rank that waits in a collective for a minute longer than `timeout_s` raises; before
    that, the watchdog of `Phases` with the same limit ends the rank that it waits for.
    """
    device.set_current()
    device.keep_freed_memory()
    timeout = timedelta(seconds=timeout_s + COLLECTIVE_MARGIN_S)
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


def merge_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """A scorer's metrics over all ranks: the sum of errors and time-outs, which are counts, the mean of the others.

    A collective. Ranks may have different keys: a function may return other numbers for other rows, none on failure.
    """
    everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, metrics)
    values = {name: [one[name] for one in everyone if name in one] for one in everyone for name in one}
    is_count = {name: name.endswith(("/errors", "/timeouts")) for name in values}
    return {name: sum(v) if is_count[name] else sum(v) / len(v) for name, v in values.items()}


# -- signals ----------------------------------------------------------------------------------------------------------

_signals_seen: list[int] = []
_is_leaving = threading.Event()


def stop_requested(device: Device) -> bool:
    """Whether any rank was told to stop (SIGTERM: Slurm, preemption). A collective: call it on every rank."""
    flag = torch.tensor([float(signal.SIGTERM in _signals_seen)], device=device.torch_device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _watch_signals() -> None:
    """SIGTERM asks for a stop after the current step; Ctrl-C stops at once; any second signal ends the process.

    torchrun sends a SIGTERM too, when another rank has failed: there is nothing to finish then. The watching thread
    reads the signals from a pipe, so it also hears them while the main thread waits in C++.
    """

    def handler(number: int, _frame: Any) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    def watch(read_fd: int) -> None:
        first_at = 0.0
        while data := os.read(read_fd, 1):
            if data[0] not in (signal.SIGTERM, signal.SIGINT):
                continue
            if data[0] == signal.SIGTERM and (_is_leaving.is_set() or _first_error() is not None):
                _tell_torchrun(f"[rank {rank()}] ended, because another rank failed")
                os._exit(1)
            is_repeated = _signals_seen == [signal.SIGTERM] and time.monotonic() - first_at < SAME_REQUEST_S
            if data[0] == signal.SIGTERM and is_repeated:
                continue
            _signals_seen.append(data[0])
            first_at = first_at or time.monotonic()
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


def _follow_launcher() -> None:
    """End with torchrun: a rank whose launcher was killed would train on, into the folder of the run that goes on."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher").start()


# -- whose error came first -------------------------------------------------------------------------------------------


def _store() -> dist.Store | None:
    """The key-value store of the process group; it lives in torchrun, so it outlives a rank. None without a group."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _first_error() -> str | None:
    """The error that came first on any rank, if there is one."""
    try:
        store = _store()
        return store.get("first_error").decode() if store is not None and store.check(["first_error"]) else None
    except Exception:  # the store is gone with torchrun: nobody knows of anybody
        return None


def _claim_first_error(text: str) -> str | None:
    """Tell all ranks that this rank has failed. None: nobody failed before it; otherwise the error that came first."""
    mine = f"[rank {rank()}] {text}"
    try:
        store = _store()
        first = mine if store is None else store.compare_set("first_error", "", mine).decode()
    except Exception:
        return None
    return None if first == mine else first


def _tell_torchrun(text: str) -> None:
    """Write the error file of this rank; torchrun shows what came first at the end of its report."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))


def _in_one_line(error: BaseException) -> str:
    """`Kind: message (file:line)`; the line is the deepest one that is not in an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _has_lost_a_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone: then the cause is there, not here."""
    is_lost = re.search(r"Connection (closed|reset)|Broken pipe|remote process exited|Socket", str(error))
    return isinstance(error, RuntimeError) and is_lost is not None


def _report(error: BaseException) -> None:
    """Show an error in full if it came first on any rank; otherwise say one line and wait for torchrun."""
    if _has_lost_a_rank(error):
        # A rank that was killed could not tell. torchrun knows of it within a second, and ends this one.
        _is_leaving.set()
        time.sleep(SAME_REQUEST_S)
    first = _claim_first_error(_in_one_line(error))
    if first is not None:
        _is_leaving.set()
        if not isinstance(error, UserError):  # all ranks raise the same one
            print(f"[rank {rank()}] stopped, because another rank failed: {first}", file=sys.stderr, flush=True)
        time.sleep(LEAVING_S)
    elif isinstance(error, UserError):
        if rank() == 0 or dist.is_initialized():
            print(f"error: {error}", file=sys.stderr, flush=True)
        _tell_torchrun(f"error: {error}")
    else:
        print(f"[rank {rank()}] {traceback.format_exc()}", file=sys.stderr, flush=True)
        _tell_torchrun(f"[rank {rank()}] {_in_one_line(error)}")


# -- phases -----------------------------------------------------------------------------------------------------------


class Phases:
    """Times the phases of a step, and names the phase that is stuck.

    with phases("rollout"):
        ...
    phases.seconds  # {"rollout": 1.2}, summed since start_step()

    A phase longer than `watchdog_s` seconds ends the process with exit code 1 after printing the phase, the rank and
    every thread's stack, so that a deadlock never burns a night of accelerator time. The time between two phases
    counts as a phase of its own. Of several ranks that are stuck those that are furthest behind are named: the others
    wait for them.
    """

    def __init__(self, device: Device, *, watchdog_s: float) -> None:
        self.device = device
        self.watchdog_s = watchdog_s
        self.seconds: dict[str, float] = {}
        self._step_start = time.perf_counter()
        self._count = 0  # phases begun
        self._current = ("start", time.perf_counter())
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._count, self._current = self._count + 1, (name, start)
        yield
        self.device.synchronize()
        self._current = (f"after {name}", time.perf_counter())
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
        while time.perf_counter() - self._current[1] < self.watchdog_s:
            time.sleep(min(1.0, self.watchdog_s / 4))
        name, behind = self._current[0], self._furthest_behind(self._count)
        if rank() in behind:
            who = f"rank {rank()}" if len(behind) == 1 else f"ranks {', '.join(map(str, behind))}"
            text = f"[{who}] stuck: phase '{name}' has run for more than {self.watchdog_s:g} s (--watchdog-s)"
            is_first = _claim_first_error(text) is None
            print(f"{text}. The stacks of rank {rank()} follow.", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=sys.stderr)
            time.sleep(1.0)  # other ranks that are no further show their stacks too
            if is_first:
                _tell_torchrun(text)
                os._exit(1)
        _is_leaving.set()
        time.sleep(LEAVING_S)
        os._exit(1)

    def _furthest_behind(self, count: int) -> list[int]:
        """The stuck ranks that have begun the fewest phases, `count` on this one. Waits for those that are late."""
        store = _store()
        if store is None or dist.get_world_size() == 1:
            return [rank()]
        store.set(f"stuck {rank()}", str(count))
        time.sleep(2 * min(1.0, self.watchdog_s / 4))
        stuck = [other for other in range(dist.get_world_size()) if store.check([f"stuck {other}"])]
        counts = {other: int(store.get(f"stuck {other}")) for other in stuck}
        return [other for other in stuck if counts[other] == min(counts.values())]


# -- the entry point --------------------------------------------------------------------------------------------------


def launch(main: Callable[[Any], None], args_class: type) -> None:
    """Parse the command line into `args_class`, run `main(args)` and exit with the code listed above."""
    # Only one rank talks: eight copies of a usage message help nobody.
    args = tyro.cli(args_class, console_outputs=rank() == 0)
    _watch_signals()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _follow_launcher()
    try:
        main(args)
        code = 0
    except KeyboardInterrupt:
        code = 130
        if rank() == 0:
            print("interrupted", file=sys.stderr, flush=True)
    except BaseException as error:
        is_exit = isinstance(error, SystemExit) and isinstance(error.code, int)
        code = 2 if isinstance(error, UserError) else error.code if is_exit else 1
        _report(error)
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
