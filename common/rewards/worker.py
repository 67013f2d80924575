"""A process that scores what could hang or crash: Math-Verify, and functions that users bring.

Started by common/rewards/pool.py as `python -m common.rewards.worker [path.py:name]`, as a program of its own and not
a fork: the trainer holds an engine, threads and device memory that must not be copied. Tasks come pickled on standard
input (from our own process), results go back as one line of JSON each. Everything the user's code prints is sent to
standard error, so that it cannot break the protocol.
"""

import asyncio
import ctypes
import importlib.util
import inspect
import json
import logging
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from common.rewards.boxed import verify
from common.rewards.results import plain_result, where

MEMORY_LIMIT = 4 * 2**30
"""Bytes of address space for Math-Verify: a power tower runs out of this instead of the machine's memory."""
PR_SET_PDEATHSIG = 1
NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED_NAMES = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of the Python file `path`, which may import the modules beside it."""
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up there
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise TypeError(f"'{name}' is not a function, it is {function!r:.80}")
    return function


def by_keyword(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """(`function` as it is called with the four values in order, whether it takes lists of them).

    With verl's parameter names it gets by name what it asks for; with others, all four in order. It takes lists when
    its parameters have the plural names.
    """
    parameters = inspect.signature(function).parameters
    batched = "solution_strs" in parameters
    names = BATCHED_NAMES if batched else NAMES
    if names[1] not in parameters:
        return function, False
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def call(*values: Any) -> Any:
        return function(**{name: value for name, value in zip(names, values) if takes_all or name in parameters})

    return call, batched


def _batch_results(results: Any, count: int) -> list[dict[str, Any]]:
    """One {"value"} or {"error"} for each response of a batched call."""
    results = list(results)
    if len(results) != count:
        raise ValueError(f"the batched function returned {len(results)} scores for {count} responses")
    outcomes = []
    for result in results:
        try:
            outcomes.append({"value": plain_result(result)})
        except (TypeError, ValueError) as error:
            outcomes.append({"error": f"{type(error).__name__}: {error}"})
    return outcomes


def _die_with_parent() -> None:
    """Have the kernel end this process with the trainer, even when it is stuck in a computation by then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the trainer's whole group; the trainer decides
        signal.signal(number, signal.SIG_IGN)


def prepare_math_verify() -> Callable[[str, str], float]:
    """`boxed.verify`, with SymPy imported and the grammar's tables built before the clock of a task runs."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that timeouts are off: the pool has its own
    for answer, gold in ((r"\frac{1}{2}", "x^2"), (r"(1, \sqrt{2})", "[1,2]"), ("x=1+y", r"\{1,2\}"), ("1+x", "x+1")):
        verify(answer, gold)
    return verify


def main() -> None:
    _die_with_parent()
    # The pipes to the trainer are kept where the user's code cannot read or write by accident.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    tasks = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def send(message: dict[str, Any]) -> None:
        results.write(json.dumps(message) + "\n")
        results.flush()

    path = name = None
    if len(sys.argv) > 1:
        path, _, name = sys.argv[1].rpartition(":")
    try:
        if path:
            function, batched = by_keyword(load_function(path, name))
        else:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
            function = prepare_math_verify()
            batched = False
    except BaseException as error:  # the file is the user's: it may even exit
        send({"failed": where(error, path)})
        return
    send({"ready": True, "batched": batched})
    while True:
        try:
            arguments = pickle.load(tasks)
        except EOFError:
            return
        try:
            result = function(*arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(result)
            if batched:
                send({"batch": _batch_results(result, len(arguments[1]))})
            else:
                send({"value": plain_result(result)})
        except (Exception, SystemExit) as error:  # the trainer decides what a failure means
            send({"error": where(error, path)})


if __name__ == "__main__":
    main()
