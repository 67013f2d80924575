"""The four kinds of device, with stub modules where the hardware is not there."""

import importlib.machinery
import os
import random
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from conftest import ROOT, environment

from common import device as device_module
from common.device import Device, get_device


@pytest.fixture(autouse=True)
def fresh_detection():
    get_device.cache_clear()
    yield
    get_device.cache_clear()


def pretend_gpu(monkeypatch, *, hip: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)


def pretend_npu(monkeypatch, *, available: bool) -> None:
    """A torch_npu that can be found and imported, and that registers torch.npu."""
    stub = types.ModuleType("torch_npu")
    stub.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    monkeypatch.setitem(sys.modules, "torch_npu", stub)
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(is_available=lambda: available), raising=False)


def test_without_an_accelerator_it_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = get_device()
    assert (device.name, device.type, device.backend, device.can_sleep) == ("CPU", "cpu", "gloo", False)
    assert device.torch_device == torch.device("cpu")
    assert device.engine_kwargs() == {"enforce_eager": True, "block_size": 32}


@pytest.mark.parametrize(("hip", "name", "variable"), [
    (None, "CUDA", "CUDA_VISIBLE_DEVICES"),
    ("6.2", "ROCm", "HIP_VISIBLE_DEVICES"),
])  # fmt: skip
def test_cuda_and_rocm_share_a_type_and_differ_in_name(monkeypatch, hip, name, variable):
    pretend_gpu(monkeypatch, hip=hip)
    monkeypatch.setenv("LOCAL_RANK", "3")
    device = get_device()
    assert (device.name, device.visible_devices_variable) == (name, variable)
    assert (device.type, device.torch_device) == ("cuda", torch.device("cuda", 3))
    assert "gloo" in device.backend  # checkpoints are written from main memory while training goes on
    assert "nccl" in device.backend
    assert device.default_dtype() == torch.bfloat16
    # vLLM does not start where less than its share of the memory is free, 92 % by default.
    assert device.engine_kwargs() == {
        "enable_sleep_mode": True, "enforce_eager": False, "gpu_memory_utilization": 0.01
    }  # fmt: skip


def test_ascend_goes_before_everything_else(monkeypatch):
    pretend_gpu(monkeypatch, hip=None)
    pretend_npu(monkeypatch, available=True)
    device = get_device()
    assert (device.name, device.type) == ("Ascend NPU", "npu")
    assert "hccl" in device.backend
    assert device.visible_devices_variable == "ASCEND_RT_VISIBLE_DEVICES"


def test_an_ascend_package_without_its_hardware_is_passed_over(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pretend_npu(monkeypatch, available=False)
    assert get_device().type == "cpu"


def test_a_device_without_sleep_does_not_ask_for_it():
    device = Device("some", "cuda", 0, "gloo", "", can_sleep=False)
    assert device.engine_kwargs()["enable_sleep_mode"] is False


def test_attention_by_what_is_installed_and_by_precision(monkeypatch):
    pretend_gpu(monkeypatch, hip=None)
    gpu, cpu = get_device(), Device("CPU", "cpu", 0, "gloo", "", can_sleep=False)
    for is_installed, expected in ((True, "flash_attention_2"), (False, "sdpa")):
        monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda found=is_installed: found)
        assert gpu.attn_implementation(torch.bfloat16) == gpu.attn_implementation(torch.float16) == expected
        assert gpu.attn_implementation(torch.float32) == cpu.attn_implementation(torch.bfloat16) == "sdpa"
        assert gpu.varlen_kernel(torch.float32) is None and cpu.varlen_kernel(torch.bfloat16) is None


@pytest.mark.parametrize(
    ("hip", "capability", "has_flash_attn", "has_copy", "expected"),
    [
        (None, (9, 0), True, True, "flash-attn"),
        (None, (8, 0), False, True, "torch"),
        (None, (7, 5), False, True, None),  # the kernel begins with Ampere
        (None, (9, 0), False, False, None),  # a torch built without it
        ("6.4", (9, 4), False, True, None),
        ("6.4", (9, 4), True, True, "flash-attn"),
    ],
)
def test_kernel_for_sequences_of_different_lengths(monkeypatch, hip, capability, has_flash_attn, has_copy, expected):
    pretend_gpu(monkeypatch, hip=hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: has_copy)
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: has_flash_attn)
    assert get_device().varlen_kernel(torch.bfloat16) == expected
    assert get_device().varlen_kernel(torch.float32) is None


def test_the_host_does_not_wait_for_copies_to_cuda(monkeypatch):
    """Pinned first, if it is in main memory; what knows how to move is left to it."""
    pretend_gpu(monkeypatch, hip=None)
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pin") or self)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, non_blocking: calls.append((str(device), non_blocking))
    )
    get_device().send(torch.zeros(2))
    assert calls == ["pin", ("cuda:0", True)]
    calls.clear()
    Device("CPU", "cpu", 0, "gloo", "", can_sleep=False).send(torch.zeros(2))
    assert calls == [("cpu", True)]
    layout = types.SimpleNamespace(to=lambda device: f"on {device.name}")
    assert get_device().send(layout) == "on CUDA"


def test_the_engine_does_not_take_the_trainer_s_threads(monkeypatch):
    """On accelerators vLLM sets one for the whole process as it starts."""
    pretend_gpu(monkeypatch, hip=None)
    before = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", before.append)
    monkeypatch.setattr(device_module.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(device_module.gc, "freeze", lambda: None)
    with get_device().starting_engine():
        torch.set_num_threads(1)
    assert before == [1, 7]


def test_the_cpu_computes_in_bf16_only_where_it_multiplies_it(monkeypatch):
    device = Device("CPU", "cpu", 0, "gloo", "", can_sleep=False)
    cases = ((False, False, torch.float32), (True, False, torch.bfloat16), (False, True, torch.bfloat16))
    for amx, avx, expected in cases:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        assert device.default_dtype() == expected


def test_calls_reach_the_accelerator_s_own_module(monkeypatch):
    calls = []

    def record(name: str, value=None):
        return lambda *args: calls.append((name, *args)) or value

    stub = types.SimpleNamespace(
        set_device=record("set_device"),
        synchronize=record("synchronize"),
        empty_cache=record("empty_cache"),
        mem_get_info=record("mem_get_info", (3, 7)),
        max_memory_allocated=record("max_memory_allocated", 5),
    )
    monkeypatch.setattr(torch, "npu", stub, raising=False)
    device = Device("Ascend NPU", "npu", 2, "gloo", "", can_sleep=True)
    device.set_current()
    device.synchronize()
    device.empty_cache()
    assert device.memory() == (3, 7)
    assert device.peak_memory() == 5
    assert calls == [
        ("set_device", 2), ("synchronize",), ("empty_cache",), ("mem_get_info", 2), ("max_memory_allocated", 2),
    ]  # fmt: skip


def test_on_a_cpu_the_same_calls_do_nothing_and_memory_is_the_machine_s():
    device = Device("CPU", "cpu", 0, "gloo", "", can_sleep=False)
    device.set_current()
    device.synchronize()
    device.empty_cache()
    free, total = device.memory()
    assert 0 < free <= total
    assert 10 * 2**20 < device.peak_memory() < total


def test_the_peak_is_that_of_this_process_not_of_the_one_that_started_it():
    held = bytearray(2 * 2**30)  # resident when the child is made, which is a copy of this process until its exec
    program = "from common.device import get_device; print(get_device().peak_memory())"
    peak = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert peak < len(held)


def test_every_generator_goes_on_where_its_saved_state_was(tmp_path):
    device = Device("CPU", "cpu", 0, "gloo", "", can_sleep=False)

    def draw() -> tuple:
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    device.seed(7)
    draw()
    torch.save(device.rng_state(), tmp_path / "rng.pt")
    expected = draw()
    device.seed(8)
    assert draw() != expected
    device.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))  # tensors and plain values only
    assert draw() == expected


def test_a_seed_repeats_and_another_differs():
    device = Device("CPU", "cpu", 0, "gloo", "", can_sleep=False)
    draws = []
    for seed in (1, 1, 2, 2**40):
        device.seed(seed)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3


def test_starting_the_engine_restores_torchrun_s_variable_and_passes_real_messages():
    code = (
        "import os, sys\n"
        "from common.device import get_device\n"
        "os.environ['LOCAL_WORLD_SIZE'] = '2'\n"
        "with get_device().starting_engine():\n"
        "    os.environ['LOCAL_WORLD_SIZE'] = '1'\n"
        "    os.write(2, b'[W] NUMA binding: Using MEMBIND policy for all\\n')\n"
        "    os.write(2, b'a real warning\\n')\n"
        "print(os.environ['LOCAL_WORLD_SIZE'])\n"
        "import time; time.sleep(0.3)\n"
        "os.write(2, b'and after\\n')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": "."}
    )
    assert run.stdout.strip() == "2"
    assert run.stderr.splitlines() == ["a real warning", "and after"]


FAULTS = """
import platform, resource, sys
import torch
from common import launch
from common.device import get_device

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**23)  # 32 MiB, which glibc would map anew each time
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
launch.init_distributed(get_device())
for _ in range(5):
    faults()  # until the heap has found its size
print(platform.libc_ver()[0], before, faults())
"""


def test_a_cpu_run_keeps_the_memory_that_it_frees():
    settings = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", FAULTS]
    run = subprocess.run(command, env=environment() | settings, capture_output=True, text=True, timeout=120, check=True)
    libc, before, after = run.stdout.split()[-3:]
    if libc != "glibc":
        pytest.skip("another C library")
    assert int(before) > 10 * 2**25 / 65536  # pages of at most 64 KiB
    assert int(after) < int(before) / 20
