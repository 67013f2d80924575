"""Evaluate a model on prompts with rule rewards: greedy accuracy, mean@k, pass@k and maj@k.

    torchrun --nproc_per_node 2 benchmarks/evaluate.py                      # the embedded model, on a CPU
    torchrun --nproc_per_node 8 benchmarks/evaluate.py --model Qwen/Qwen2.5-3B --files data/countdown/test.parquet
    torchrun --nproc_per_node 1 benchmarks/evaluate.py --model runs/my-run/hf --files data/gsm8k/test.parquet --k 1 4

Prompts and rewards go the same way as in training (common.data, common.rewards), so a number here is what a run's
evaluation would say. A response is right when its reward is 1 or more. With n samples to each prompt, c of them right:

    mean@n   the mean of c / n over the prompts: the accuracy of one sample, measured n times
    pass@k   the chance that at least one of k samples is right, 1 - C(n-c, k) / C(n, k), which is unbiased
             (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, equation 1)
    maj@k    the accuracy of the answer that most of k samples state (Wang et al. 2022, arXiv 2203.11171), a mean over
             the n // k blocks of k samples; a tie counts in parts, and samples without an answer do not vote

Every number comes with its standard error over the prompts. What is sampled depends on the seed, the prompt and the
sample's place, not on the number of ranks. Each rank has an engine of its own and takes every n-th prompt.
"""

import json
import math
import os
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from common import arguments, checkpoint, data, engine, launch, memory, rewards, tracking
from common.device import GIB, Device, get_device
from common.rewards.boxed import extract
from common.rewards.gsm8k import stated_answers
from common.rewards.numbers import read_number

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TINY = Path(__file__).resolve().parents[1] / "assets" / "tiny-arith"


@dataclass
class Args:
    # -- model and data --
    model: str = str(TINY / "model")
    """Folder or hub name of a Hugging Face causal language model."""
    files: tuple[str, ...] = (str(TINY / "test.parquet"),)
    """Parquet files, folders or globs with verl's five fields."""
    limit: int | None = None
    """Use the first so many prompts only."""
    max_prompt_length: int = 1024
    """Prompts with more tokens, counted after the chat template, are dropped and counted."""
    chat_template_kwargs: str = "{}"
    """JSON passed to the chat template, for example '{"enable_thinking": false}'."""
    reward_fn: str | None = None
    """file.py:name of your own compute_score; by default the row's data_source picks the rule."""
    reward_timeout: float = 5.0
    """Seconds of wall time after which scoring a response is given up (score 0, counted)."""
    trust_remote_code: bool = False
    """Let the model's repository run its own Python code."""

    # -- sampling --
    greedy: bool = True
    """Take the most likely response to every prompt once."""
    samples: int = 4
    """Responses sampled for each prompt (n), for mean@n, pass@k and maj@k; 0: none."""
    k: tuple[int, ...] | None = None
    """The k of pass@k and maj@k, none above --samples; default: the powers of two, and --samples."""
    temperature: float = 1.0
    """Temperature of the samples."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability."""
    top_k: int = 0
    """Sample from so many most likely tokens; 0: from all."""
    max_response_length: int = 1024
    """Longest response in tokens."""
    seed: int = 1
    """Seed of the samples."""

    # -- engine --
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute dtype; auto: bf16 where the hardware has it."""
    rollout_tp: int = 1
    """Ranks that share one engine (tensor parallel)."""
    max_sequences: int = 128
    """Most sequences that an engine works on at a time."""
    kv_cache_gib: float | None = None
    """GiB of KV cache of an engine; default: what those sequences need, at most half of the free memory."""

    # -- results --
    out_dir: str | None = None
    """Folder for results.json and responses.jsonl; default runs/evaluate-<time>-<seed>."""


# -- the estimators ---------------------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, when c of n are. Needs k <= n.

    The share of the k-subsets of the n samples that hold a right one. Whole numbers, so nothing overflows or rounds.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k of n={n}, c={c}, k={k}: needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers: Sequence[str | None], is_right: Sequence[bool]) -> float:
    """1.0 when the most frequent answer is right, 0.0 when not; of tied answers the right share. None does not vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    # Samples that state one answer may be scored apart (a rule may look at more than the answer): their mean counts.
    right = {answer: [r for a, r in zip(answers, is_right, strict=True) if a == answer] for answer in winners}
    return sum(sum(verdicts) / len(verdicts) for verdicts in right.values()) / len(winners)


def maj_at_k(answers: Sequence[str | None], is_right: Sequence[bool], k: int) -> float:
    """Mean of `majority` over the len(answers) // k blocks of k samples in a row. Needs k <= len(answers)."""
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@k of {len(answers)} samples, k={k}: needs 1 <= k <= samples")
    starts = range(0, len(answers) - k + 1, k)
    return sum(majority(answers[i : i + k], is_right[i : i + k]) for i in starts) / len(starts)


def stated_answer(response: str) -> str | None:
    r"""The answer that a response states, in a form in which equal answers are equal; None when it states none.

    After `####`, else in <answer> tags or in \boxed{}. Numbers compare by value: "1,234.0" and "1234" are one answer.
    """
    candidates = stated_answers(response) or [extract(response, allow_answer_line=True)]
    answer = next((text for text in candidates if text and text.strip()), None)
    if answer is None:
        return None
    number = read_number(answer)
    return str(number[0]) if number else " ".join(answer.casefold().split())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error: the unbiased standard deviation over the square root of the count (0 for one)."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


# -- responses --------------------------------------------------------------------------------------------------------


@dataclass
class Response:
    """One response to one prompt and its score."""

    text: str
    num_tokens: int
    truncated: bool
    reward: float = 0.0

    @property
    def is_right(self) -> bool:
        return self.reward >= 1.0


@dataclass
class Problem:
    """A prompt and all responses to it."""

    index: int
    data_source: str
    prompt: str
    ground_truth: Any
    greedy: list[Response]
    samples: list[Response]


def generate(
    llm: Any, prompts: Sequence[data.Prompt], *, count: int, temperature: float, args: Args, tokenizer: Any,
    stop_token_ids: list[int], tp_group: dist.ProcessGroup | None,
) -> list[list[Response]]:  # fmt: skip
    """`count` responses to each prompt, in their order. Ranks that share an engine put their prompts together."""
    from vllm import SamplingParams

    seeds = [engine.sampling_seed(args.seed, step=-1, row=prompt.index) for prompt in prompts]
    mine = [(p.prompt_ids, seed + j) for p, seed in zip(prompts, seeds, strict=True) for j in range(count)]
    requests, first = engine.gather_requests(mine, tp_group)
    settings = {"temperature": temperature, "top_p": args.top_p, "top_k": args.top_k, "detokenize": False}
    settings |= {"max_tokens": args.max_response_length, "stop_token_ids": stop_token_ids}
    params = [SamplingParams(seed=seed, **settings) for _, seed in requests]
    inputs = [{"prompt_token_ids": ids} for ids, _ in requests]
    show_progress = dist.get_rank() == 0 and sys.stderr.isatty()  # a bar is a mess in a log file
    outputs = llm.generate(inputs, params, use_tqdm=show_progress) if inputs else []
    results = [output.outputs[0] for output in outputs[first : first + len(mine)]]
    texts = tokenizer.batch_decode([list(result.token_ids) for result in results], skip_special_tokens=True)
    responses = [
        Response(text, len(result.token_ids), result.finish_reason == "length")
        for text, result in zip(texts, results, strict=True)
    ]
    return [responses[i * count : (i + 1) * count] for i in range(len(prompts))]


def score(scorer: rewards.Scorer, prompts: Sequence[data.Prompt], responses: Sequence[Sequence[Response]]) -> int:
    """Fill in the rewards; returns how many responses could not be scored."""
    pairs = [(prompt, response) for prompt, group in zip(prompts, responses, strict=True) for response in group]
    values, metrics = scorer(
        [prompt.data_source for prompt, _ in pairs],
        [response.text for _, response in pairs],
        [prompt.ground_truth for prompt, _ in pairs],
        [prompt.extra_info for prompt, _ in pairs],
    )
    for (_, response), value in zip(pairs, values, strict=True):
        response.reward = value
    return int(metrics["rewards/errors"] + metrics["rewards/timeouts"])


def summarize(problems: Sequence[Problem], ks: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Every metric as (mean, standard error) over the problems."""
    metrics = {}
    if problems[0].greedy:
        greedy = [problem.greedy[0] for problem in problems]
        metrics["greedy"] = [float(response.is_right) for response in greedy]
        metrics["greedy reward"] = [response.reward for response in greedy]
        metrics["greedy tokens"] = [float(response.num_tokens) for response in greedy]
        metrics["greedy truncated"] = [float(response.truncated) for response in greedy]
    if n := len(problems[0].samples):
        groups = [problem.samples for problem in problems]
        right = [[response.is_right for response in group] for group in groups]
        answers = [[stated_answer(response.text) for response in group] for group in groups]
        metrics[f"mean@{n}"] = [sum(verdicts) / n for verdicts in right]
        metrics |= {f"pass@{k}": [pass_at_k(n, sum(verdicts), k) for verdicts in right] for k in ks}
        metrics |= {f"maj@{k}": [maj_at_k(a, r, k) for a, r in zip(answers, right, strict=True)] for k in ks if k > 1}
        metrics["sample reward"] = [sum(response.reward for response in group) / n for group in groups]
        metrics["sample tokens"] = [sum(response.num_tokens for response in group) / n for group in groups]
        metrics["sample truncated"] = [sum(response.truncated for response in group) / n for group in groups]
    return {name: mean_and_error(values) for name, values in metrics.items()}


# -- what is written --------------------------------------------------------------------------------------------------


def hardware(device: Device) -> dict[str, Any]:
    """What the numbers were measured on."""
    if device.is_accelerator:
        name = getattr(torch, device.type).get_device_name(device.index)
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else platform.processor() or platform.machine()
    return {
        "device": f"{device.name}: {name}",
        "ranks": dist.get_world_size(),
        "cpu_count": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "memory_gib": round(device.memory()[1] / GIB, 1),
    }


def show(sections: dict[str, dict[str, tuple[float, float]]], title: str) -> None:
    """Print the metrics as a table, a column for each data_source and one for all."""
    table = Table()
    table.add_column("metric")
    for section in sections:
        table.add_column(section, justify="right")
    for metric in next(iter(sections.values())):
        digits = 1 if metric.endswith("tokens") else 3
        cells = [section[metric] for section in sections.values()]
        table.add_row(metric, *[f"{mean:.{digits}f} \u00b1 {error:.{digits}f}" for mean, error in cells])
    print(title)
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def write(folder: Path, results: dict[str, Any], problems: Sequence[Problem]) -> None:
    """results.json, and responses.jsonl with every prompt, response and score."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    with (folder / "responses.jsonl").open("w") as file:
        file.writelines(json.dumps(asdict(problem), default=str) + "\n" for problem in problems)


# -- the run ----------------------------------------------------------------------------------------------------------


def check(args: Args) -> list[int]:
    """Refuse what cannot work; returns the k of pass@k and maj@k. Raises UserError."""
    arguments.check_counts(args, ("max_prompt_length", "max_response_length", "rollout_tp", "max_sequences"))
    launch.require(args.limit is None or args.limit >= 1, f"--limit {args.limit}: it must be at least 1")
    launch.require(args.samples >= 0, f"--samples {args.samples}: it must be at least 0")
    launch.require(args.greedy or args.samples > 0, "--no-greedy --samples 0: nothing to evaluate")
    launch.require(
        args.samples == 0 or args.temperature > 0,
        f"--temperature {args.temperature}: samples need one above 0; for greedy responses alone use --samples 0",
    )
    launch.require(0 < args.top_p <= 1, f"--top-p {args.top_p}: it must be above 0 and at most 1")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    launch.require(ranks % args.rollout_tp == 0, f"--rollout-tp {args.rollout_tp} does not divide {ranks} ranks")
    powers = [2**i for i in range(args.samples.bit_length())]
    ks = sorted(set(powers + [args.samples]) if args.k is None else set(args.k)) if args.samples else []
    bad = [k for k in args.k or () if not 1 <= k <= args.samples]
    launch.require(not bad, f"--k {bad[0] if bad else ''}: pass@k needs 1 <= k <= --samples, which is {args.samples}")
    return ks


def main(args: Args) -> None:
    ks = check(args)
    device = get_device()
    arguments.fill_in(args, {}, device)
    data.check_files(args.files)
    reward_fn = rewards.load_reward_fn(args.reward_fn)
    # The last gathering waits for the slowest rank, which may be hours behind the first.
    rank, world_size = launch.init_distributed(device, timeout_s=86_400)
    folder = checkpoint.resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    dataset = data.load_prompts(
        args.files, tokenizer=tokenizer, max_prompt_length=args.max_prompt_length,
        chat_template_kwargs=launch.json_object(args.chat_template_kwargs, flag="--chat-template-kwargs"),
    )  # fmt: skip
    for source in sorted(dataset.data_sources):
        message = f"data_source '{source}' has no reward rule: bring one with --reward-fn file.py:name"
        launch.require(reward_fn.knows(source), message)
    scorer = rewards.Scorer(reward_fn, timeout_s=args.reward_timeout)

    tp_group = engine.make_tp_group(folder, args.rollout_tp)
    with device.starting_engine():
        from vllm import LLM

        device.patch_engine()
        # The cache is sized as in training, for the sequences that the engines of all ranks hold at a time.
        sequences = args.max_sequences * world_size // args.rollout_tp
        sizes = SimpleNamespace(**vars(args), prompts_per_step=sequences, group_size=1)
        llm = LLM(
            model=str(folder), load_format="auto", dtype=DTYPES[args.dtype],
            max_model_len=args.max_prompt_length + args.max_response_length, max_num_seqs=args.max_sequences,
            kv_cache_memory_bytes=memory.kv_cache_bytes(folder, sizes, device), tensor_parallel_size=args.rollout_tp,
            distributed_executor_backend="external_launcher", generation_config="vllm", async_scheduling=False,
            seed=args.seed, trust_remote_code=args.trust_remote_code, use_tqdm_on_load=False, **device.engine_kwargs(),
        )  # fmt: skip

    count = min(len(dataset), args.limit or len(dataset))
    prompts = [dataset[row] for row in range(rank, count, world_size)]
    if rank == 0:
        kinds = f"{args.samples} samples" + " and a greedy response" * args.greedy
        print(f"{count} prompts, {kinds} to each, on {world_size} x {device.name}", flush=True)
    sampling = {
        "args": args, "tokenizer": tokenizer, "tp_group": tp_group,
        "stop_token_ids": engine.stop_token_ids(tokenizer, folder),
    }  # fmt: skip
    start = time.perf_counter()
    greedy = generate(llm, prompts, count=int(args.greedy), temperature=0.0, **sampling)
    samples = generate(llm, prompts, count=args.samples, temperature=args.temperature, **sampling)
    seconds = time.perf_counter() - start
    unscored = score(scorer, prompts, [g + s for g, s in zip(greedy, samples, strict=True)])
    scorer.close()
    mine = [
        Problem(p.index, p.data_source, tokenizer.decode(p.prompt_ids), p.ground_truth, g, s)
        for p, g, s in zip(prompts, greedy, samples, strict=True)
    ]
    parts: list[Any] = [None] * world_size
    dist.all_gather_object(parts, (mine, seconds, unscored))
    if rank == 0:
        report(parts, args, ks=ks, device=device, dropped=dataset.report)


def report(
    parts: list[tuple[list[Problem], float, int]], args: Args, *, ks: list[int], device: Device, dropped: dict[str, Any]
) -> None:
    """Put the ranks' problems together, print the table and write the files."""
    problems = sorted((problem for part, _, _ in parts for problem in part), key=lambda problem: problem.index)
    seconds = max(part[1] for part in parts)
    tokens = sum(response.num_tokens for problem in problems for response in problem.greedy + problem.samples)
    by_source: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        by_source[problem.data_source].append(problem)
    sections = {source: summarize(part, ks) for source, part in sorted(by_source.items())}
    if len(sections) > 1:
        sections["all"] = summarize(problems, ks)

    folder = Path(args.out_dir or f"runs/evaluate-{time.strftime('%Y%m%d-%H%M%S')}-{args.seed}")
    results = {
        "metrics": {
            source: {name: {"mean": mean, "standard_error": error} for name, (mean, error) in section.items()}
            for source, section in sections.items()
        },
        "problems": {source: len(part) for source, part in sorted(by_source.items())},
        "rows": dropped,
        "unscored_responses": sum(part[2] for part in parts),
        "generation_seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
        "seed": args.seed,
        "command": ["benchmarks/evaluate.py", *sys.argv[1:]],
        "args": tracking.redact(asdict(args)),
        "hardware": hardware(device),
        "versions": tracking.versions(__file__),
    }
    write(folder, results, problems)
    show(sections, f"{args.model}: {len(problems)} problems, {args.dtype}")
    print(f"{tokens} tokens in {seconds:.1f} s ({results['tokens_per_second']} tokens/s); {folder}/results.json")
    if results["unscored_responses"]:
        print(f"{results['unscored_responses']} responses could not be scored and count as wrong")


if __name__ == "__main__":
    launch.launch(main, Args)
