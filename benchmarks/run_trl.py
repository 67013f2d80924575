"""Runs TRL's GRPOTrainer for a benchmark: the work of run_script.py, one step at a time, figures written down.

Started by vs_trl.py with the Python of TRL's own virtual environment. What TRL is given here beyond its defaults:

    exact lengths         min_new_tokens for transformers, ignore_eos for vLLM
    one dtype             of master weights, compute and engine (TRL's engine would take the model folder's)
    the engine's options  those of algos/grpo.py: eager, a KV cache of the size that is needed, no compiled sampler; but
                          vLLM's own block size, which algos/grpo.py sets lower to let a group share its prompt
    a sync that works     its own sends weights by `load_weights`, which fails on a CPU, where vLLM packs the weights
    no recomputation      gradient checkpointing is TRL's default; --gradient-checkpointing puts it back

Phases: rollout is the generation alone; rewards and logprobs (the old log-probs, which TRL computes when vLLM
generates) are its own methods; sync is the sending of weights, which TRL does before it generates; update is the rest
of the step.
"""

import argparse
import functools
import math
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from common.device import GIB, get_device
from common.memory import DEFAULT_BLOCK_SIZE, kv_bytes_per_token

sys.path.insert(0, str(Path(__file__).resolve().parent))
import workload

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Clock:
    """Seconds by phase since the step began; a phase inside another one is not counted twice."""

    def __init__(self) -> None:
        self.start_step()

    def start_step(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start = workload.now()

    def time(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inside = sum(self.seconds.values())
            start = workload.now()
            result = method(*args, **kwargs)
            spent = workload.now() - start - (sum(self.seconds.values()) - inside)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
            return result

        return timed

    def record(self) -> dict[str, float]:
        step = workload.now() - self.start
        seconds = {"logprobs": 0.0, "sync": 0.0} | self.seconds
        return seconds | {"update": step - sum(seconds.values()), "step": step}


def fix_engine(args: argparse.Namespace) -> None:
    """Give TRL's colocated engine the options of algos/grpo.py, and a sync that works on every device."""
    device = get_device()
    from trl.generation import vllm_generation

    device.patch_engine()
    sequences, longest = args.prompts * args.group_size, workload.MAX_PROMPT_LENGTH + args.response_length
    kv_tokens = sequences * math.ceil(longest / DEFAULT_BLOCK_SIZE) * DEFAULT_BLOCK_SIZE
    options = device.engine_kwargs() | {
        "dtype": DTYPES[args.dtype], "generation_config": "vllm", "async_scheduling": False, "block_size": None,
        "kv_cache_memory_bytes": kv_tokens * kv_bytes_per_token(AutoConfig.from_pretrained(args.model), args.dtype),
    }  # fmt: skip
    build = vllm_generation.LLM

    def build_with_options(**theirs: Any) -> Any:
        return build(**theirs | options | {"enable_sleep_mode": theirs["enable_sleep_mode"]})

    def sync_weights(self: Any) -> None:
        weights = [(name, weight.detach()) for name, weight in self.model.named_parameters(remove_duplicate=False)]
        arguments = {"weights_iterator": iter(weights), "is_checkpoint_format": True}
        with torch.no_grad():
            self.llm.collective_rpc("reload_weights", kwargs=arguments)
        self.llm.reset_prefix_cache()

    vllm_generation.LLM = build_with_options
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


def make_trainer(args: argparse.Namespace, clock: Clock) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def half_right(completions: list[Any], **_columns: Any) -> list[float]:
        """Half of every group is right, as in run_script.py."""
        return [float(i % 2) for i in range(len(completions))]

    class Turns(TrainerCallback):
        def on_step_begin(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
            workload.wait_for_turn(args.folder, state.global_step + 1)
            clock.start_step()

        def on_step_end(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
            workload.write_step(args.folder, state.global_step, clock.record() | {"peak_memory_gib": peak})

    sequences = args.prompts * args.group_size
    if args.engine == "vllm":
        lengths = {"ignore_eos": True}
    else:
        lengths = {"min_new_tokens": args.response_length}
    config = GRPOConfig(
        output_dir=str(args.folder / "run"), max_steps=args.steps, learning_rate=1e-6, lr_scheduler_type="constant",
        per_device_train_batch_size=args.micro_batch_sequences,
        gradient_accumulation_steps=sequences // args.micro_batch_sequences, num_generations=args.group_size,
        max_completion_length=args.response_length, generation_kwargs=lengths, use_vllm=args.engine == "vllm",
        vllm_mode="colocate", vllm_max_model_length=workload.MAX_PROMPT_LENGTH + args.response_length,
        model_init_kwargs={"dtype": DTYPES[args.dtype] if args.dtype == "fp32" else torch.float32},
        bf16=args.dtype == "bf16", gradient_checkpointing=args.gradient_checkpointing, report_to=[], save_strategy="no",
        logging_steps=1, seed=1, use_cpu=not get_device().is_accelerator, disable_tqdm=True,
    )  # fmt: skip
    rows = [{"prompt": workload.messages(index)} for index in range(args.prompts)]
    return GRPOTrainer(
        model=args.model, reward_funcs=half_right, args=config, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(args.model), callbacks=[Turns()],
    )  # fmt: skip


def time_phases(trainer: Any, clock: Clock) -> None:
    """Put the clock around TRL's methods."""
    trainer._generate_single_turn = clock.time("rollout", trainer._generate_single_turn)
    trainer._calculate_rewards = clock.time("rewards", trainer._calculate_rewards)
    score = trainer._get_per_token_logps_and_entropies
    timed_score = clock.time("logprobs", score)

    def score_by_kind(*args: Any, **kwargs: Any) -> Any:
        """With gradients it belongs to the update."""
        return (score if torch.is_grad_enabled() else timed_score)(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = score_by_kind
    if trainer.use_vllm:
        trainer.vllm_generation.sync_weights = clock.time("sync", trainer.vllm_generation.sync_weights)


def check_lengths(trainer: Any, response_length: int) -> None:
    """Raise when a response is not as long as was asked for: the figures would mislead."""
    generate = trainer._generate_single_turn

    def generate_and_check(*args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        lengths = {len(ids) for ids in result[0]}
        if lengths != {response_length}:
            raise RuntimeError(f"responses of {sorted(lengths)} tokens instead of {response_length}")
        return result

    trainer._generate_single_turn = generate_and_check


def main() -> None:
    parser = workload.side_parser(__doc__)
    parser.add_argument("--engine", choices=("transformers", "vllm"), required=True)
    parser.add_argument("--micro-batch-sequences", type=int, required=True)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    args = parser.parse_args()
    clock = Clock()
    with get_device().starting_engine():
        if args.engine == "vllm":
            fix_engine(args)
        trainer = make_trainer(args, clock)
    check_lengths(trainer, args.response_length)
    time_phases(trainer, clock)
    trainer.train()


if __name__ == "__main__":
    main()
