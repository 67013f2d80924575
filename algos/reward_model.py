"""Reward model: a score for a prompt and a response, learnt from pairs of which people (or rules) preferred one.

A language model whose head is replaced by one number: r(x, y) is what it says at the last token of the response y to
the prompt x. The better response of a pair should get the higher score (Bradley and Terry 1952; Ouyang et al. 2022,
"InstructGPT", arXiv 2203.02155, equation 1):

    L = -1/N sum_i  log sigmoid(r(x_i, chosen_i) - r(x_i, rejected_i))

N counts the pairs of the whole optimizer step, over all micro-batches and ranks. Only differences are learnt: the zero
of the scale is where training left it. algos/ppo.py --reward-model takes the folder that this script writes.

Where this file departs from the paper, on purpose:
  1. A row is one pair. The paper compares K responses and takes all K(K-1)/2 pairs of a prompt in one step.
  2. No constant is subtracted in the end to give demonstrations a mean score of 0: PPO's critic learns the offset.
  3. The head starts from 0, so the first loss is ln 2 and no pair is right or wrong (accuracy counts ties as a half).

    torchrun --nproc_per_node 2 algos/reward_model.py               # the embedded tiny task, on a CPU
    torchrun --nproc_per_node 1 algos/reward_model.py --model HuggingFaceTB/SmolLM2-135M-Instruct \
        --train-files data/hh_rlhf/train.parquet --test-files data/hh_rlhf/test.parquet
    torchrun --nproc_per_node 8 algos/reward_model.py --model Qwen/Qwen2.5-7B-Instruct \
        --train-files data/hh_rlhf/train.parquet --test-files data/hh_rlhf/test.parquet

Rows have a `prompt` (text or messages), `chosen` and `rejected`; or the latter two are whole conversations.

Shapes: b pairs of a micro-batch in 2b rows (the chosen ones first), L tokens of the longest of them, H hidden size.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from common import arguments, checkpoint, data, launch, optim, packing
from common.device import Device, get_device
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
    # Differs from algos/grpo.py: a reward model is fine, too.
    model: str = f"{TINY}/model"
    """Folder or hub name of a Hugging Face causal language model, or of a reward model to train further."""
    # Differs from algos/grpo.py: the rows are pairs.
    train_files: tuple[str, ...] = (f"{TINY}/pairs_train.parquet",)
    """Parquet files, folders or globs with `prompt`, `chosen` and `rejected`."""
    # Differs from algos/grpo.py: the rows are pairs.
    test_files: tuple[str, ...] = (f"{TINY}/pairs_test.parquet",)
    """The same for evaluation. No names: no evaluation."""
    max_length: int = 2048
    """Pairs with more tokens on either side, the prompt included, are dropped and counted."""
    chat_template_kwargs: str = "{}"
    """JSON passed to the chat template, for example '{"enable_thinking": false}'."""
    trust_remote_code: bool = False
    """Let the model's repository run its own Python code."""

    # -- optimisation --
    batch_size: int = 64
    """Pairs in one optimizer step, over all ranks (the paper: those of 64 prompts)."""
    num_epochs: int = 1
    """Passes over the training data (the paper: 1, since more overfits)."""
    # Differs from algos/grpo.py: by default the data decide.
    steps: int | None = None
    """Optimizer steps; default: what --num-epochs takes."""
    # Differs from algos/grpo.py: a supervised step is larger.
    lr: float | None = None
    """Peak learning rate of AdamW; default 1e-5 (the paper: 9e-6), for the embedded model 1e-3."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises from 0; default 10."""
    # Differs from algos/grpo.py: the paper's choice.
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
    # Differs from algos/grpo.py: the pairs of the test files are evaluated.
    eval_every: int = 100
    """Evaluate on the test pairs before the first step, every n steps and after the last; 0: never."""
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


# Differs from algos/grpo.py: the Bradley-Terry model.
def compute_loss(
    *, chosen_scores: torch.Tensor, rejected_scores: torch.Tensor, pair_mask: torch.Tensor, num_pairs: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Equation 1 of the paper, over the number of pairs of the whole optimizer step. Arguments are (b,).

    Returns the loss and metrics, each summed over the pairs: the caller divides by their global number.
    """
    margin = chosen_scores - rejected_scores
    loss = -(F.logsigmoid(margin) * pair_mask).sum()
    metrics = {
        "loss": loss,
        "accuracy": (((margin > 0) + 0.5 * (margin == 0)) * pair_mask).sum(),
        "margin": (margin * pair_mask).sum(),
        "score_chosen": (chosen_scores * pair_mask).sum(),
        "score_rejected": (rejected_scores * pair_mask).sum(),
    }
    return loss / num_pairs, {name: value.detach() for name, value in metrics.items()}


# -- shared blocks: the same in every script --------------------------------------------------------------------------


# Differs from algos/grpo.py: a pair of given responses.
@dataclass
class Sample:
    """One pair: two responses to a prompt. Token ids, each to the end of its turn."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of both responses."""
        return len(self.prompt_ids) + len(self.chosen_ids) + len(self.rejected_ids)


# Differs from algos/grpo.py: one number a row is read.
@dataclass
class MicroBatch:
    """Pairs padded on the right, on the device. Masks come from lengths: a pad id may be a real token too."""

    input_ids: torch.Tensor  # (2b, L): the chosen ones, then the rejected ones
    layout: packing.Layout  # how they go through the model: without padding, a pair's prompt once
    rows: torch.Tensor  # (2b,) 0 to 2b - 1
    columns: torch.Tensor  # (2b,) the last real token of each row
    pair_mask: torch.Tensor  # (b,) fp32, 0 for a pair that only fills up


def token_scores(self: nn.Module, batch: MicroBatch, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """What the head says at the tokens [rows, columns] of batch.input_ids: (N,) fp32. A forward method, for FSDP."""
    hidden = packing.hidden_at(self.get_decoder(), batch.input_ids, batch.layout, rows, columns)  # (N, H)
    return hidden.float() @ self.score.weight[0].float()


# Differs from algos/grpo.py: the head is one number.
def shard_model(folder: Path, args: Args, device: Device, *, trainable: bool) -> nn.Module:
    """The model of `folder` with a head of one number, sharded over all ranks by FSDP2; no rank ever holds all of it.

    It is built without memory, sharded, and only then given memory and weights, each rank reading its own slices.
    A folder without such a head gives one of zeros.
    A trainable model keeps fp32 master weights and computes in args.dtype; a frozen one is stored in that dtype.
    """
    config = AutoConfig.from_pretrained(folder, num_labels=1, trust_remote_code=args.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(
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
    checkpoint.load_hf_weights(model, folder, zero_init=["score.weight"], skip=["lm_head.weight"])
    model.token_scores = MethodType(token_scores, model)
    fsdp.register_fsdp_forward_method(model, "token_scores")
    return model


def make_micro_batches(model: nn.Module, samples: list[Sample], max_tokens: int, device: Device) -> list[list[Sample]]:
    """Split samples into micro-batches for which the model computes at most `max_tokens` tokens.

    Every forward and backward is a collective, so all ranks must run equally many: short ranks get empty ones.
    """
    micro_batches = packing.split(samples, max_tokens, is_packed=packing.is_packed(model))
    count = torch.tensor(len(micro_batches), device=device.torch_device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return micro_batches + [[] for _ in range(int(count) - len(micro_batches))]


# Differs from algos/grpo.py: two rows a pair.
def collate(samples: list[Sample], device: Device) -> MicroBatch:
    """Pad pairs on the right. No pairs: one of single tokens that counts for nothing."""
    is_empty = not samples
    if is_empty:
        samples = [Sample([0], [0], [0])]
    sequences = [sample.prompt_ids + sample.chosen_ids for sample in samples]
    sequences += [sample.prompt_ids + sample.rejected_ids for sample in samples]
    batch = MicroBatch(
        input_ids=pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True),
        layout=packing.make_layout(
            [len(sample.prompt_ids) for sample in samples * 2],
            [len(sequence) for sequence in sequences],
            [*range(len(samples))] * 2,
        ),
        rows=torch.arange(len(sequences)),
        columns=torch.tensor([len(sequence) - 1 for sequence in sequences]),
        pair_mask=torch.ones(len(samples)) * (not is_empty),
    )
    return MicroBatch(**{name: device.send(value) for name, value in vars(batch).items()})


def pair_scores(model: nn.Module, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """The scores of a micro-batch as `compute_loss` takes them, each (b,)."""
    chosen, rejected = model.token_scores(batch, batch.rows, batch.columns).chunk(2)
    return {"chosen_scores": chosen, "rejected_scores": rejected, "pair_mask": batch.pair_mask}


def choose_pad_token(tokenizer: PreTrainedTokenizerBase, last_ids: set[int]) -> int:
    """The id that may fill up rows for AutoModelForSequenceClassification, which reads the last token that is not it.

    The tokenizer's own pad token, unless responses end in that one (`last_ids`): then another special token.
    Raises UserError when there is none.
    """
    ids = [tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids]
    found = next((token for token in ids if token is not None and token not in last_ids), None)
    launch.require(
        found is not None,
        f"responses end in {tokenizer.convert_ids_to_tokens(sorted(last_ids))}, and the tokenizer has no other special "
        "token that could pad: add one to it (tokenizer.add_special_tokens)",
    )
    return found


COLUMNS = [
    Column("loss", "loss"),
    Column("accuracy", "acc"),
    Column("margin", "margin", ".2f"),
    Column("lr", "lr", ".1e"),
    Column("grad_norm", "grad", ".2f"),
    Column("perf/tokens_per_s", "tok/s", ",.0f"),
    Column("time/step", "s/step", ".2f"),
]
CURVES = {"accuracy": ["accuracy", "eval/accuracy"], "loss": ["loss", "eval/loss"]}


# Differs from algos/grpo.py: pairs are compared.
@torch.no_grad()
def evaluate(dataset: data.PairDataset, model: nn.Module, args: Args, device: Device) -> dict[str, float]:
    """Loss, accuracy, margin and scores of all test pairs, over all ranks."""
    rows = range(dist.get_rank(), len(dataset), dist.get_world_size())
    samples = [Sample(**vars(dataset[row])) for row in rows]
    sums: dict[str, torch.Tensor] = {}
    for micro_batch in make_micro_batches(model, samples, args.micro_batch_tokens, device):
        _, metrics = compute_loss(**pair_scores(model, collate(micro_batch, device)), num_pairs=1.0)
        sums = {name: value + sums.get(name, 0.0) for name, value in metrics.items()}
    means = launch.all_reduce_means((sums, len(samples)), device=device)
    return {f"eval/{name}": value for name, value in means.items()}


# -- the run ----------------------------------------------------------------------------------------------------------


# Differs from algos/grpo.py: batches come from the data, not from the engine.
def main(args: Args) -> None:
    # ==== Set-up: data and model; then the run that is resumed, if one is ====
    device = get_device()
    arguments.fill_in(args, TINY_DEFAULTS if args.model.startswith(TINY) else DEFAULTS, device)
    arguments.check_counts(args, ("batch_size", "num_epochs", "max_length", *arguments.UPDATE_COUNTS[3:]))
    data.check_files(args.train_files + args.test_files, columns=("chosen", "rejected"))
    rank, world_size = launch.init_distributed(device, timeout_s=args.watchdog_s)
    arguments.check_batch_size(args.batch_size, longest=2 * args.max_length, args=args)
    folder = checkpoint.resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    load = partial(
        data.load_pairs, tokenizer=tokenizer, max_length=args.max_length,
        chat_template_kwargs=launch.json_object(args.chat_template_kwargs, flag="--chat-template-kwargs"),
    )  # fmt: skip
    train_data = load(args.train_files)
    test_data = load(args.test_files) if args.test_files and args.eval_every else None
    first_pairs = [train_data[row] for row in range(min(8, len(train_data)))]
    pad_id = choose_pad_token(tokenizer, {pair.chosen_ids[-1] for pair in first_pairs})
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
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
        model.config.pad_token_id = pad_id
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=args.adam_betas, weight_decay=args.weight_decay, fused=True
        )
        modules = {"reward_model": (model, optimizer)}
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
            micro_batches = make_micro_batches(model, samples, args.micro_batch_tokens, device)
            for i, micro_batch in enumerate(micro_batches):
                model.set_requires_gradient_sync(not args.delay_gradient_reduction or i == len(micro_batches) - 1)
                scores = pair_scores(model, collate(micro_batch, device))
                loss, metrics = compute_loss(**scores, num_pairs=args.batch_size)
                updates.watch(
                    micro_batch, loss, torch.stack([scores["chosen_scores"], scores["rejected_scores"]], dim=1)
                )
                (loss * world_size).backward()  # FSDP averages gradients over ranks, the loss is a sum
                sums = {name: value + sums.get(name, 0.0) for name, value in metrics.items()}
            lr = args.lr * optim.lr_factor(step - 1, **schedule)
            grad_norm = updates.apply(model, optimizer, lr=lr, step=step)

        # ==== 7. Log, evaluate, save ====
        tokens = {"tokens": sum(len(s.prompt_ids) * 2 + len(s.chosen_ids) + len(s.rejected_ids) for s in samples)}
        means = launch.all_reduce_means((sums | tokens, len(samples)), device=device)
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
                    rank_state={"rng": device.rng_state()}, score=last_eval["eval/accuracy"] if evaluated else None,
                )  # fmt: skip
        if stop and not is_last:
            tracker.note(f"stopped after step {step}; go on with --resume-from {tracker.run_dir}")
            break

    # ==== The end ====
    checkpointer.wait()
    if args.export and step == args.steps:
        checkpoint.export_hf(model, tokenizer, tracker.run_dir / "hf", dtype=DTYPES[args.export_dtype], source=folder)
    tracker.conclude(step, panels=CURVES)


if __name__ == "__main__":
    launch.launch(main, Args)
