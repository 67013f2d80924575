"""Supervised fine-tuning: the policy learns to write the responses of a data set.

A prompt x comes with a response y. The loss is the cross-entropy of the response's tokens, its end included:

    L = -1/N sum_i sum_t  log pi(y_it | x_i, y_i<t)

N counts the response tokens of the whole optimizer step, over all micro-batches and ranks. Prompt tokens, and in
conversations the turns of the user, are read and not learnt.

    torchrun --nproc_per_node 2 algos/sft.py                        # the embedded tiny task, on a CPU
    torchrun --nproc_per_node 1 algos/sft.py --model Qwen/Qwen2.5-0.5B --train-files data/gsm8k_sft/train.parquet
    torchrun --nproc_per_node 8 algos/sft.py --model Qwen/Qwen2.5-7B --train-files data/gsm8k_sft/train.parquet

Rows have a `prompt` (text or messages) and a `response`, or `messages`, a whole conversation.

Shapes: b sequences of a micro-batch, L tokens of the longest of them, T trained tokens of the one that has most,
N trained tokens in all, H hidden size, V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common import arguments, checkpoint, data, launch, optim, packing
from common.device import Device, get_device
from common.logprobs import HeadLogprobs
from common.models import compile_layers, disable_dropout
from common.tracking import Column, Tracker

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TINY = str(Path(__file__).resolve().parents[1] / "assets" / "tiny-arith")

# A default of None is filled in from here: what suits the embedded model would wreck a pretrained one.
# Differs from algos/grpo.py: fewer fields.
DEFAULTS = {"lr": 1e-5, "warmup_steps": 10}
# Differs from algos/grpo.py: fewer fields.
TINY_DEFAULTS = {"lr": 1e-3, "warmup_steps": 10}


@dataclass
class Args:
    # -- model and data --
    model: str = f"{TINY}/model"
    """Folder or hub name of a Hugging Face causal language model."""
    # Differs from algos/grpo.py: the rows carry responses.
    train_files: tuple[str, ...] = (f"{TINY}/sft.parquet",)
    """Parquet files, folders or globs with `prompt` and `response`, or with `messages`."""
    # Differs from algos/grpo.py: the rows carry responses.
    test_files: tuple[str, ...] = ()
    """The same for the evaluation loss. No names: no evaluation."""
    max_length: int = 2048
    """Examples with more tokens, prompt and response, are dropped and counted."""
    chat_template_kwargs: str = "{}"
    """JSON passed to the chat template, for example '{"enable_thinking": false}'."""
    trust_remote_code: bool = False
    """Let the model's repository run its own Python code."""

    # -- algorithm --
    # Differs from algos/grpo.py: log-probs of data, not of samples.
    temperature: float = 1.0
    """Divides the logits."""

    # -- optimisation --
    batch_size: int = 128
    """Examples in one optimizer step, over all ranks."""
    num_epochs: int = 1
    """Passes over the training data."""
    # Differs from algos/grpo.py: by default the data decide.
    steps: int | None = None
    """Optimizer steps; default: what --num-epochs takes."""
    # Differs from algos/grpo.py: a supervised step is larger.
    lr: float | None = None
    """Peak learning rate of AdamW; default 1e-5, for the embedded model 1e-3."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises from 0; default 10."""
    # Differs from algos/grpo.py: fine-tuning ends by decaying.
    lr_decay: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after the warm-up, down to 0 at the last step."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm."""
    max_bad_updates: int = 3
    """Stop after this many updates in a row that were skipped for a NaN or infinite loss, gradient or reward."""
    micro_batch_tokens: int = 8192
    """Tokens in one forward and backward pass of a rank."""
    logits_chunk_rows: int = 1024
    """Response tokens whose logits (rows x vocabulary, fp32) are in memory at a time."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute dtype of trainer and engine; master weights and optimizer are always fp32."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more compute."""
    compile: bool = False
    """torch.compile the decoder layers. No faster on a CPU; not measured on accelerators yet."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in main memory, for accelerators."""
    delay_gradient_reduction: bool = False
    """Reduce gradients over ranks only at the last micro-batch: fewer collectives, one unsharded gradient in memory."""

    # -- logging and checkpoints --
    seed: int = 1
    """Seed of everything random. The same command gives the same run."""
    run_dir: str | None = None
    """Folder of this run; default runs/<script>-<time>-<seed>."""
    # Differs from algos/grpo.py: the loss of the test rows is what there is to evaluate.
    eval_every: int = 100
    """Evaluate the loss of the test rows every n steps and after the last; 0: never."""
    save_every: int = 0
    """Write a checkpoint every n steps; 0: only when the run is told to stop (SIGTERM)."""
    keep_checkpoints: int = 2
    """Checkpoints to keep, beside the best by evaluation."""
    resume: bool = False
    """Go on from the newest complete checkpoint: of --run-dir, or else of the newest run of this script."""
    resume_from: str | None = None
    """The same from this run folder or checkpoint."""
    export: bool = True
    """Write the trained model as a Hugging Face folder, <run>/hf, at the end."""
    export_dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of that folder."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project."""
    watchdog_s: float = 1800.0
    """Seconds after which a phase counts as stuck: the run stops and names it."""


# -- the algorithm ----------------------------------------------------------------------------------------------------


# Differs from algos/grpo.py: cross-entropy.
def compute_loss(
    *, new_logprobs: torch.Tensor, response_mask: torch.Tensor, num_tokens: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy of the trained tokens, over the number of them in the whole optimizer step. Arguments are (b, T).

    Returns the loss and metrics, each summed over the trained tokens: the caller divides by their global number.
    """
    loss = -(new_logprobs * response_mask).sum() / num_tokens
    return loss, {"loss": -(new_logprobs.detach() * response_mask).sum()}


# -- shared blocks: the same in every script --------------------------------------------------------------------------


# Differs from algos/grpo.py: the response is given, and may be several turns of a conversation.
@dataclass
class Sample:
    """One example: token ids, and which of them are trained."""

    input_ids: list[int]
    loss_mask: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


# Differs from algos/grpo.py: no rollout, so no old or reference log-probs.
@dataclass
class MicroBatch:
    """Examples padded on the right, on the device. Masks come from lengths: a pad id may be a real token too."""

    input_ids: torch.Tensor  # (b, L)
    layout: packing.Layout  # how they go through the model: without padding
    rows: torch.Tensor  # (N,) row of each trained token in input_ids
    columns: torch.Tensor  # (N,) its column there
    offsets: torch.Tensor  # (N,) its number among the row's trained tokens, so its column in the (b, T) tensors
    response_mask: torch.Tensor  # (b, T) fp32, 1 on trained tokens


def token_logprobs(
    self: nn.Module, batch: MicroBatch, temperature: float, chunk_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of each response token (N,). A forward method, so that FSDP gathers the head."""
    predictors = batch.rows, batch.columns - 1  # position t - 1 predicts token t
    hidden = packing.hidden_at(self.get_decoder(), batch.input_ids, batch.layout, *predictors)  # (N, H)
    targets = batch.input_ids[batch.rows, batch.columns]
    return HeadLogprobs.apply(hidden, self.get_output_embeddings().weight, targets, temperature, chunk_rows)


def shard_model(folder: Path, args: Args, device: Device, *, trainable: bool) -> nn.Module:
    """The model of `folder`, sharded over all ranks by FSDP2; no rank ever holds all of it.

    It is built without memory, sharded, and only then given memory and weights, each rank reading its own slices.
    A trainable model keeps fp32 master weights and computes in args.dtype; a frozen one is stored in that dtype.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32 if trainable else DTYPES[args.dtype],
            attn_implementation=packing.attention_for(config, device, DTYPES[args.dtype]),
            trust_remote_code=args.trust_remote_code,
        )
    disable_dropout(model)
    model.requires_grad_(trainable)
    model.train()  # transformers checkpoints gradients only in training mode
    if trainable and args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    offload = args.cpu_offload and device.is_accelerator
    shard = partial(
        fsdp.fully_shard,
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
        mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=DTYPES[args.dtype], reduce_dtype=torch.float32),
        offload_policy=fsdp.CPUOffloadPolicy() if offload else fsdp.OffloadPolicy(),
    )
    if args.compile:
        compile_layers(model)
    for layer in model.get_decoder().layers:
        shard(layer)
    shard(model)
    model.to_empty(device="cpu" if offload else device.torch_device)
    checkpoint.load_hf_weights(model, folder)
    model.token_logprobs = MethodType(token_logprobs, model)
    fsdp.register_fsdp_forward_method(model, "token_logprobs")
    return model


def make_micro_batches(model: nn.Module, samples: list[Sample], max_tokens: int, device: Device) -> list[list[Sample]]:
    """Split samples into micro-batches for which the model computes at most `max_tokens` tokens.

    Every forward and backward is a collective, so all ranks must run equally many: short ranks get empty ones.
    """
    micro_batches = packing.split(samples, max_tokens, is_packed=packing.is_packed(model))
    count = torch.tensor(len(micro_batches), device=device.torch_device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return micro_batches + [[] for _ in range(int(count) - len(micro_batches))]


# Differs from algos/grpo.py: trained tokens may lie anywhere in the sequence.
def collate(samples: list[Sample], device: Device) -> MicroBatch:
    """Pad examples on the right. No examples: one row of two tokens whose second counts for nothing."""
    is_empty = not samples
    if is_empty:
        samples = [Sample([0, 0], [0, 1])]
    input_ids = pad_sequence([torch.tensor(sample.input_ids) for sample in samples], batch_first=True)
    is_trained = pad_sequence([torch.tensor(sample.loss_mask) for sample in samples], batch_first=True).bool()
    rows, columns = is_trained.nonzero(as_tuple=True)
    offsets = is_trained.cumsum(dim=1)[rows, columns] - 1
    lengths = is_trained.sum(dim=1)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float() * (not is_empty)
    layout = packing.make_layout([0] * len(samples), [sample.num_tokens for sample in samples], range(len(samples)))
    batch = MicroBatch(input_ids, layout, rows, columns, offsets, mask)
    return MicroBatch(**{name: device.send(value) for name, value in vars(batch).items()})


def compute_logprobs(model: nn.Module, batch: MicroBatch, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the response tokens, (b, T) fp32, 0 in padded positions."""
    logprobs, entropies = model.token_logprobs(batch, args.temperature, args.logits_chunk_rows)
    zeros, index = torch.zeros_like(batch.response_mask), (batch.rows, batch.offsets)
    return zeros.index_put(index, logprobs), zeros.index_put(index, entropies)


COLUMNS = [
    Column("loss", "loss"),
    Column("entropy", "entropy"),
    Column("lr", "lr", ".1e"),
    Column("grad_norm", "grad", ".2f"),
    Column("perf/tokens_per_s", "tok/s", ",.0f"),
    Column("time/step", "s/step", ".2f"),
]


# Differs from algos/grpo.py: the loss is what there is to evaluate.
@torch.no_grad()
def evaluate(dataset: data.SFTDataset, model: nn.Module, args: Args, device: Device) -> dict[str, float]:
    """Mean cross-entropy and perplexity of the trained tokens of all rows: over all ranks."""
    rows = range(dist.get_rank(), len(dataset), dist.get_world_size())
    samples = [Sample(**vars(dataset[row])) for row in rows]
    nll = 0.0
    for micro_batch in make_micro_batches(model, samples, args.micro_batch_tokens, device):
        batch = collate(micro_batch, device)
        logprobs, _ = compute_logprobs(model, batch, args)
        nll -= (logprobs * batch.response_mask).sum()
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    loss = launch.all_reduce_means(({"loss": nll}, tokens), device=device)["loss"]
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 50.0))}


# -- the run ----------------------------------------------------------------------------------------------------------


# Differs from algos/grpo.py: batches come from the data, not from the engine.
def main(args: Args) -> None:
    # ==== Set-up: data and model; then the run that is resumed, if one is ====
    device = get_device()
    arguments.fill_in(args, TINY_DEFAULTS if args.model.startswith(TINY) else DEFAULTS, device)
    arguments.check_counts(args, ("batch_size", "num_epochs", "max_length", *arguments.UPDATE_COUNTS[3:]))
    data.check_files(args.train_files + args.test_files, columns=())
    rank, world_size = launch.init_distributed(device, timeout_s=args.watchdog_s)
    arguments.check_batch_size(args.batch_size, longest=args.max_length, args=args)
    folder = checkpoint.resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    load = partial(
        data.load_sft, tokenizer=tokenizer, max_length=args.max_length,
        chat_template_kwargs=launch.json_object(args.chat_template_kwargs, flag="--chat-template-kwargs"),
    )  # fmt: skip
    train_data = load(args.train_files)
    test_data = load(args.test_files) if args.test_files and args.eval_every else None
    sampler = data.BatchSampler(len(train_data), args.batch_size, args.seed, rank=rank, world_size=world_size)
    if args.steps is None:
        args.steps = max(1, args.num_epochs * len(train_data) // args.batch_size)

    run_dir, resume_path = checkpoint.find_run(args, script=__file__)
    is_resumed = args.resume or resume_path is not None
    tracker = Tracker(
        args, script=__file__, rank=rank, total_steps=args.steps, columns=COLUMNS, run_dir=run_dir,
        resume=is_resumed, wandb_project=args.wandb_project,
    )  # fmt: skip
    tracker.note(arguments.describe(args, device, train_data.report))
    checkpointer = checkpoint.Checkpointer(tracker.run_dir / "checkpoints", keep=args.keep_checkpoints)
    phases = launch.Phases(device, watchdog_s=args.watchdog_s)

    with phases("set-up"):
        device.seed(args.seed)
        model = shard_model(folder, args, device, trainable=True)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=args.adam_betas, weight_decay=args.weight_decay, fused=True
        )
        modules = {"policy": (model, optimizer)}
        state, rank_state = {"step": 0, "first_eval": None}, None
        if resume_path:
            state, rank_state = checkpointer.load(resume_path, modules=modules)
            sampler.load_state_dict(state["sampler"])
        if is_resumed:
            tracker.resume(state["step"] if resume_path else -1)
        if rank_state:
            device.set_rng_state(rank_state["rng"])

    if test_data and state["first_eval"] is None:
        with phases("evaluate"):
            state["first_eval"] = evaluate(test_data, model, args, device)
        tracker.log_eval(0, state["first_eval"])
    step = state["step"]
    updates = optim.Updates(args, tracker=tracker, state=state)
    schedule = {"warmup": args.warmup_steps, "total": args.steps, "decay": args.lr_decay}

    while state["step"] < args.steps:
        state["step"] += 1
        step = state["step"]
        phases.start_step()

        # ==== 5. Update ====
        sums: dict[str, torch.Tensor] = {}
        with phases("update"):
            samples = [Sample(**vars(train_data[row])) for row in sampler.next_batch()]
            counts = launch.all_reduce_sums({"tokens": sum(sum(sample.loss_mask) for sample in samples)}, device)
            micro_batches = make_micro_batches(model, samples, args.micro_batch_tokens, device)
            for i, micro_batch in enumerate(micro_batches):
                model.set_requires_gradient_sync(not args.delay_gradient_reduction or i == len(micro_batches) - 1)
                batch = collate(micro_batch, device)
                new_logprobs, entropy = compute_logprobs(model, batch, args)
                loss, metrics = compute_loss(
                    new_logprobs=new_logprobs, response_mask=batch.response_mask, num_tokens=counts["tokens"]
                )
                updates.watch(micro_batch, loss, new_logprobs)
                (loss * world_size).backward()  # FSDP averages gradients over ranks, the loss is a sum
                metrics |= {"entropy": (entropy * batch.response_mask).sum()}
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + value
            lr = args.lr * optim.lr_factor(step - 1, **schedule)
            grad_norm = updates.apply(model, optimizer, lr=lr, step=step)

        # ==== 7. Log, evaluate, save ====
        trained_tokens = sum(sum(sample.loss_mask) for sample in samples)
        tokens = {"tokens": sum(sample.num_tokens for sample in samples)}
        means = launch.all_reduce_means((sums, trained_tokens), (tokens, len(samples)), device=device)
        tokens_per_step = means.pop("tokens") * args.batch_size
        optimisation = {"grad_norm": grad_norm, "lr": lr, "bad_updates": updates.bad}
        tracker.log(step, means | optimisation | phases.metrics(tokens=tokens_per_step))

        is_last, stop = step == args.steps, launch.stop_requested(device)
        evaluated = bool(test_data) and (is_last or step % args.eval_every == 0)
        if evaluated:
            with phases("evaluate"):
                last_eval = evaluate(test_data, model, args, device)
            tracker.log_eval(step, last_eval)
        if stop or (args.save_every and (is_last or step % args.save_every == 0)):
            with phases("save"):
                checkpointer.save(
                    step, modules=modules, extra=state | {"sampler": sampler.state_dict()},
                    rank_state={"rng": device.rng_state()}, score=-last_eval["eval/loss"] if evaluated else None,
                )  # fmt: skip
        if stop and not is_last:
            tracker.note(f"stopped after step {step}; go on with --resume-from {tracker.run_dir}")
            break

    # ==== The end ====
    checkpointer.wait()
    if args.export and step == args.steps:
        checkpoint.export_hf(model, tokenizer, tracker.run_dir / "hf", dtype=DTYPES[args.export_dtype], source=folder)
    tracker.conclude(step, panels={"loss": ["loss", "eval/loss"]})


if __name__ == "__main__":
    launch.launch(main, Args)
