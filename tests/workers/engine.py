"""Started by tests/test_engine.py under torchrun: what the engine does after weight syncs, as JSON on rank 0's OUT.

engine.py MODEL_FOLDER OUT ROLLOUT_TP
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from common import engine, launch
from common.data import Prompt
from common.device import get_device

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the scripts are no installed package
from algos import grpo  # noqa: E402

LONG_PROMPT = 300
"""Tokens: more than two blocks of the engine's cache, so that a stale block would be found again."""


def prompt(ids: list[int], index: int = 0) -> Prompt:
    return Prompt(index, ids, "x", "", {}, "rule", [])


def edit(model: torch.nn.Module, name: str, change) -> None:
    """Apply `change` in place to this rank's rows of a weight."""
    with torch.no_grad():
        weight = dict(model.named_parameters(remove_duplicate=False))[name]
        change(weight.to_local() if isinstance(weight, DTensor) else weight)


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def main() -> None:
    folder, out, tp = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    device = get_device()
    rank, world_size = launch.init_distributed(device)
    args = grpo.Args(
        dtype="fp32", temperature=0.7, max_prompt_length=400, max_response_length=24, rollout_tp=tp, prompts_per_step=4
    )
    model = grpo.shard_model(folder, args, device, trainable=True)
    llm = grpo.build_engine(folder, args, device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampling = {
        "llm": llm,
        "tokenizer": tokenizer,
        "stop_token_ids": [tokenizer.eos_token_id],
        "tp_group": engine.make_tp_group(folder, tp),
    }
    short = [prompt(tokenizer.encode(f"<|user|>{n}+456=?<|end|><|assistant|>"), n) for n in (123, 507, 881, 999)]
    long = [prompt([7 + (i * i) % 90 for i in range(LONG_PROMPT)])]
    results: dict = {"world_size": world_size}

    def sample(prompts, *, temperature=args.temperature, seed=11, group_size=1, max_tokens=24):
        settings = {"temperature": temperature, "seed": seed, "group_size": group_size, "max_tokens": max_tokens}
        return grpo.rollout(prompts=prompts, step=1, **settings, **sampling)

    @torch.no_grad()
    def gap(samples) -> float:
        """Largest |engine - trainer| log-prob of the sampled tokens."""
        batch = grpo.collate(samples, device)
        logprobs, _ = grpo.compute_logprobs(model, batch, args)
        return ((logprobs - batch.rollout_logprobs) * batch.response_mask).abs().max().item()

    # Three syncs of the same weights change nothing.
    same = []
    for _ in range(3):
        grpo.sync_weights(llm, model, device)
        samples = sample(short)
        same.append([(s.response_ids, s.rollout_logprobs) for s in samples])
    results["gap_start"] = gap(samples)
    results["same_weights_same_samples"] = same[0] == same[1] == same[2]

    # A group has its own luck for every response.
    group = sample(short[:1], group_size=8)
    results["group"] = [s.response_ids for s in group]
    everyone: list = [None] * world_size
    dist.all_gather_object(everyone, [s.response_ids for s in sample(short, seed=11 + 97 * rank)])
    results["by_rank"] = everyone

    # Every change of weights reaches the engine, several times; cached prompts are forgotten.
    gaps, moved = [], []
    for i in range(3):
        before = sample(long)
        edit(model, f"model.layers.{i % 2}.self_attn.q_proj.weight", lambda weight: weight.mul_(1.5))
        edit(model, "model.layers.0.mlp.gate_proj.weight", lambda weight: weight.mul_(0.8))
        grpo.sync_weights(llm, model, device)
        after = sample(long)
        gaps += [gap(after), gap(sample(short))]
        moved.append(before[0].rollout_logprobs != after[0].rollout_logprobs)
    results["gaps_after_updates"], results["moved"] = gaps, moved

    # A row of the head that points along the hidden state makes its token the one that is sampled. The tied head is the
    # embedding; an engine that packed the head apart must have got both.
    grpo.sync_weights(llm, model, device)
    head = "model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"
    token = 77
    results["greedy_before"] = sample(short, temperature=0.0, max_tokens=1)[0].response_ids
    whole_head = whole(dict(model.named_parameters())[head])
    row = (100.0 * whole_head[results["greedy_before"][0]]).detach()
    rows_per_rank = -(-len(whole_head) // world_size)
    first = rank * rows_per_rank

    def replace_row(weight: torch.Tensor) -> None:
        if first <= token < first + len(weight):
            weight[token - first] = row

    edit(model, head, replace_row)
    grpo.sync_weights(llm, model, device)
    results["greedy_after"] = sample(short, temperature=0.0, max_tokens=1)[0].response_ids
    results["gap_after_head"] = gap(sample(short, temperature=args.temperature))

    # A sync that misses a weight, or sends one that the engine does not know, stops the run and names it. The engine
    # cannot be used after that, so each run tries one of the two.
    send_all = grpo.named_weights
    if model.config.tie_word_embeddings:
        results["fault"] = "model.layers.1.self_attn.k_proj.weight"
        grpo.named_weights = lambda model: ((n, w) for n, w in send_all(model) if n != results["fault"])
    else:
        results["fault"] = "foo.weight"
        grpo.named_weights = lambda model: [("foo.weight", torch.zeros(2, 2)), *send_all(model)]
    try:
        grpo.sync_weights(llm, model, device)
        results["fault_message"] = "no error"
    except RuntimeError as error:
        results["fault_message"] = str(error)

    # The engine's finaliser would take the process group with it.
    sampling.clear()
    del llm, sample
    gc.collect()
    results["has_process_group"] = dist.is_initialized()

    if rank == 0:
        out.write_text(json.dumps(results))
    launch._leave(0)


if __name__ == "__main__":
    main()
