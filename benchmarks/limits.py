"""The ceilings of this machine, measured on the spot: what a training step could reach at best.

    OMP_NUM_THREADS=2 python benchmarks/limits.py --model models/smollm2

    matrix products     rate of torch's matmul in fp32 and bf16, the best of several shapes, one of them the model's own
    memory              bytes copied a second, from one large tensor to another
    engine              tokens a second of bare `llm.generate` on the prompts of throughput.py, and the seconds of a
                        reload of weights that lie ready in memory: the engine's own part of a weight sync
    trainer             tokens a second of bare forward and backward of the Hugging Face model on the same tokens:
                        padded, with logits for all of them, no FSDP, no optimizer

Every figure is the median of --repeats. Prints a table and writes JSON (--out). Without vLLM the engine's lines are
left out. What the machine's other users do shows: the load average is in the JSON.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from common import launch
from common.device import GIB, Device, get_device

sys.path.insert(0, str(Path(__file__).resolve().parent))
import workload
from workload import Shape, seconds, table

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COPY_BYTES = 256 * 2**20


@dataclass
class Args:
    model: str = "models/smollm2"
    """Folder of a Hugging Face causal language model."""
    prompts: int = 8
    """Prompts of a step."""
    group_size: int = 8
    """Responses to each prompt."""
    response_length: int = 64
    """Tokens of every response."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute dtype of engine and trainer; auto: bf16 where the hardware multiplies it, else fp32."""
    micro_batch_sequences: int = 8
    """Sequences in one forward and backward pass."""
    repeats: int = 3
    """Measurements of which the median is taken, after one that is not counted."""
    engine: bool = True
    """Measure the engine too."""
    trainer: bool = True
    """Measure the Hugging Face model too."""
    clock: Literal["wall", "processor"] = "wall"
    """processor: seconds of one thread on a processor instead, for a machine that is shared with others."""
    out: str = "benchmarks/results/throughput/limits.json"
    """Where the figures go; "" writes none."""


def timed(work: Callable[[], Any], *, repeats: int, device: Device) -> float:
    """Median seconds of `work`, after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        device.synchronize()
        start = workload.now()
        work()
        device.synchronize()
        times.append(workload.now() - start)
    return median(times[1:])


# -- the machine ------------------------------------------------------------------------------------------------------


def matmul_rate(shapes: list[tuple[int, int, int]], dtype: torch.dtype, *, repeats: int, device: Device) -> float:
    """Operations a second of (m, k) @ (k, n), the best of the shapes."""
    rates = []
    for m, k, n in shapes:
        a = torch.randn(m, k, dtype=dtype, device=device.torch_device)
        b = torch.randn(n, k, dtype=dtype, device=device.torch_device)
        product = torch.empty(m, n, dtype=dtype, device=device.torch_device)

        def work(a: torch.Tensor = a, b: torch.Tensor = b, product: torch.Tensor = product) -> None:
            torch.mm(a, b.T, out=product)

        rates.append(2.0 * m * k * n / timed(work, repeats=repeats, device=device))
    return max(rates)


def matmul_shapes(model: str, tokens: int, device: Device) -> list[tuple[int, int, int]]:
    """Squares, and the MLP's product for the tokens of a micro-batch."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    squares = (2048, 4096, 8192) if device.is_accelerator else (512, 1024, 1536)
    return [*((n, n, n) for n in squares), (tokens, config.hidden_size, config.intermediate_size)]


def copy_rate(*, repeats: int, device: Device) -> float:
    """Bytes copied a second; each is read once and written once."""
    source = torch.ones(COPY_BYTES // 4, device=device.torch_device)
    target = torch.empty_like(source)
    return COPY_BYTES / timed(lambda: target.copy_(source), repeats=max(repeats, 5), device=device)


# -- the engine -------------------------------------------------------------------------------------------------------


def start_engine(args: Any, shape: Shape, device: Device) -> Any:
    """An engine with the options of algos/grpo.py, and the model's weights. args: with `model` and `dtype`."""
    with device.starting_engine():
        from vllm import LLM

        device.patch_engine()
        llm = LLM(
            model=args.model, dtype=DTYPES[args.dtype],
            max_model_len=workload.MAX_PROMPT_LENGTH + shape.response_length,
            max_num_seqs=shape.sequences, kv_cache_memory_bytes=kv_bytes(args, shape), seed=1,
            logprobs_mode="processed_logprobs", generation_config="vllm", async_scheduling=False,
            use_tqdm_on_load=False, **device.engine_kwargs(),
        )  # fmt: skip
    if device.can_sleep:
        llm.wake_up()
    return llm


def bare_generation(llm: Any, shape: Shape, prompts: list[list[int]]) -> Callable[[], None]:
    """A call that generates what a step of algos/grpo.py does, with an empty prefix cache, and nothing else."""
    from vllm import SamplingParams

    settings = {"temperature": 1.0, "max_tokens": shape.response_length, "ignore_eos": True, "detokenize": False}
    settings |= {"logprobs": 0, "flat_logprobs": True}
    inputs = [{"prompt_token_ids": ids} for ids in prompts for _ in range(shape.group_size)]
    params = [SamplingParams(seed=i, **settings) for i in range(len(inputs))]

    def generate() -> None:
        llm.reset_prefix_cache()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == shape.response_tokens

    return generate


def measure_engine(args: Args, shape: Shape, prompts: list[list[int]], device: Device) -> dict[str, float]:
    """Seconds of bare generation, and of a reload of ready weights."""
    llm = start_engine(args, shape, device)
    generate = bare_generation(llm, shape, prompts)
    weights = ready_weights(args, device)

    def reload() -> None:
        arguments = {"weights_iterator": iter(weights), "is_checkpoint_format": True}
        llm.collective_rpc("reload_weights", kwargs=arguments)

    return {
        "generate_s": timed(generate, repeats=args.repeats, device=device),
        "reload_s": timed(reload, repeats=args.repeats, device=device),
    }


def kv_bytes(args: Any, shape: Shape) -> int:
    """What algos/grpo.py would give the engine for this shape."""
    from types import SimpleNamespace

    from common.memory import kv_cache_bytes

    sizes = SimpleNamespace(
        kv_cache_gib=None, prompts_per_step=shape.prompts, group_size=shape.group_size, rollout_tp=1, dtype=args.dtype,
        max_prompt_length=workload.MAX_PROMPT_LENGTH, max_response_length=shape.response_length,
        trust_remote_code=False,
    )  # fmt: skip
    return kv_cache_bytes(Path(args.model), sizes, get_device(), ranks=1)


def load_model(args: Args, device: Device) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    attention = device.attn_implementation(DTYPES[args.dtype])
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.dtype], attn_implementation=attention)
    return model.to(device.torch_device)


def ready_weights(args: Args, device: Device) -> list[tuple[str, torch.Tensor]]:
    """All weights in memory in the engine's dtype, the tied head beside the embedding."""
    named = load_model(args, device).named_parameters(remove_duplicate=False)
    return [(name, weight.detach()) for name, weight in named]


# -- the trainer ------------------------------------------------------------------------------------------------------


def measure_trainer(args: Args, shape: Shape, prompts: list[list[int]], device: Device) -> dict[str, float]:
    """Seconds of forward and backward over a step's tokens, and how many tokens that is, padding left out."""
    model = load_model(args, device).train()
    generator = torch.Generator().manual_seed(1)
    size, length = model.config.vocab_size, shape.response_length
    rows = [
        torch.cat([torch.tensor(ids), torch.randint(size, (length,), generator=generator)])
        for ids in prompts
        for _ in range(shape.group_size)
    ]
    batches = [
        torch.nn.utils.rnn.pad_sequence(rows[i : i + args.micro_batch_sequences], batch_first=True)
        for i in range(0, len(rows), args.micro_batch_sequences)
    ]

    def work() -> None:
        for batch in batches:
            ids = batch.to(device.torch_device)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return {
        "forward_backward_s": timed(work, repeats=args.repeats, device=device),
        "trainer_tokens": float(sum(map(len, rows))),
    }


# -- the table --------------------------------------------------------------------------------------------------------


def measure(args: Args, device: Device) -> dict[str, Any]:
    shape = Shape(args.prompts, args.group_size, args.response_length)
    prompts = workload.prompt_ids(args.model, shape.prompts)
    counts = workload.parameter_counts(args.model)
    tokens = args.micro_batch_sequences * (max(map(len, prompts)) + shape.response_length)
    shapes = matmul_shapes(args.model, tokens, device)
    figures: dict[str, Any] = {"shape": str(shape), "dtype": args.dtype, "threads": torch.get_num_threads()}
    for name, dtype in DTYPES.items():
        figures[f"matmul_{name}_flops"] = matmul_rate(shapes, dtype, repeats=args.repeats, device=device)
    figures["copy_bytes_per_s"] = copy_rate(repeats=args.repeats, device=device)
    figures["weight_bytes"] = float(sum(counts) * DTYPES[args.dtype].itemsize)
    if args.trainer:  # before the engine, which sets the process's threads and changes some of torch
        figures |= measure_trainer(args, shape, prompts, device)
        flops = workload.model_flops(counts, tokens=figures["trainer_tokens"], response_tokens=shape.response_tokens)
        rate = flops / figures["forward_backward_s"]
        figures["trainer_utilisation"] = rate / figures[f"matmul_{args.dtype}_flops"]
    if args.engine and importlib.util.find_spec("vllm") is not None:
        figures |= measure_engine(args, shape, prompts, device)
    return figures


def show(figures: dict[str, Any], shape: Shape) -> None:
    rows = [[f"matrix products, {name}", f"{figures[f'matmul_{name}_flops'] / 1e9:,.1f} GFLOP/s"] for name in DTYPES]
    rows.append(["memory copied", f"{figures['copy_bytes_per_s'] / GIB:,.2f} GiB/s"])
    dtype = figures["dtype"]
    if "generate_s" in figures:
        rate = shape.response_tokens / figures["generate_s"]
        rows.append([f"bare llm.generate, {dtype}", f"{seconds(figures['generate_s'])} s, {rate:,.0f} tokens/s"])
        rows.append(["engine's reload of ready weights", f"{seconds(figures['reload_s'])} s"])
    if "forward_backward_s" in figures:
        rate = figures["trainer_tokens"] / figures["forward_backward_s"]
        text = f"{seconds(figures['forward_backward_s'])} s, {rate:,.0f} tokens/s"
        rows.append([f"bare forward and backward, {dtype}", text])
        rows.append(["  of the matmul rate", f"{figures['trainer_utilisation']:.1%}"])
    print(table([f"limits, {shape} tokens, {figures['threads']} threads", ""], rows))


def main(args: Args) -> None:
    device = get_device()
    workload.check_model(args.model)
    os.environ[workload.CLOCK] = args.clock
    if args.clock == "processor":
        torch.set_num_threads(1)
    if args.dtype == "auto":
        args.dtype = "bf16" if device.default_dtype() == torch.bfloat16 else "fp32"
    figures = measure(args, device)
    show(figures, Shape(args.prompts, args.group_size, args.response_length))
    workload.write_results(args.out, args, device, {"figures": figures})


if __name__ == "__main__":
    launch.launch(main, Args)
