"""The arithmetic of memory: exact where it can be, and near what is measured where it is an estimate."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, environment

from algos.grpo import Args
from common import memory
from common.device import GIB, Device, get_device

CPU = Device("CPU", "cpu", 0, "gloo", "", can_sleep=False)


@pytest.fixture(scope="module")
def seven_b(tmp_path_factory):
    """Qwen2.5-7B's architecture, by its public configuration."""
    from transformers import Qwen2Config

    folder = tmp_path_factory.mktemp("seven_b")
    Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def arguments(**changes) -> Args:
    settings = {"dtype": "bf16", "max_response_length": 1024, "gradient_checkpointing": True, "kv_cache_gib": 20}
    return Args(**settings | changes)


def test_seven_b_on_eight_ranks_by_hand(seven_b):
    rows = memory.plan(seven_b, arguments(), ranks=8, frozen_models=1, device=CPU)
    parameters = 7_615_616_512  # the model card: 7.61 B
    assert rows["parameters, fp32 master (sharded)"] == 4 * parameters / 8
    assert rows["gradients, fp32 (sharded)"] == 4 * parameters / 8
    assert rows["AdamW moments, fp32 (sharded)"] == 8 * parameters / 8
    assert rows["frozen models (sharded)"] == 2 * parameters / 8
    assert rows["engine weights"] == 2 * parameters
    assert rows["logits, 1,024 rows x 152,064"] == (2 + 4 + 4) * 1024 * 152064
    assert rows["engine KV cache"] == 20 * GIB
    training = sum(size for name, size in rows.items() if not name.startswith("engine"))
    assert training < 40 * GIB  # fits an 80 GB card beside a sleeping engine


def test_kv_cache_of_a_token_by_hand(seven_b):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(seven_b)
    assert memory.kv_bytes_per_token(config, "bf16") == 2 * 28 * 4 * 128 * 2  # keys and values
    assert memory.kv_bytes_per_token(AutoConfig.from_pretrained(TINY / "model"), "fp32") == 2 * 3 * 2 * 32 * 4


def test_the_engine_gets_what_a_step_needs_and_no_more_than_its_share(monkeypatch):
    args = arguments(
        kv_cache_gib=None, dtype="fp32", prompts_per_step=8, group_size=4, max_prompt_length=100, max_response_length=28
    )
    # Prompts of 100 tokens: 3 full blocks of 32 tokens for the group. For each response the 4 tokens that are left with
    # its own 28, so one block, and one that is being filled.
    block = 32 * 2 * 3 * 2 * 32 * 4
    needed = 8 * (3 + 4 * 2) * block
    assert memory.kv_cache_bytes(TINY / "model", args, CPU, ranks=1) == needed
    assert memory.kv_cache_bytes(TINY / "model", args, CPU, ranks=2) == needed / 2
    to_come = memory.bytes_to_come(memory.sizes_of(TINY / "model", args)[0].total, args, CPU, ranks=1)
    monkeypatch.setattr(Device, "memory", lambda self: (to_come + needed, 100 * needed))
    assert memory.kv_cache_bytes(TINY / "model", args, CPU, ranks=1) == needed / 2  # half of what is free then
    monkeypatch.setattr(Device, "memory", lambda self: (0, 100 * needed))
    assert memory.kv_cache_bytes(TINY / "model", args, CPU, ranks=1) == 2 * (3 + 2) * block  # two sequences


def test_a_prompt_of_whole_blocks_shares_all_but_the_last():
    """The engine computes a prompt's last token again, and with it its block."""
    args = arguments(
        kv_cache_gib=None, dtype="fp32", prompts_per_step=1, group_size=8, max_prompt_length=96, max_response_length=32
    )
    block = 32 * 2 * 3 * 2 * 32 * 4
    assert memory.kv_cache_bytes(TINY / "model", args, CPU, ranks=1) == (2 + 8 * (1 + 1 + 1)) * block


def test_what_comes_after_the_kv_cache_is_kept_free():
    """The engine's weights, and the moments of the first update: else the second rollout would find no memory."""
    parameters = 7_615_616_512
    gpu = Device("CUDA", "cuda", 0, "cpu:gloo,cuda:nccl", "", can_sleep=True)
    assert memory.bytes_to_come(parameters, arguments(), gpu, ranks=8) == (2 + 8 / 8) * parameters
    assert memory.bytes_to_come(parameters, arguments(rollout_tp=2), gpu, ranks=8) == (2 / 2 + 8 / 8) * parameters
    assert memory.bytes_to_come(parameters, arguments(cpu_offload=True), gpu, ranks=8) == 2 * parameters
    with_critic = SimpleNamespace(**vars(arguments()), critic_lr=1e-5)
    assert memory.bytes_to_come(parameters, with_critic, gpu, ranks=8) == (2 + 16 / 8) * parameters
    evaluation = SimpleNamespace(dtype="bf16", rollout_tp=1)
    assert memory.bytes_to_come(parameters, evaluation, gpu, ranks=8) == 2 * parameters


def test_heads_are_never_split_over_ranks(seven_b):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(seven_b)  # 4 heads of keys
    whole = memory.kv_bytes_per_token(config, "bf16")
    assert [whole / memory.kv_bytes_per_token(config, "bf16", tp=tp) for tp in (1, 2, 4, 8)] == [1, 2, 4, 4]


def test_gradient_checkpointing_and_delayed_reduction_move_the_plan(seven_b):
    def activations(**changes) -> float:
        rows = memory.plan(seven_b, arguments(**changes), ranks=8, frozen_models=0, device=CPU)
        return next(size for name, size in rows.items() if name.startswith("activations"))

    assert activations() < activations(gradient_checkpointing=False) / 10
    assert activations(micro_batch_tokens=4096) == pytest.approx(activations() / 2)
    rows = memory.plan(seven_b, arguments(delay_gradient_reduction=True), ranks=8, frozen_models=0, device=CPU)
    assert rows["unsharded gradient until the last micro-batch"] == 4 * 7_615_616_512  # fp32


def test_activations_are_near_what_autograd_keeps():
    """Against the bytes that autograd really saves for the backward pass of the embedded model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32)
    saved: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.get_decoder()(torch.randint(6, 100, (16, 64)), use_cache=False).last_hidden_state
    assert hidden.requires_grad
    args = arguments(dtype="fp32", micro_batch_tokens=16 * 64, gradient_checkpointing=False)
    rows = memory.plan(TINY / "model", args, ranks=1, frozen_models=0, device=CPU)
    planned = next(size for name, size in rows.items() if name.startswith("activations"))
    assert 0.6 < planned / sum(saved.values()) < 1.6


def test_dry_run_prints_the_table_and_loads_nothing(seven_b):
    """The folder has no weights: only the configuration is read."""
    command = [sys.executable, str(ROOT / "algos/grpo.py"), "--model", str(seven_b), "--dry-run", "8"]
    command += ["--dtype", "bf16", "--gradient-checkpointing", "--kv-cache-gib", "20"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert "8 ranks" in run.stdout
    assert f"{4 * 7_615_616_512 / 8 / GIB:.3f}" in run.stdout
    assert "while training" in run.stdout
    assert get_device().name in run.stdout


def test_the_table_in_the_docs_is_what_the_dry_run_prints(seven_b):
    args = arguments(model=str(seven_b), prompts_per_step=128, max_response_length=2048, micro_batch_tokens=16384)
    printed = memory.table(args, ranks=8, frozen_models=0).splitlines()[:-1]  # the last line is about this machine
    shown = (ROOT / "docs" / "memory.md").read_text()
    block = shown.split("<!-- table:begin -->")[1].split("<!-- table:end -->")[0]
    assert [line.removeprefix("    ") for line in block.strip("\n").splitlines()] == printed
