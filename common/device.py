"""The one file that tells CUDA, ROCm, Ascend NPU and CPU apart.

Everything else asks a `Device` and stays the same on all of them:

    device = get_device()
    dist.init_process_group(device.backend)
    model.to(device.torch_device)

ROCm is torch's `cuda` with `torch.version.hip` set; Ascend is the `torch_npu` plug-in with vllm-ascend; CPU uses gloo.
"""

import contextlib
import ctypes
import functools
import gc
import glob
import importlib
import importlib.util
import logging
import os
import random
import re
import resource
import sys
import threading
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

GIB = 1024**3
HALF = (torch.bfloat16, torch.float16)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


HARMLESS_LINES = (b"NUMA binding: Using MEMBIND policy",)
"""Lines that the engine's C++ code writes to stderr in every start, and that no logging level turns off."""


@contextlib.contextmanager
def _dropping_stderr_lines(harmless: tuple[bytes, ...]) -> Iterator[None]:
    """Let everything through to stderr, line by line, except lines that contain one of `harmless`."""
    sys.stderr.flush()
    stderr = os.dup(2)
    read_fd, write_fd = os.pipe()
    os.dup2(write_fd, 2)
    os.close(write_fd)

    def forward() -> None:
        with os.fdopen(read_fd, "rb") as lines:
            for line in lines:
                if not any(text in line for text in harmless):
                    os.write(stderr, line)
        os.close(stderr)

    # Not joined: a child process that was started meanwhile may keep its end of the pipe as long as it lives.
    threading.Thread(target=forward, daemon=True, name="stderr").start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)


@dataclass(frozen=True)
class Device:
    """What a script may ask about the hardware it runs on."""

    name: str
    """For people: "CUDA", "ROCm", "Ascend NPU" or "CPU"."""
    type: str
    """torch's device type: "cuda" (also ROCm), "npu" or "cpu"."""
    index: int
    """This process's device on its node (LOCAL_RANK); unused on CPU."""
    backend: str
    """For `init_process_group`. Accelerators get gloo beside their own backend, for CPU tensors (async checkpoints)."""
    visible_devices_variable: str
    """Environment variable that chooses the devices a process sees; "" on CPU."""
    can_sleep: bool
    """Whether the engine can give its memory back while the trainer works (vLLM's sleep mode)."""

    @property
    def is_accelerator(self) -> bool:
        return self.type != "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.type, self.index) if self.is_accelerator else torch.device("cpu")

    @property
    def _module(self) -> Any:
        """`torch.cuda` or `torch.npu`: the two have the same functions."""
        return getattr(torch, self.type)

    # -- numbers and kernels ------------------------------------------------------------------------------------------

    def default_dtype(self) -> torch.dtype:
        """bf16 where the hardware multiplies it, else fp32: without AMX or AVX512-BF16 a CPU is slower in bf16."""
        if self.is_accelerator or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
            return torch.bfloat16
        return torch.float32

    def attn_implementation(self, dtype: torch.dtype) -> str:
        """flash-attn when it is installed and can compute in `dtype`, else torch's scaled-dot-product attention."""
        if self.type != "cuda" or dtype not in HALF:
            return "sdpa"
        from transformers.utils import is_flash_attn_2_available  # another package has the same module name

        return "flash_attention_2" if is_flash_attn_2_available() else "sdpa"

    def varlen_kernel(self, dtype: torch.dtype) -> str | None:
        """What attends to sequences of different lengths that stand in one row.

        "flash-attn" when it is installed; else "torch", its copy of the same kernel, on NVIDIA GPUs from Ampere on;
        else None. In 16-bit formats only.
        """
        if self.attn_implementation(dtype) == "flash_attention_2":
            return "flash-attn"
        is_nvidia = self.type == "cuda" and torch.version.hip is None
        has_copy = is_nvidia and dtype in HALF and torch.backends.cuda.is_flash_attention_available()
        return "torch" if has_copy and torch.cuda.get_device_capability(self.index) >= (8, 0) else None

    # -- state and memory ---------------------------------------------------------------------------------------------

    def set_current(self) -> None:
        """Make this process use its own accelerator."""
        if self.is_accelerator:
            self._module.set_device(self.index)

    def synchronize(self) -> None:
        if self.is_accelerator:
            self._module.synchronize()

    def send(self, value: Any) -> Any:
        """A tensor on the device; what is none moves itself, as packing.Layout. The host does not wait for the copy."""
        if not isinstance(value, torch.Tensor):
            return value.to(self)
        if self.type == "cuda" and not value.is_cuda:
            value = value.pin_memory()  # from other memory the copy would wait for all that is queued
        return value.to(self.torch_device, non_blocking=True)

    def keep_freed_memory(self) -> None:
        """On a CPU: let this process keep what it frees, for the next tensor.

        glibc gives large blocks back to the kernel at once. Each step then gets them anew, page by page, which takes a
        third of an update where products are fast. Other C libraries go on as they do.
        """
        libc = ctypes.CDLL(None)
        if not self.is_accelerator and hasattr(libc, "gnu_get_libc_version"):
            libc.mallopt(M_MMAP_MAX, 0)  # no block is mapped by itself
            libc.mallopt(M_TRIM_THRESHOLD, -1)  # the heap is never cut back

    def empty_cache(self) -> None:
        """Return cached blocks to the driver, so that the engine in the same process can have them."""
        if self.is_accelerator:
            self._module.empty_cache()

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes: of the accelerator, or of the machine's main memory."""
        if self.is_accelerator:
            return self._module.mem_get_info(self.index)
        pages = {name: os.sysconf(name) for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES", "SC_PAGE_SIZE")}
        return pages["SC_AVPHYS_PAGES"] * pages["SC_PAGE_SIZE"], pages["SC_PHYS_PAGES"] * pages["SC_PAGE_SIZE"]

    def peak_memory(self) -> int:
        """Highest number of bytes so far: allocated on the accelerator, or resident in this process."""
        if self.is_accelerator:
            return self._module.max_memory_allocated(self.index)
        status = Path("/proc/self/status")
        if status.exists():  # getrusage goes back to before the exec: a small process would report its parent's peak
            return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, where it is in bytes

    def seed(self, seed: int) -> None:
        """Seed Python, NumPy, torch's CPU generator and the accelerator's."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, Any]:
        """State of every global random generator of this process, made of tensors and plain numbers only."""
        version, words, gauss = random.getstate()
        algorithm, keys, position, has_gauss, cached = np.random.get_state()
        state = {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": {
                "algorithm": algorithm,
                "keys": torch.from_numpy(keys.astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
            "torch": torch.get_rng_state(),
        }
        if self.is_accelerator:
            state["accelerator"] = self._module.get_rng_state(self.index)
        return state

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Put back what `rng_state` returned."""
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        keys = numpy["keys"].numpy().astype(np.uint32)
        np.random.set_state((numpy["algorithm"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
        torch.set_rng_state(state["torch"])
        if self.is_accelerator:
            self._module.set_rng_state(state["accelerator"], self.index)

    # -- the engine ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def starting_engine(self) -> Iterator[None]:
        """Around `import vllm` and `LLM(...)`: sets what they read, keeps their harmless chatter off the screen.

        The engine is imported on entering. An import makes a million objects that stay for good; left to itself, the
        garbage collector goes through them again and again, and so does the engine, which collects as it starts. That
        would be a third of the time to start it.
        """
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine lives in this process, so weights pass by reference
            VLLM_NO_USAGE_STATS="1",
            TOKENIZERS_PARALLELISM="false",
        )
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        for name in ("VLLM_DP_SIZE", "VLLM_DP_RANK"):
            os.environ.pop(name, None)
        local_world_size, threads = os.environ.get("LOCAL_WORLD_SIZE"), torch.get_num_threads()
        # Of the engine's own calls.
        warnings.filterwarnings("ignore", r".torch\.distributed\.\w+. is deprecated", FutureWarning)
        # On a CPU: "Triton not available", "Triton doesn't include CPU backend", "No CUDA runtime is found".
        for name in ("torch._library.triton", "vllm.triton_utils.importing", "torch.utils.cpp_extension"):
            logging.getLogger(name).setLevel(logging.ERROR)
        with _dropping_stderr_lines(HARMLESS_LINES):
            gc.disable()
            try:
                importlib.import_module("vllm.entrypoints.llm")
            finally:
                gc.enable()
            gc.freeze()
            yield
        if local_world_size is not None:
            os.environ["LOCAL_WORLD_SIZE"] = local_world_size  # the CPU engine overwrites torchrun's value
        if self.is_accelerator:
            torch.set_num_threads(threads)  # the engine leaves one; --cpu-offload computes on the processor

    def engine_kwargs(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM` that depend on the device."""
        if self.is_accelerator:
            kwargs = {"enable_sleep_mode": self.can_sleep, "enforce_eager": False}
            # vLLM refuses to start when this share of the memory is not free, even where the size of the KV cache is
            # given and the share means nothing else: the trainer is there already.
            if self.type == "cuda":
                kwargs["gpu_memory_utilization"] = 0.01
            return kwargs
        # Compiling on a CPU takes minutes, and vLLM packs weights there, which compiled graphs would not notice. Its
        # blocks of 128 tokens would be longer than most prompts, and only full ones are shared by a group.
        return {"enforce_eager": True, "block_size": 32}

    def patch_engine(self) -> None:
        """After `import vllm`, on a CPU: make its sampler lighter, and its shared memory private to this run."""
        if self.is_accelerator:
            return
        from vllm.distributed.device_communicators import cpu_communicator
        from vllm.v1.sample import sampler

        # Keeps sampling from compiling a C++ kernel just to count the rank of a token.
        if hasattr(sampler, "batched_count_greater_than"):
            sampler.batched_count_greater_than = lambda logprobs, values: (logprobs >= values).sum(-1)
        if hasattr(cpu_communicator, "_CPUSHMDistributed"):
            _make_shared_memory_private(cpu_communicator._CPUSHMDistributed)


def _make_shared_memory_private(shm_class: Any) -> None:
    """Give the shared memory of a tensor-parallel engine a name of its own, and remove the name once all ranks have it.

    The engine's name is the same in every run, so that two runs would meet in it, and it stays in /dev/shm after a
    kill: the next start would fail. Memory without a name lives as long as the processes that use it.
    """
    if hasattr(shm_class, "solorl_token"):
        return
    make_name, start = shm_class.make_group_name, shm_class._init_cpu_shm
    shm_class.solorl_token = uuid.uuid4().hex

    def make_group_name(communicator: Any) -> str:
        token = [shm_class.solorl_token]
        torch.distributed.broadcast_object_list(token, src=communicator.ranks[0], group=communicator.device_group)
        return f"{make_name(communicator)}-{token[0]}"

    def start_without_name(self: Any) -> int:
        handle = start(self)  # returns on no rank before all have attached
        for path in Path("/dev/shm").glob(f"*{glob.escape(Path(self.group_name).name)}*"):
            path.unlink(missing_ok=True)
        return handle

    shm_class.make_group_name, shm_class._init_cpu_shm = staticmethod(make_group_name), start_without_name


@functools.cache
def get_device() -> Device:
    """The device this process should use: an accelerator that torch sees, otherwise the CPU."""
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu  # noqa: F401  (registers torch.npu)

        if torch.npu.is_available():
            return Device("Ascend NPU", "npu", index, "cpu:gloo,npu:hccl", "ASCEND_RT_VISIBLE_DEVICES", can_sleep=True)
    if torch.cuda.is_available():
        if torch.version.hip is not None:
            return Device("ROCm", "cuda", index, "cpu:gloo,cuda:nccl", "HIP_VISIBLE_DEVICES", can_sleep=True)
        return Device("CUDA", "cuda", index, "cpu:gloo,cuda:nccl", "CUDA_VISIBLE_DEVICES", can_sleep=True)
    return Device("CPU", "cpu", index, "gloo", "", can_sleep=False)
