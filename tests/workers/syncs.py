"""Started under torchrun: one engine for all ranks; says what it leaves in /dev/shm, and how much 200 syncs leak.

    syncs.py --out OUT.json --syncs 200 [--hold]

Rank 0 writes OUT. With --hold the process then waits for the end of its standard input, or to be killed.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the scripts are no installed package

from algos import grpo
from common import launch
from common.device import get_device


@dataclass
class Args:
    out: Path
    syncs: int = 0
    hold: bool = False


def resident_mb() -> float:
    """Memory of this process in MB."""
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) / 1024


def main(args: Args) -> None:
    device = get_device()
    rank, world_size = launch.init_distributed(device)
    settings = grpo.Args(
        dtype="fp32", max_prompt_length=64, max_response_length=24, rollout_tp=world_size, prompts_per_step=4
    )
    folder = Path(settings.model)
    model = grpo.shard_model(folder, settings, device, trainable=True)
    llm = grpo.build_engine(folder, settings, device)
    grpo.sync_weights(llm, model, device)
    results = {"shared_memory": sorted(path.name for path in Path("/dev/shm").iterdir())}
    warm_up, began, memory = args.syncs // 4, time.perf_counter(), resident_mb()
    for sync in range(args.syncs):
        if sync == warm_up:
            began, memory = time.perf_counter(), resident_mb()
        grpo.sync_weights(llm, model, device)
    if args.syncs:
        count = args.syncs - warm_up
        results["syncs"] = args.syncs
        results["mb_per_sync"] = (resident_mb() - memory) / count
        results["seconds_per_sync"] = (time.perf_counter() - began) / count
    dist.barrier()
    if rank == 0:
        args.out.write_text(json.dumps(results))
        print("ready", flush=True)
    if args.hold:
        sys.stdin.read()


if __name__ == "__main__":
    launch.launch(main, Args)
