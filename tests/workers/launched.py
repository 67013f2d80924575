"""Started by tests/test_reliability.py under torchrun: what `common.launch` makes of errors, kills and hangs.

A loop of the phases of a step, each with a collective, as in the scripts but without a model. In step 2 one rank fails.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from common import launch
from common.device import get_device

PHASES = ("rollout", "rewards", "update", "sync")


@dataclass
class Args:
    fault: Literal["none", "raise", "user error", "kill", "hang", "hang between phases"] = "none"
    phase: str = "update"
    rank: int = 1
    """Where it happens; -1: everywhere at once."""
    watchdog_s: float = 600.0
    steps: int = 1_000_000


def fail(fault: str) -> None:
    if fault == "raise":
        raise ValueError("a bug on one rank")
    if fault == "user error":
        raise launch.UserError("row 7 of x.parquet has no prompt")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(1000)


def main(args: Args) -> None:
    device = get_device()
    rank, _ = launch.init_distributed(device, timeout_s=args.watchdog_s)
    phases = launch.Phases(device, watchdog_s=args.watchdog_s)
    for step in range(1, args.steps + 1):
        phases.start_step()
        for phase in PHASES:
            with phases(phase):
                if step == 2 and phase == args.phase and args.rank in (rank, -1):
                    fail(args.fault)
                if phase != "rewards":  # the one phase in which ranks do not need each other
                    dist.all_reduce(torch.ones(1))
                if phase == "rollout":
                    time.sleep(0.1)
        if step == 2 and args.fault == "hang between phases" and rank == args.rank:
            time.sleep(1000)
        if rank == 0:
            sys.stdout.write(f"step {step}\n")  # in one write: print's second one may come after another rank's line
        if launch.stop_requested(device):
            if rank == 0:
                sys.stdout.write(f"saved at step {step}\n")
            break


if __name__ == "__main__":
    launch.launch(main, Args)
