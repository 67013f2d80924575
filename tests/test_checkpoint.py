"""Checkpoints and Hugging Face folders: exactness, refusals, failing disks; in one process and on two ranks."""

import errno
import json
import math
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from common import checkpoint
from common.checkpoint import Checkpointer, export_hf, find_run, incomplete, load_hf_weights, resolve_model
from common.device import get_device
from common.launch import UserError

VOCABULARY = 67  # does not divide by 2: the ranks' shares of the embedding differ
TOKENS = torch.arange(24).view(2, 12) * 2
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# ---- helpers ---------------------------------------------------------------------------------------------------------


def tiny_config(tied: bool = True) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        eos_token_id=2,
        pad_token_id=0,
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<unk>": 1, "<eos>": 2, **{chr(48 + i): i for i in range(3, VOCABULARY)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tokenizer


def make_hf_folder(folder: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    """A random model with what a hub folder has: two files with an index, generation config, tokenizer, template."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(tied), dtype=dtype)
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = True
    model.save_pretrained(folder, max_shard_size="40KB")
    tiny_tokenizer().save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def build(folder: Path, *, shard: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    """As the scripts do it: meta device, shard, materialise, read."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    if shard:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    load_hf_weights(model, folder)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every number that training depends on, in full."""
    state = weights_of(model)
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}.{slot}"] = whole(value)
    return state


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        logits = model(input_ids=TOKENS).logits if hasattr(model, "config") else model(torch.ones(4, 5))
        logits.logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def small(lr: float = 0.01) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def save_small(folder: Path, *steps: int, scores: dict[int, float] | None = None, **options: Any) -> Checkpointer:
    checkpointer = Checkpointer(folder, **options)
    model, optimizer = small()
    for step in steps:
        train(model, optimizer, 1)
        score = (scores or {}).get(step)
        checkpointer.save(
            step, modules={"policy": (model, optimizer)}, extra={"step": step}, rank_state={"r": 0}, score=score
        )
    checkpointer.wait()
    return checkpointer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, so that FSDP2 works."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- exactness -------------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    model, optimizer = small()
    train(model, optimizer, 3)
    checkpointer = Checkpointer(tmp_path)
    extra = {"epoch": 1, "position": 48, "best": 0.5, "tensor": torch.arange(3)}
    checkpointer.save(3, modules={"policy": (model, optimizer)}, extra=extra, rank_state={"rng": torch.get_rng_state()})
    saved = state_of(model, optimizer)
    train(model, optimizer, 2)

    model2, optimizer2 = small(lr=7.0)
    path = checkpointer.latest()
    loaded, rank_state = checkpointer.load(path, modules={"policy": (model2, optimizer2)})
    assert path.name == "step_3"
    assert torch.equal(loaded.pop("tensor"), extra.pop("tensor")) and loaded == extra
    assert rank_state["rng"].dtype == torch.uint8
    assert optimizer2.param_groups[0]["lr"] == 0.01
    assert_same(state_of(model2, optimizer2), saved)
    train(model2, optimizer2, 2)
    assert_same(state_of(model2, optimizer2), state_of(model, optimizer))


def test_what_is_written_is_the_state_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer waits until the optimizer has changed everything in place: the file must not know."""
    gate, real = threading.Event(), dcp.FileSystemWriter.write_data

    def write_data(self: Any, *arguments: Any) -> Any:
        assert gate.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write_data)
    model, optimizer = small()
    train(model, optimizer, 1)
    saved = state_of(model, optimizer)
    position = torch.zeros(1)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(
        1, modules={"policy": (model, optimizer)}, extra={"position": position}, rank_state={"position": position}
    )
    train(model, optimizer, 2)  # save has returned although nothing is written yet
    position += 1
    assert names(tmp_path) == ["step_1.tmp"]
    gate.set()
    model2, optimizer2 = small()
    extra, rank_state = checkpointer.load(checkpointer.latest(), modules={"policy": (model2, optimizer2)})
    assert_same(state_of(model2, optimizer2), saved)
    assert extra["position"] == 0 and rank_state["position"] == 0


def test_saving_before_the_first_update_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = small()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, modules={"policy": (model, optimizer)}, extra={}, rank_state={})
    assert not optimizer.state
    model2, optimizer2 = small()
    train(model2, optimizer2, 1)
    checkpointer.load(checkpointer.latest(), modules={"policy": (model2, optimizer2)})
    assert not optimizer2.state
    train(model, optimizer, 1)
    train(model2, optimizer2, 1)
    assert_same(state_of(model2, optimizer2), state_of(model, optimizer))


def test_parameters_without_optimizer_state_and_modules_without_optimizer(tmp_path: Path) -> None:
    model, _ = small()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    train(model, optimizer, 1)
    frozen = nn.Linear(2, 2)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, modules={"policy": (model, optimizer), "reference": (frozen, None)}, extra={}, rank_state={})
    model2, frozen2 = small()[0], nn.Linear(2, 2)
    optimizer2 = torch.optim.AdamW(model2[1].parameters(), lr=0.1)
    checkpointer.load(checkpointer.latest(), modules={"policy": (model2, optimizer2), "reference": (frozen2, None)})
    assert_same(state_of(model2, optimizer2), state_of(model, optimizer))
    assert torch.equal(frozen.weight, frozen2.weight)


def test_random_generators_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    device = get_device()
    device.seed(5)
    checkpointer = save_small(tmp_path)
    checkpointer.save(1, modules={"m": (nn.Linear(1, 1), None)}, extra={}, rank_state={"rng": device.rng_state()})
    checkpointer.wait()
    expected = (torch.rand(3).tolist(), np.random.rand(3).tolist())
    _, rank_state = checkpointer.load(checkpointer.latest(), modules={"m": (nn.Linear(1, 1), None)})
    device.set_rng_state(rank_state["rng"])
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == expected


def test_kernel_choices_are_not_restored(tmp_path: Path) -> None:
    checkpointer = save_small(tmp_path, 1)
    model = small()[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, foreach=False)
    checkpointer.load(checkpointer.latest(), modules={"policy": (model, optimizer)})
    assert optimizer.param_groups[0]["foreach"] is False and optimizer.param_groups[0]["lr"] == 0.01


def test_wrapped_modules_have_clean_names(tmp_path: Path) -> None:
    plain, _ = small()
    wrapped = torch.compile(plain, backend="eager")
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, modules={"policy": (wrapped, None)}, extra={}, rank_state={})
    other, _ = small()
    checkpointer.load(checkpointer.latest(), modules={"policy": (other, None)})
    assert_same(weights_of(other), weights_of(plain))


# ---- which one is kept, which one is used ----------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    scores = {1: 0.1, 2: 0.9, 3: 0.9, 4: 0.2, 10: 0.3, 11: 0.1}
    save_small(tmp_path, *scores, scores=scores, keep=2)
    assert names(tmp_path) == ["step_10", "step_11", "step_3"]  # 3 is the newest of the two best; 10 is newer than 4
    save_small(tmp_path, 12, scores={12: math.nan}, keep=1)
    assert names(tmp_path) == ["step_12", "step_3"]


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 1"):
        Checkpointer(tmp_path, keep=0)


def test_the_last_good_one_is_never_deleted(tmp_path: Path) -> None:
    checkpointer = save_small(tmp_path, 1, 2, 3, keep=1)
    (tmp_path / "step_3" / "rank_0.pt").unlink()
    save_small(tmp_path, 2, keep=1)  # the broken step 3 is newer, but does not count as kept
    assert incomplete(tmp_path / "step_2") is None
    assert checkpointer.latest().name == "step_2"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda step: cut(step / "state" / "__0_0.distcp"), "__0_0.distcp has .* bytes, not"),
        (lambda step: (step / "rank_0.pt").unlink(), "rank_0.pt is missing"),
        (lambda step: (step / "manifest.json").unlink(), "no manifest.json"),
        (lambda step: cut(step / "manifest.json"), "unreadable manifest.json"),
        (lambda step: (step / "manifest.json").write_text("[]"), "unreadable manifest.json"),
    ],
)
def test_a_broken_checkpoint_is_passed_over_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Any, reason: str
) -> None:
    checkpointer = save_small(tmp_path, 4, 6)
    damage(tmp_path / "step_6")
    (tmp_path / "step_8.tmp").mkdir()
    assert checkpointer.latest().name == "step_4"
    error = capfd.readouterr().err
    assert "step_6: " in error and "step_8.tmp: unfinished" in error
    with pytest.raises(UserError, match=f"step_6: .*{reason}"):
        checkpointer.load(tmp_path / "step_6", modules={"policy": small()})
    # The resumed run reaches step 6 again and replaces it.
    save_small(tmp_path, 6)
    assert checkpointer.latest().name == "step_6"
    assert names(tmp_path) == ["step_4", "step_6"]


def test_a_kill_between_the_two_renames_of_a_replacement(tmp_path: Path) -> None:
    checkpointer = save_small(tmp_path, 6, keep=1)
    os.rename(tmp_path / "step_6", tmp_path / "step_6.old")
    assert checkpointer.latest().name == "step_6"


def test_nothing_saved_yet(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "new").latest() is None
    with pytest.raises(UserError, match="no such folder"):
        Checkpointer(tmp_path).load(tmp_path / "step_9", modules={"policy": small()})


def test_other_modules_are_refused_by_name(tmp_path: Path) -> None:
    checkpointer = save_small(tmp_path, 1)
    path = checkpointer.latest()
    with pytest.raises(UserError, match="critic"):
        checkpointer.load(path, modules={"policy": small(), "critic": small()})
    wide = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))
    with pytest.raises(UserError, match=r"policy.weights.0.weight is \[7, 5\], the model's is \[8, 5\]"):
        checkpointer.load(path, modules={"policy": (wide, torch.optim.AdamW(wide.parameters()))})
    short = nn.Sequential(nn.Linear(5, 7))
    with pytest.raises(UserError, match="policy.weights.1.weight has no place"):
        checkpointer.load(path, modules={"policy": (short, torch.optim.AdamW(short.parameters()))})
    long = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))
    with pytest.raises(UserError, match="policy.weights.2.weight is missing"):
        checkpointer.load(path, modules={"policy": (long, torch.optim.AdamW(long.parameters()))})


# ---- disks that fail -------------------------------------------------------------------------------------------------


def full(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wrong(*arguments: Any) -> None:
    raise RuntimeError("something else")


@pytest.mark.parametrize("where", ["shard", "rank file", "manifest", "rename"])
def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    checkpointer = save_small(tmp_path, 1)
    real_write, real_replace = checkpoint._write_file, os.replace
    with monkeypatch.context() as patch:
        if where == "shard":
            patch.setattr(dcp.FileSystemWriter, "write_data", full)
        elif where == "rename":
            patch.setattr(os, "replace", lambda a, b: full() if str(b).endswith("step_2") else real_replace(a, b))
        else:
            file = {"rank file": "rank_0.pt", "manifest": "manifest.json"}[where]
            patch.setattr(
                checkpoint, "_write_file", lambda path, data: full() if path.name == file else real_write(path, data)
            )
        checkpointer.save(2, modules={"policy": small()}, extra={}, rank_state={})
        with pytest.raises(UserError, match="step_2 .* No space left on device.* step_1 is complete and usable"):
            checkpointer.wait()
    assert "warning: checkpoint step_2" in capfd.readouterr().err  # said at once, not only at the next call
    assert names(tmp_path) == ["step_1"]  # the unfinished one gives its space back
    checkpointer.load(checkpointer.latest(), modules={"policy": small()})
    checkpointer.save(2, modules={"policy": small()}, extra={}, rank_state={})
    assert checkpointer.latest().name == "step_2"


def test_a_really_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """/dev/full accepts to be opened and refuses every byte."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    checkpointer = save_small(tmp_path, 1)
    real = dcp.FileSystemWriter.write_data

    def write_data(self: Any, *arguments: Any) -> Any:
        (Path(self.path) / "__0_0.distcp").symlink_to("/dev/full")
        return real(self, *arguments)

    dcp.FileSystemWriter.write_data = write_data
    try:
        checkpointer.save(2, modules={"policy": small()}, extra={}, rank_state={})
        with pytest.raises(UserError, match="No space left on device|unexpected pos"):
            checkpointer.wait()
    finally:
        dcp.FileSystemWriter.write_data = real
    assert checkpointer.latest().name == "step_1"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made.*choose another folder"):
        Checkpointer(tmp_path / "file" / "checkpoints")
    checkpointer = save_small(tmp_path / "ok", 1)

    def read_only(self: Path, *arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(UserError, match="step_2 .*Read-only file system.*step_1 is complete"):
        checkpointer.save(2, modules={"policy": small()}, extra={}, rank_state={})
    monkeypatch.undo()
    assert checkpointer.latest().name == "step_1"


# ---- nothing trusted that should not be ------------------------------------------------------------------------------


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", ["state/.metadata", "extra.pt", "rank_0.pt"])
def test_a_checkpoint_cannot_run_code(tmp_path: Path, file: str) -> None:
    checkpointer = save_small(tmp_path / "run", 1)
    path, trap = checkpointer.latest(), tmp_path / "exploded"
    if file.endswith(".pt"):
        torch.save(Bomb(trap), path / file)
    else:
        (path / file).write_bytes(pickle.dumps(Bomb(trap)))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][file] = (path / file).stat().st_size
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(pickle.UnpicklingError):
        checkpointer.load(path, modules={"policy": small()})
    assert not trap.exists()


@pytest.mark.parametrize("kind", ["extra", "rank_state"])
def test_what_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path: Path, kind: str) -> None:
    checkpointer = Checkpointer(tmp_path)
    content = {"extra": {}, "rank_state": {}, kind: {"numpy": np.random.get_state()}}
    with pytest.raises(ValueError, match=f"{kind} may hold tensors and plain Python values only"):
        checkpointer.save(1, modules={"policy": small()}, **content)
    assert names(tmp_path) == []


# ---- Hugging Face folders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", [True, False])
def test_weights_equal_those_of_from_pretrained(tmp_path: Path, one_rank: None, tied: bool, shard: bool) -> None:
    folder = make_hf_folder(tmp_path / "hf", tied=tied, dtype=torch.bfloat16)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    random_state = torch.get_rng_state()
    model = build(folder, shard=shard)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert_same(weights_of(model), weights_of(expected))
    buffers = dict(model.named_buffers())
    assert_same(buffers, dict(expected.named_buffers()))
    assert "model.rotary_emb.inv_freq" in buffers
    assert torch.equal(model(input_ids=TOKENS).logits, expected(input_ids=TOKENS).logits)


def rewrite(folder: Path, edit: Any) -> None:
    """Put the weights into one file, after `edit` changed the dict of tensors."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(foo=torch.ones(1)), "foo is unknown to the model.*save_pretrained"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"model.norm.weight: shape \[31\], the model's is"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.uint8)}),
            "model.norm.weight: stored as torch.uint8; quantized",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
            "config.json ties lm_head.weight to model.embed_tokens.weight, but the file holds two different",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, edit: Any, message: str) -> None:
    folder = make_hf_folder(tmp_path / "hf")
    rewrite(folder, edit)
    with pytest.raises(UserError, match=message):
        build(folder, shard=False)


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),  # stored twice, equal
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}),  # as old files have
        lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)],  # of the bare base model
    ],
)
def test_harmless_differences_are_accepted(tmp_path: Path, edit: Any) -> None:
    folder = make_hf_folder(tmp_path / "hf")
    expected = weights_of(AutoModelForCausalLM.from_pretrained(folder))
    rewrite(folder, edit)
    assert_same(weights_of(build(folder, shard=False)), expected)


def test_other_refusals(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with pytest.raises(ValueError, match="to_empty"):
        load_hf_weights(model, folder)
    for path in folder.glob("*.safetensors"):
        cut(path)
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        build(folder, shard=False)
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(UserError, match="no model.safetensors"):
        build(folder, shard=False)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"\.bin weights only.*save_pretrained"):
        build(folder, shard=False)


def test_checkpoints_that_need_conversion_are_refused_by_name(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **{name: getattr(tiny_config(), name) for name in ("vocab_size", "hidden_size", "head_dim")},
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="qwen3_moe checkpoints are converted.*mlp.experts.*not supported"):
        build(tmp_path, shard=False)


def test_a_critic_gets_a_new_head(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", tied=False)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    with torch.device("meta"):
        critic = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    critic.to_empty(device="cpu")
    head = {"score.weight", "score.bias"}
    with pytest.raises(UserError, match="score.weight is missing.*lm_head.weight is unknown"):
        load_hf_weights(critic, folder)
    load_hf_weights(critic, folder, zero_init=sorted(head), skip=["lm_head.weight"])
    expected = weights_of(AutoModelForCausalLM.from_pretrained(folder))
    for name, tensor in weights_of(critic).items():
        assert torch.equal(tensor, torch.zeros_like(tensor) if name in head else expected[name]), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_export_is_what_from_pretrained_expects(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch, tied: bool, dtype: torch.dtype
) -> None:
    source = make_hf_folder(tmp_path / "source", tied=tied)
    model = build(source, shard=True)
    with torch.no_grad():
        model(input_ids=TOKENS)  # leaves FSDP2's root unsharded: the export must not read freed memory
    out = tmp_path / "hf"
    out.mkdir()
    (out / "old").write_text("from an earlier export")
    export_hf(model, tiny_tokenizer(), out, dtype=dtype, source=source, max_shard_bytes=20_000)
    assert names(tmp_path) == ["hf", "source"]
    assert not (out / "old").exists()
    written = tmp_path / "plain"
    written.touch()
    assert {path.stat().st_mode for path in out.iterdir()} == {written.stat().st_mode}  # readable by others, as usual

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == dtype and json.loads((out / "config.json").read_text())["dtype"] == str(dtype)[6:]
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded.generation_config.temperature == 0.6
    tokenizer = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "A"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "A"
    files = sorted(out.glob("*.safetensors"))
    size = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    assert len(files) > 1 and size < sum(path.stat().st_size for path in files) < 1.05 * size + 200 * 40
    assert all(path.stat().st_size < 21_000 + 40 * 200 for path in files)
    stored = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    assert ("lm_head.weight" in stored) == (not tied)
    with torch.no_grad():
        expected = model.to(dtype)(input_ids=TOKENS).logits if dtype == torch.float32 else None
        if expected is not None:
            assert torch.equal(loaded(input_ids=TOKENS).logits, expected)
    assert_same(weights_of(build(out, shard=False)), {n: w.to(dtype).float() for n, w in weights_of(model).items()})


def test_a_failing_export_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_hf_folder(tmp_path / "source")
    model = build(source, shard=False)
    out = tmp_path / "hf"
    export_hf(model, tiny_tokenizer(), out, dtype=torch.float32, source=source)
    before = names(out)
    assert "model.safetensors" in before and "model.safetensors.index.json" not in before
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(UserError, match="export to .*hf failed: No space left on device"):
        export_hf(model, tiny_tokenizer(), out, dtype=torch.float32, source=source)
    assert names(out) == before and names(tmp_path) == ["hf", "source"]


def test_resolve_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_hf_folder(tmp_path / "hf")
    assert resolve_model(str(folder)) == folder
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no config.json"):
        resolve_model(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no such folder"):
        resolve_model(str(tmp_path / "a" / "b" / "missing"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(folder))
    assert resolve_model("someone/some-model") == folder

    def offline(name: str, **options: Any) -> str:
        raise FileNotFoundError("no connection\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match="someone/some-model: neither a folder nor a model that the hub gives: no conn"):
        resolve_model("someone/some-model")


# ---- two ranks -------------------------------------------------------------------------------------------------------


def two_ranks_main(rank: int, work: Path) -> None:
    """What each of two ranks does for `test_two_ranks`; it asserts by itself and leaves files for the test to check."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(work / "store"), 2), rank=rank, world_size=2)
    source = work / "source"
    reference = AutoModelForCausalLM.from_pretrained(source)

    # Slices straight from the files: uneven (67 rows), tied.
    model = build(source, shard=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.to_local().shape == ((34, 32) if rank == 0 else (33, 32))
    assert_same(weights_of(model), weights_of(reference))
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))

    # A checkpoint of one rank, resumed on two.
    optimizer = torch.optim.AdamW(model.parameters(), lr=5.0, fused=True)
    extra, rank_state = Checkpointer(work / "one").load(work / "one" / "step_2", modules={"policy": (model, optimizer)})
    assert extra == {"position": 7} and rank_state is None and optimizer.param_groups[0]["lr"] == 1e-3
    assert_same(state_of(model, optimizer), torch.load(work / "one.pt"))

    # Save, train on, load: all ranks agree, and each gets its own state back.
    train(model, optimizer, 1)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    saved = state_of(model, optimizer)
    checkpointer = Checkpointer(work / "two")
    checkpointer.save(3, modules={"policy": (model, optimizer)}, extra={"position": 8}, rank_state={"rank": rank})
    train(model, optimizer, 2)  # collectives of the trainer, while the thread of the checkpoint has its own
    expected = state_of(model, optimizer)
    path = checkpointer.latest()
    assert path == work / "two" / "step_3"
    model2 = build(source, shard=True)
    optimizer2 = torch.optim.AdamW(model2.parameters(), fused=True)
    extra, rank_state = checkpointer.load(path, modules={"policy": (model2, optimizer2)})
    assert extra == {"position": 8} and rank_state == {"rank": rank}
    assert_same(state_of(model2, optimizer2), saved)
    train(model2, optimizer2, 2)
    assert_same(state_of(model2, optimizer2), expected)
    if rank == 0:
        torch.save(saved, work / "two.pt")
        torch.save(weights_of_reference(saved, reference), work / "logits.pt")

    export_hf(build_from(saved, source), tiny_tokenizer(), work / "hf", dtype=torch.float32, source=source)

    # One rank's disk is full: both ranks hear of it.
    real_write = dcp.FileSystemWriter.write_data
    if rank == 1:
        dcp.FileSystemWriter.write_data = full
    checkpointer.save(4, modules={"policy": (model, optimizer)}, extra={}, rank_state={})
    with pytest.raises(UserError, match="step_4 .*No space left on device.*step_3 is complete"):
        checkpointer.wait()
    assert checkpointer.latest() == path
    dcp.FileSystemWriter.write_data = real_write

    # Whatever goes wrong on rank 0 alone, after the files are written: rank 1 does not wait for it.
    if rank == 0:
        Checkpointer._commit = wrong
    checkpointer.save(4, modules={"policy": (model, optimizer)}, extra={}, rank_state={})
    with pytest.raises(UserError, match="step_4 .*something else.*step_3 is complete"):
        checkpointer.wait()

    # A folder that only rank 0 fails to make.
    if rank == 0:
        Path.mkdir = full
    with pytest.raises(UserError, match="cannot be made"):
        Checkpointer(work / "three")
    dist.destroy_process_group()
    (work / f"done{rank}").touch()


def build_from(state: dict[str, torch.Tensor], source: Path) -> nn.Module:
    """The sharded model with the weights in `state`."""
    model = build(source, shard=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.distributed.tensor.distribute_tensor(state[name], parameter.device_mesh))
    return model


def weights_of_reference(state: dict[str, torch.Tensor], reference: nn.Module) -> torch.Tensor:
    """Logits of an ordinary model that has the weights in `state`."""
    reference.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, strict=False)
    with torch.no_grad():
        return reference(input_ids=TOKENS).logits


def test_two_ranks(tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_hf_folder(tmp_path / "source")
    model = build(source, shard=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 2)
    checkpointer = Checkpointer(tmp_path / "one")
    checkpointer.save(2, modules={"policy": (model, optimizer)}, extra={"position": 7}, rank_state={})
    checkpointer.wait()
    torch.save(state_of(model, optimizer), tmp_path / "one.pt")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.multiprocessing.spawn(two_ranks_main, args=(tmp_path,), nprocs=2)
    assert (tmp_path / "done0").exists() and (tmp_path / "done1").exists()

    # The checkpoint of two ranks, resumed on one.
    extra, rank_state = checkpointer.load(tmp_path / "two" / "step_3", modules={"policy": (model, optimizer)})
    assert extra == {"position": 8} and rank_state is None
    assert_same(state_of(model, optimizer), torch.load(tmp_path / "two.pt"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        assert torch.equal(exported(input_ids=TOKENS).logits, torch.load(tmp_path / "logits.pt"))


# ---- which run goes on -----------------------------------------------------------------------------------------------


def test_find_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"resume": False, "resume_from": None, "run_dir": None}

    def find(**changes: object) -> tuple[Path | None, Path | None]:
        return find_run(SimpleNamespace(**options | changes), script="algos/grpo.py")

    assert find() == (None, None)
    assert find(run_dir="mine") == (Path("mine"), None)
    with pytest.raises(UserError, match=r"--resume: no run of grpo.py under .*runs"):
        find(resume=True)
    for number, name in enumerate(["grpo-1", "grpo-2", "sft-3"]):
        save_small(tmp_path / "runs" / name / "checkpoints", 4, 6)
        (tmp_path / "runs" / name / "args.json").write_text("{}")
        os.utime(tmp_path / "runs" / name, (number, number))
    newest = Path("runs/grpo-2")
    assert find(resume=True) == (newest, newest / "checkpoints" / "step_6")
    (newest / "checkpoints" / "step_6" / "extra.pt").unlink()
    assert find(resume=True) == (newest, newest / "checkpoints" / "step_4")
    older = Path("runs/grpo-1")
    assert find(resume_from=str(older)) == (older, older / "checkpoints" / "step_6")
    step = older / "checkpoints" / "step_4"
    assert find(resume_from=str(step)) == (older.resolve(), step)
    with pytest.raises(UserError, match="--resume-from elsewhere: no such folder"):
        find(resume_from="elsewhere")
