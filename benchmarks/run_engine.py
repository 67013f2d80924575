"""Bare `llm.generate` for a benchmark, one rollout at a time: the requests of a script's step, without a trainer.

Started by throughput.py, to take turns with the script: what disturbs the machine disturbs both.
"""

import sys
from pathlib import Path

from common.device import get_device

sys.path.insert(0, str(Path(__file__).resolve().parent))
import limits
import workload


def main() -> None:
    args = workload.side_parser(__doc__).parse_args()
    shape = workload.Shape(args.prompts, args.group_size, args.response_length)
    llm = limits.start_engine(args, shape, get_device())
    generate = limits.bare_generation(llm, shape, workload.prompt_ids(args.model, shape.prompts))
    for step in range(1, args.steps + 1):
        workload.wait_for_turn(args.folder, step)
        start = workload.now()
        generate()
        workload.write_step(args.folder, step, {"rollout": workload.now() - start})


if __name__ == "__main__":
    main()
