"""A rank is killed (SIGKILL) before each file operation of a save; what was complete before must still be usable.

Two ranks save step 2 over gloo, into a folder with a complete step 1. `python tests/test_checkpoint_kills.py FOLDER`
does the work: it imports torch once and forks the ranks, which makes a case cost a fraction of a second.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

RANKS = 2
SURVIVOR_LIMIT_S = 30  # the other rank must notice within this time


def test_a_kill_at_any_file_operation_leaves_a_usable_checkpoint(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    found = {(case["rank"], case["latest"]) for case in cases}
    assert found == {(0, "step_1"), (0, "step_2"), (1, "step_1")}  # only rank 0 acts after the commit
    assert sum(case["rank"] == 0 for case in cases) >= 15
    assert sum(case["rank"] == 1 for case in cases) >= 3
    # Once the new step is the newest one, no later kill brings the old one back.
    for rank in range(RANKS):
        latest = [case["latest"] for case in cases if case["rank"] == rank]
        assert latest == sorted(latest)


# ---- what runs in the subprocess -------------------------------------------------------------------------------------


def make(step: int, distributed: bool) -> dict:
    """A module with an optimizer whose every number is `step`, sharded over the ranks."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if distributed:
        from torch.distributed.device_mesh import init_device_mesh

        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(step))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(parameter, step),
                "exp_avg_sq": torch.full_like(parameter, step),
            }
    return {"policy": (model, optimizer)}


def rank_main(rank: int, folder: Path, step: int, kill_rank: int, kill_at: int | None, count_file: Path | None) -> None:
    """Save `step`; die before file operation number `kill_at` of rank `kill_rank`, or count the operations."""
    import torch.distributed as dist

    from common.checkpoint import Checkpointer

    store = dist.FileStore(str(folder.with_suffix(".store")), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    modules = make(step, distributed=True)
    checkpointer = Checkpointer(folder, keep=1)
    operations = 0
    armed = True

    def before_operation() -> None:
        nonlocal operations
        if rank == kill_rank and operations == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        operations += 1

    def audit(event: str, arguments: tuple) -> None:
        acts = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if armed and acts and any(str(folder) in str(argument) for argument in arguments):
            before_operation()

    sys.addaudithook(audit)
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:  # no audit event tells of it
        before_operation()
        real_fsync(descriptor)

    os.fsync = fsync
    checkpointer.save(step, modules=modules, extra={"step": step}, rank_state={"rank": rank}, score=None)
    checkpointer.wait()
    armed = False
    if count_file is not None:
        count_file.write_text(str(operations))


def verify_main(folder: Path, result: Path) -> None:
    """One rank on its own reads what the kill left, checks every number, and saves step 2 again over it."""
    from common.checkpoint import Checkpointer

    checkpointer = Checkpointer(folder, keep=1)
    path = checkpointer.latest()
    step = int(path.name.removeprefix("step_"))
    modules = make(99, distributed=False)
    extra, rank_state = checkpointer.load(path, modules=modules)
    model, optimizer = modules["policy"]
    assert extra == {"step": step} and rank_state is None
    assert optimizer.param_groups[0]["lr"] == step
    for parameter in model.parameters():
        assert (parameter == step).all()
        for value in optimizer.state[parameter].values():
            assert (value == step).all()
    checkpointer.save(2, modules=make(2, distributed=False), extra={"step": 2}, rank_state={})
    assert checkpointer.latest().name == "step_2"
    assert [path.name for path in folder.iterdir()] == ["step_2"], "leftovers"
    result.write_text(path.name)


def fork(function: Callable[..., None], *arguments: object) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        except BaseException as error:
            print(f"{function.__name__}{arguments}: {error!r}", file=sys.stderr, flush=True)
        os._exit(code)
    return child


def join(children: list[int]) -> list[int]:
    """Exit codes (negative: the signal); a child that outlives the limit fails the test."""
    deadline = time.monotonic() + SURVIVOR_LIMIT_S
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
            raise TimeoutError(
                f"rank {children.index(min(set(children) - codes.keys()))} hung after the other was killed"
            )
        time.sleep(0.005)
    return [codes[child] for child in children]


def main(work: Path) -> None:
    import torch.distributed.device_mesh
    import torch.distributed.fsdp  # noqa: F401  imported once, before the forks

    import common.checkpoint  # noqa: F401

    make(0, distributed=False)  # the first optimizer of a process imports a lot more

    good = work / "good"
    assert join([fork(rank_main, rank, good, 1, 0, None, None) for rank in range(RANKS)]) == [0] * RANKS
    counted = work / "counted"
    shutil.copytree(good, counted)
    join([fork(rank_main, rank, counted, 2, 0, None, work / f"count{rank}") for rank in range(RANKS)])
    with open(work / "cases.jsonl", "w") as cases:
        for kill_rank in range(RANKS):
            for kill_at in range(int((work / f"count{kill_rank}").read_text())):
                folder = work / f"kill-{kill_rank}-{kill_at}"
                shutil.copytree(good, folder)
                codes = join([fork(rank_main, rank, folder, 2, kill_rank, kill_at, None) for rank in range(RANKS)])
                assert codes[kill_rank] == -signal.SIGKILL, codes
                result = work / f"result-{kill_rank}-{kill_at}"
                assert join([fork(verify_main, folder, result)]) == [0], f"rank {kill_rank}, operation {kill_at}"
                print(json.dumps({"rank": kill_rank, "at": kill_at, "latest": result.read_text()}), file=cases)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
