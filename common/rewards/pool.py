"""Worker processes with a wall limit: a task that takes too long costs its process, which is replaced."""

import contextlib
import json
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_LIMIT_S = 120.0
"""A worker that is not ready by then counts as broken; importing a user's libraries may take a while."""
ROOT = Path(__file__).resolve().parents[2]
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-workers")
"""Workers ask the kernel to end with their parent, which is the thread that started them: this one stays."""


@dataclass
class Outcome:
    """What became of one task: a `value`, or an `error` message, which for a time-out says so."""

    value: Any = None
    error: str | None = None
    timed_out: bool = False


class WorkerFailed(Exception):
    """The worker cannot start: the message is what it said, file and line first."""


class Worker:
    """One scoring process and what it is doing."""

    def __init__(self, spec: str | None) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "common.rewards.worker", *([spec] if spec else [])]
        self.process = _spawner.submit(
            subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
        ).result()
        self.ready = False
        self.batched = False
        self.task: int | None = None
        self.deadline = time.monotonic() + START_LIMIT_S
        self._buffer = b""

    def submit(self, task: int, arguments: tuple, timeout_s: float) -> None:
        self.task = task
        self.deadline = time.monotonic() + timeout_s
        data = memoryview(pickle.dumps(arguments))
        with contextlib.suppress(BrokenPipeError):  # it died: the end of its output says so next
            while data:
                data = data[self.process.stdin.write(data) :]

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None when the process has ended."""
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> int:
        """End the process; returns its exit code."""
        self.process.kill()
        code = self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        return code


class WorkerPool:
    """Processes that score, started once and reused; a stuck or dead one is replaced.

    spec: the user's function, "path.py:name"; None for Math-Verify.
    """

    def __init__(self, spec: str | None = None, *, num_workers: int = 1) -> None:
        self.spec = spec
        self.num_workers = num_workers
        self.workers: list[Worker] = []
        self.batched = False

    def start(self) -> None:
        """Start the missing processes and wait until one is ready.

        Raises:
            WorkerFailed: the function cannot be loaded.
        """
        self.run([], timeout_s=0.0, wait_until_ready=True)

    def run(self, tasks: Sequence[tuple], *, timeout_s: float, wait_until_ready: bool = False) -> list[Outcome]:
        """Run every task (a tuple of arguments), each for at most `timeout_s` seconds of wall time.

        Raises:
            WorkerFailed: the function cannot be loaded.
        """
        if not tasks and not wait_until_ready:
            return []
        outcomes: list[Outcome | None] = [None] * len(tasks)
        waiting = deque(range(len(tasks)))
        while True:
            self._top_up()
            for worker in self.workers:
                if worker.ready and worker.task is None and waiting:
                    task = waiting.popleft()
                    worker.submit(task, tasks[task], timeout_s)
            someone_ready = any(worker.ready for worker in self.workers)
            if all(outcome is not None for outcome in outcomes) and (someone_ready or not wait_until_ready):
                return outcomes
            self._listen(outcomes)

    def _listen(self, outcomes: list[Outcome | None]) -> None:
        """Wait for messages or the next deadline, and record what they decide."""
        busy = [worker for worker in self.workers if not worker.ready or worker.task is not None]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            wait = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
            for key, _ in selector.select(wait):
                self._receive(key.data, outcomes)
        now = time.monotonic()
        for worker in [worker for worker in busy if worker in self.workers and now >= worker.deadline]:
            if not worker.ready:
                self._drop(worker)
                raise WorkerFailed(f"a scoring process was not ready after {START_LIMIT_S:.0f} s")
            if worker.task is not None:
                outcomes[worker.task] = Outcome(error="took too long", timed_out=True)
                self._drop(worker)

    def _receive(self, worker: Worker, outcomes: list[Outcome | None]) -> None:
        messages = worker.read()
        if messages is None:
            code = self._drop(worker)
            if not worker.ready:
                raise WorkerFailed(f"the scoring process ended with code {code} while it started")
            outcomes[worker.task] = Outcome(error=f"the scoring process ended with code {code}")
            return
        for message in messages:
            if "failed" in message:
                self._drop(worker)
                raise WorkerFailed(message["failed"])
            if "ready" in message:
                worker.ready, self.batched = True, message["batched"]
                continue
            value = message.get("value", message.get("batch"))
            outcomes[worker.task] = Outcome(value=value, error=message.get("error"))
            worker.task = None

    def _top_up(self) -> None:
        """Replace missing processes; the new ones start while others work, or while the trainer trains."""
        while len(self.workers) < self.num_workers:
            self.workers.append(Worker(self.spec))

    def _drop(self, worker: Worker) -> int:
        self.workers.remove(worker)
        return worker.kill()

    def close(self) -> None:
        while self.workers:
            self._drop(self.workers[0])
