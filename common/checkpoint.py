"""Models and runs on disk: exact and atomic checkpoints, Hugging Face folders in and out.

A checkpoint is a folder that is complete or absent, whenever the process is killed:

    step_40/
        state/          weights and optimizer state, in torch.distributed.checkpoint's sharded format
        extra.pt        what is the same on all ranks (step counters, data position, ...)
        rank_0.pt       what only rank 0 can go on with (random generators, ...); one file a rank
        manifest.json   written last: every file with its size, number of ranks, score

It is written as step_40.tmp/, flushed to the disk, and renamed when every rank is done. All of it is loaded without
unpickling objects: tensors and plain Python values only. All ranks must see the same file system.
"""

import io
import json
import math
import os
import pickle
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from common.launch import UserError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
# Wrappers put these into the names of parameters; a checkpoint keeps the clean names.
_WRAPPER_PREFIXES = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")

Modules = Mapping[str, tuple[nn.Module, Optimizer | None]]


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Everyone's value, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * _world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def _raise_together(error: str | None, group: dist.ProcessGroup | None = None) -> None:
    """If any rank has an error, raise the first one on all ranks, so that none waits for one that has stopped."""
    for message in _gather(error, group):
        if message is not None:
            raise UserError(message)


def _first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value, on all ranks."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


# ---- files -----------------------------------------------------------------------------------------------------------


def _write_file(path: Path, content: bytes) -> None:
    """Write and flush to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk: without it a renamed file can be gone after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pack(value: Any, name: str) -> bytes:
    """`value` as bytes that torch.load(weights_only=True) is known to accept; ValueError naming what it does not."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{name} may hold tensors and plain Python values only: {error}") from error
    return buffer.getvalue()


def _unpack(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _why(error: BaseException) -> str:
    """The root of an error, in a few words: the system's message where there is one."""
    if isinstance(error, CheckpointException):  # holds {rank: (exception, stack)}
        rank, (first, _) = next(iter(error.failures.items()))
        return _why(first) + (f" (rank {rank})" if _world_size() > 1 else "")
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.strerror else str(error)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


# All that torch.distributed.checkpoint's metadata file, a pickle, is made of when every entry is a tensor.
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # its home from Python 3.13 on
}


class _Unpickler(pickle.Unpickler):
    """Unpickles nothing but the classes above, so that a checkpoint from elsewhere cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"checkpoint metadata names {module}.{name}, which has no place there")


class _Reader(dcp.FileSystemReader):
    """FileSystemReader without the unrestricted unpickling of its metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            return _Unpickler(file).load()


class _Planner(DefaultLoadPlanner):
    """Tensors only: the default planner would unpickle anything else."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is not a tensor")


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers (torch.compile, activation checkpointing)."""
    return _WRAPPER_PREFIXES.sub("", name)


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter once (a tied one under its first name) and every persistent buffer, by clean name."""
    for part in module.modules():
        # After a forward pass without a backward pass FSDP2's root still shows whole, temporary parameters.
        if isinstance(part, FSDPModule):
            part.reshard()
    weights = {clean_name(name): parameter for name, parameter in module.named_parameters()}
    persistent = {clean_name(name) for name in module.state_dict()}
    for name, buffer in module.named_buffers():
        if clean_name(name) in persistent:
            weights[clean_name(name)] = buffer
    return weights


def _state_of(modules: Modules) -> dict[str, torch.Tensor]:
    """The live tensors to save: "<module>.weights.<name>" and "<module>.optimizer.<name>.<key>"."""
    state = {}
    for key, (module, optimizer) in modules.items():
        for name, tensor in _weights(module).items():
            state[f"{key}.weights.{name}"] = tensor.detach()
        if optimizer is None:
            continue
        for name, parameter in module.named_parameters():
            for slot, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    raise ValueError(f"{type(optimizer).__name__} keeps {slot!r} of {name} outside of tensors")
                state[f"{key}.optimizer.{clean_name(name)}.{slot}"] = value
    return state


def _options_of(modules: Modules) -> dict[str, list[dict[str, Any]]]:
    """Learning rate, betas, ... of every optimizer's parameter groups."""
    options = {}
    for key, (_, optimizer) in modules.items():
        if optimizer is not None:
            options[key] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return options


class Checkpointer:
    """Saves and restores a run in `folder`, keeping the newest `keep` checkpoints and the one with the best score.

    `save` copies the state to main memory and returns; a thread writes it while training goes on. The thread uses a
    process group of its own, so that its messages never meet the trainer's. Without a CPU backend in the default
    process group `save` writes before it returns. Every method is collective: all ranks call it, in the same order.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise UserError(f"checkpoints to keep: {keep}, must be at least 1")
        self.folder = Path(folder)
        self.keep = keep
        self._group = dist.new_group() if dist.is_initialized() else None
        self._asynchronous = self._group is None or torch.device("cpu") in self._group._device_types
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        error = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as caught:
            error = f"checkpoint folder {self.folder}: cannot be made ({caught.strerror}); choose another folder"
        _raise_together(error, self._group)

    # -- saving

    def save(
        self,
        step: int,
        *,
        modules: Modules,
        extra: dict[str, Any],
        rank_state: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """Start to write step_<step>. The caller may change weights and optimizer as soon as this returns.

        modules: name -> (module, optimizer or None). A module that appears in no optimizer is saved all the same.
        extra: tensors and plain values, the same on all ranks. rank_state: the same kind, of this rank.
        score: higher is better; None (or NaN) takes no part in the choice of the best checkpoint.
        Waits first for a write that is still going on. Raises UserError, on all ranks, if that one failed or if this
        one cannot start; ValueError for what weights_only loading would refuse later.
        """
        self.wait()
        files = {f"rank_{_rank()}.pt": _pack(rank_state, "rank_state")}
        if _rank() == 0:
            files["extra.pt"] = _pack({"extra": extra, "optimizers": _options_of(modules)}, "extra")
        temporary = self.folder / f"step_{step}.tmp"
        error = None
        if _rank() == 0:
            try:
                if temporary.exists():
                    shutil.rmtree(temporary)
                temporary.mkdir()
            except OSError as caught:
                error = self._failure(step, caught)
        _raise_together(error, self._group)

        stager = DefaultStager(StagingOptions(False, False, False, False))
        state = stager.stage(_state_of(modules))  # a copy: the optimizer's next update does not reach it
        stager.close()
        manifest = {
            "format": FORMAT_VERSION,
            "step": step,
            "world_size": _world_size(),
            "score": None if score is None or math.isnan(score) else float(score),
            "modules": {key: optimizer is not None for key, (_, optimizer) in modules.items()},
        }
        if self._asynchronous:
            arguments = (step, temporary, state, files, manifest)
            self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(step, temporary, state, files, manifest)
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written any more. Raises UserError if the last write failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise UserError(error)

    def _write(
        self,
        step: int,
        temporary: Path,
        state: dict[str, torch.Tensor],
        files: dict[str, bytes],
        manifest: dict[str, Any],
    ) -> None:
        """Write, flush, wait for all ranks, rename. Leaves a failure's message, the same on all ranks, in _error."""
        try:
            error = None
            try:
                # No copying ahead: the state is in main memory, and this thread has not chosen its accelerator.
                writer = dcp.FileSystemWriter(temporary / "state", sync_files=True, per_thread_copy_ahead=0)
                dcp.save(state, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
                del state
                for name, content in files.items():
                    _write_file(temporary / name, content)
            except (Exception, CheckpointException) as caught:  # the other ranks must hear of it instead of waiting
                error = self._failure(step, caught)
            _raise_together(error, self._group)
            if _rank() == 0:
                try:
                    self._commit(step, temporary, manifest)
                except Exception as caught:
                    error = self._failure(step, caught)
            _raise_together(error, self._group)
        except Exception as caught:
            self._error = str(caught)
            if _rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the space back
                print(f"warning: {self._error}", file=sys.stderr, flush=True)

    def _failure(self, step: int, error: BaseException) -> str:
        good = [path.name for path in self._complete()]
        usable = f"{good[0]} is complete and usable" if good else "there is no complete one yet"
        return f"checkpoint step_{step} in {self.folder} could not be written: {_why(error)}; {usable}"

    def _commit(self, step: int, temporary: Path, manifest: dict[str, Any]) -> None:
        """Rank 0, when the files of all ranks are on the disk: list them, rename, delete what is not needed now."""
        paths = sorted(path for path in temporary.rglob("*") if path.is_file())
        manifest["files"] = {str(path.relative_to(temporary)): path.stat().st_size for path in paths}
        _write_file(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(temporary / "state")
        _sync_folder(temporary)
        final, old = self.folder / f"step_{step}", self.folder / f"step_{step}.old"
        if final.exists():  # a resumed run reaches a step that it has seen before
            os.replace(final, old)
        os.replace(temporary, final)
        _sync_folder(self.folder)
        self._delete_old()

    def _delete_old(self) -> None:
        """Keep the newest `keep` complete checkpoints and the best; a deletion cut short leaves no half checkpoint."""
        complete = self._complete()
        scores = {path: json.loads((path / MANIFEST).read_text())["score"] for path in complete}
        scored = [path for path in complete if scores[path] is not None]  # newest first: of equals, the newest is best
        kept = {*complete[: self.keep], *([max(scored, key=lambda path: scores[path])] if scored else [])}
        for path in complete:
            if path not in kept:
                doomed = path.with_name(f"{path.name}.deleted")
                os.replace(path, doomed)
        for pattern in ("step_*.deleted", "step_*.old", "step_*.tmp"):  # with what earlier kills left behind
            for leftover in self.folder.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)

    # -- finding

    def _steps(self) -> list[Path]:
        """Folders named step_<number>, newest first, whatever their state."""
        found = [(int(match[1]), path) for path in self.folder.glob("step_*") if (match := _STEP.fullmatch(path.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def _complete(self) -> list[Path]:
        return [path for path in self._steps() if incomplete(path) is None]

    def latest(self) -> Path | None:
        """The newest complete checkpoint, the same on all ranks; None when there is none. Says what it passed over."""
        self.wait()
        path = None
        if _rank() == 0:
            for old in self.folder.glob("step_*.old"):  # killed between the two renames of _commit
                if not old.with_suffix("").exists():
                    os.replace(old, old.with_suffix(""))
            for folder in sorted(self.folder.glob("step_*.tmp")):
                print(f"note: {folder}: unfinished checkpoint, not used", file=sys.stderr, flush=True)
            for path in self._steps():
                reason = incomplete(path)
                if reason is None:
                    break
                print(f"warning: {path}: {reason}; going on with an older one", file=sys.stderr, flush=True)
            else:
                path = None
        return _first(path, self._group)

    # -- loading

    def load(self, path: Path, *, modules: Modules) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Fill `modules` from the checkpoint at `path`, whatever number of ranks wrote it.

        Returns (extra, rank_state); rank_state is None when another number of ranks wrote the checkpoint.
        Raises UserError when it is incomplete or made by other modules. Optimizer state is exact; the parameter groups
        get the saved learning rates and options.
        """
        self.wait()
        path = Path(path)
        reason = _first(incomplete(path) if _rank() == 0 else None, self._group)
        if reason is not None:
            raise UserError(f"checkpoint {path}: {reason}; choose another step or let --resume find the newest one")
        manifest = json.loads((path / MANIFEST).read_text())
        wanted = {key: optimizer is not None for key, (_, optimizer) in modules.items()}
        if manifest["modules"] != wanted:
            raise UserError(f"checkpoint {path}: holds {manifest['modules']} (module: with optimizer), not {wanted}")

        reader = _Reader(path / "state")
        saved = reader.read_metadata().state_dict_metadata
        state, slots = self._targets(path, modules, saved)
        try:
            dcp.load(
                state,
                storage_reader=reader,
                planner=_Planner(),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            raise UserError(f"checkpoint {path}: cannot be read: {_why(error)}; choose another step") from error
        content = _unpack(path / "extra.pt")
        for key, (_, optimizer) in modules.items():
            if optimizer is None:
                continue
            optimizer.state.clear()
            for parameter, values in slots[key].items():
                optimizer.state[parameter] = values
            saved_groups = content["optimizers"][key]
            if len(saved_groups) != len(optimizer.param_groups):
                count = len(optimizer.param_groups)
                raise UserError(f"checkpoint {path}: {key} has {len(saved_groups)} parameter groups, not {count}")
            for group, options in zip(optimizer.param_groups, saved_groups, strict=True):
                group.update({name: value for name, value in options.items() if name not in _IMPLEMENTATION})
        same_ranks = manifest["world_size"] == _world_size()
        return content["extra"], _unpack(path / f"rank_{_rank()}.pt") if same_ranks else None

    @staticmethod
    def _targets(
        path: Path, modules: Modules, saved: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, dict[nn.Parameter, dict[str, torch.Tensor]]]]:
        """Where the saved tensors go: the live weights, and new tensors for the optimizer's state of each parameter."""
        state: dict[str, torch.Tensor] = {}
        slots: dict[str, dict[nn.Parameter, dict[str, torch.Tensor]]] = {}
        for key, (module, optimizer) in modules.items():
            for name, tensor in _weights(module).items():
                state[f"{key}.weights.{name}"] = tensor.detach()
            if optimizer is None:
                continue
            groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
            slots[key] = {}
            for name, parameter in module.named_parameters():
                prefix = f"{key}.optimizer.{clean_name(name)}."
                names = [full for full in saved if full.startswith(prefix) and "." not in full[len(prefix) :]]
                if id(parameter) not in groups or not names:
                    continue
                # AdamW keeps its step counter, one number, on the CPU, but the fused kernel wants it on the device.
                on_device = any(groups[id(parameter)].get(option) for option in ("fused", "capturable"))
                values = {}
                for full in names:
                    size, dtype = saved[full].size, saved[full].properties.dtype
                    if size == parameter.shape:
                        values[full[len(prefix) :]] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                    else:
                        device = _local(parameter).device if on_device else "cpu"
                        values[full[len(prefix) :]] = torch.zeros(size, dtype=dtype, device=device)
                slots[key][parameter] = values
                state.update({prefix + slot: value for slot, value in values.items()})
        problems = [f"{name} is missing" for name in state if name not in saved]
        problems += [f"{name} has no place in the model" for name in saved if name not in state]
        for name in state.keys() & saved.keys():
            if isinstance(saved[name], BytesStorageMetadata):
                problems.append(f"{name} is not a tensor")
            elif saved[name].size != state[name].shape:
                problems.append(f"{name} is {list(saved[name].size)}, the model's is {list(state[name].shape)}")
        if problems:
            raise UserError(f"checkpoint {path}: made by another model: {_some(problems)}")
        return state, slots


_STEP = re.compile(r"step_(\d+)")
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")  # how AdamW computes, not what: not restored


def incomplete(path: Path) -> str | None:
    """Why the checkpoint at `path` cannot be used, or None when every file is there in its full size."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
    except FileNotFoundError:
        return "no manifest.json" if path.is_dir() else "no such folder"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable {MANIFEST} ({error})"
    if manifest.get("format") != FORMAT_VERSION:
        return f"format {manifest.get('format')}, this version reads {FORMAT_VERSION}"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
    return None


def _some(items: Sequence[str], limit: int = 5) -> str:
    """The first few of a list, and how many more there are."""
    rest = len(items) - limit
    return "; ".join(items[:limit]) + (f"; and {rest} more" if rest > 0 else "")


# ---- Hugging Face folders in -----------------------------------------------------------------------------------------


def resolve_model(name_or_path: str) -> Path:
    """The folder of a model: a local one as it is, else the hub's snapshot of that name (downloaded if need be).

    With a process group every node's local rank 0 downloads first. Raises UserError, on all ranks, if it is neither.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"model {name_or_path}: the folder has no config.json, so it is not a Hugging Face model")
        return folder
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", name_or_path):
        raise UserError(f"model {name_or_path}: no such folder")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py"]
    error, path = None, None
    for downloader in (True, False):  # local rank 0 of each node first, then the others from the cache
        if (int(os.environ.get("LOCAL_RANK", "0")) == 0) == downloader:
            try:
                path = Path(snapshot_download(name_or_path, allow_patterns=patterns))
            except Exception as caught:  # offline, unknown name, no access: each has its own class
                reason = str(caught).strip().splitlines()[0]
                error = f"model {name_or_path}: neither a folder nor a model that the hub gives: {reason}"
        _raise_together(error)
    return path


def safetensors_files(folder: Path) -> dict[str, Path]:
    """Name of every tensor in a Hugging Face folder -> the file it is in. UserError when there is no safetensors."""
    from safetensors import SafetensorError, safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError) as error:
            raise UserError(f"{index}: not a safetensors index ({error})") from error
    elif single.is_file():
        files = {single.name: single}
    elif any(folder.glob("*.bin")):
        raise UserError(
            f"model {folder}: has .bin weights only, which are pickles and are not loaded; convert them once with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...), which writes safetensors"
        )
    else:
        raise UserError(f"model {folder}: no model.safetensors and no model.safetensors.index.json")
    names: dict[str, Path] = {}
    for path in sorted(set(files.values())):
        try:
            with safe_open(path, framework="pt") as file:
                names.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read as safetensors ({error})") from error
    missing = [name for name in files if index.is_file() and name not in names]
    if missing:
        raise UserError(f"{index}: names tensors that no file holds: {_some(missing)}")
    return names


def load_hf_weights(model: nn.Module, folder: Path, *, zero_init: Sequence[str] = (), skip: Sequence[str] = ()) -> None:
    """Fill a transformers model from the safetensors of `folder`; each rank reads only its own slices.

    The way to a sharded model that never stands whole in memory:

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        ...fully_shard...
        model.to_empty(device=device)
        load_hf_weights(model, folder)

    Works for plain tensors too. Values are cast to each parameter's dtype. Buffers that are not in the file (rotary
    frequencies) are computed by the model's own initialisation, as from_pretrained does. Tied weights are tied.
    zero_init: parameters that the file may lack (the new head of a critic or reward model); they become 0.
    skip: tensors of the file that the model has no use for (the language head, for a critic).
    Raises UserError naming what is missing, unknown or of another shape, and checkpoints that transformers converts
    while it loads them (such as mixtures of experts), for which there is no code here.
    """
    from safetensors import safe_open

    weights = _weights(model)
    if any(tensor.is_meta for tensor in weights.values()):
        raise ValueError("the model is still on the meta device: call model.to_empty(device=...) first")
    if hasattr(model, "tie_weights"):
        model.tie_weights()
        weights = _weights(model)
    _initialize_buffers(model)

    files = {name: path for name, path in safetensors_files(Path(folder)).items() if name not in skip}
    sources = _match_names(model, weights, files, Path(folder), zero_init)
    _check_ties(model, files, Path(folder))
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name, source in sources.items():
        by_file.setdefault(files[source], []).append((name, source))
    for path, pairs in sorted(by_file.items()):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name, source in pairs:
                _fill(weights[name], file.get_slice(source), f"{path}: {source}")
    for name in zero_init:
        if name not in sources:
            _local(weights[name]).zero_()


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the weights of `source`, a model of the same architecture sharded over the same ranks.

    Each rank copies its own shards, cast to the target's dtype: nothing is gathered.
    """
    weights = _weights(source)
    for name, tensor in _weights(target).items():
        _local(tensor).copy_(_local(weights[name]))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, without gradient tracking, so that it can be written to."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fill(target: torch.Tensor, source: Any, where: str) -> None:
    """Copy this rank's part of `source`, a safetensors slice of the whole tensor, into `target`."""
    shape = tuple(source.get_shape())
    if shape != tuple(target.shape):
        raise UserError(f"{where}: shape {list(shape)}, the model's is {list(target.shape)}")
    local = _local(target)
    if local.numel() == 0:  # more ranks than rows
        return
    part = source[_slices(target)] if shape else source[:]
    if not part.is_floating_point() and target.is_floating_point():
        raise UserError(
            f"{where}: stored as {part.dtype}; quantized checkpoints cannot be trained, use the original one"
        )
    local.copy_(part)


def _slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds: FSDP2 splits as torch.chunk does, the last may have less."""
    slices = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        for placement, size, rank in zip(
            tensor.placements, tensor.device_mesh.shape, tensor.device_mesh.get_coordinate(), strict=True
        ):
            if isinstance(placement, Replicate):
                continue
            if type(placement) is not Shard:
                raise ValueError(f"cannot read a tensor placed as {placement}")
            outer = slices[placement.dim]
            length = outer.stop - outer.start
            chunk = -(-length // size)
            start = outer.start + min(rank * chunk, length)
            slices[placement.dim] = slice(start, min(start + chunk, outer.stop))
    return tuple(slices)


def _initialize_buffers(model: nn.Module) -> None:
    """Compute the buffers that no file holds, by the model's own code, as from_pretrained does.

    That code also draws random weights, but not for parameters marked as initialised. It runs before the weights are
    read, in case a model with code of its own does not know the mark.
    """

    def visit(module: nn.Module, owner: nn.Module | None) -> None:
        owner = module if hasattr(module, "_init_weights") else owner
        if any(name in module._non_persistent_buffers_set for name, _ in module.named_buffers(recurse=False)):
            if owner is None:
                raise ValueError(f"{type(model).__name__} has buffers that no file holds, and no way to compute them")
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True
            owner._init_weights(module)
        for child in module.children():
            visit(child, owner)

    visit(model, None)


def _match_names(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    files: Mapping[str, Path],
    folder: Path,
    zero_init: Sequence[str],
) -> dict[str, str]:
    """Name in the model -> name in the files, for every tensor of the model; UserError where they do not fit."""
    _refuse_conversions(model, files, folder)
    prefix = getattr(model, "base_model_prefix", "")
    names = {}
    for stored in files:
        # A checkpoint of the bare base model has names without the prefix ("layers.0..." for "model.layers.0...").
        prefixed = f"{prefix}.{stored}"
        names[prefixed if stored not in weights and prefixed in weights else stored] = stored
    tied = getattr(model, "all_tied_weights_keys", {})
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []), r"rotary_emb\.inv_freq"]
    buffers = {name for name, _ in model.named_buffers()}  # old files may hold some that are computed by now
    unknown = [
        stored
        for name, stored in names.items()
        if name not in {*weights, *tied, *buffers} and not any(re.search(pattern, name) for pattern in ignored)
    ]
    missing = [name for name in weights if name not in names and name not in zero_init]
    problems = [f"{name} is missing" for name in missing] + [f"{name} is unknown to the model" for name in unknown]
    if problems:
        cure = "" if missing else "; from_pretrained(...).save_pretrained(...) writes a folder without what is unknown"
        raise UserError(f"model {folder}: the weights do not fit {type(model).__name__}: {_some(problems)}{cure}")
    return {name: names[name] for name in weights if name in names}


def _check_ties(model: nn.Module, files: Mapping[str, Path], folder: Path) -> None:
    """A file may hold a tied weight under both names, but then they must be equal."""
    from safetensors import safe_open

    for tied, first in getattr(model, "all_tied_weights_keys", {}).items():
        if tied not in files or first not in files:
            continue
        slices = _slices(_weights(model)[first])
        with safe_open(files[tied], framework="pt") as one, safe_open(files[first], framework="pt") as other:
            if not torch.equal(one.get_slice(tied)[slices], other.get_slice(first)[slices]):
                raise UserError(
                    f"model {folder}: config.json ties {tied} to {first}, but the file holds two different tensors; "
                    "set tie_word_embeddings to what is true"
                )


def _refuse_conversions(model: nn.Module, files: Iterable[str], folder: Path) -> None:
    """transformers 5 renames, merges or transposes some architectures' tensors while loading; that is not done here."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # transformers 4 stores what the model has
        return
    if not hasattr(model, "config"):
        return
    conversions = list(get_model_conversion_mapping(model, add_legacy=False))
    # Some mappings are registered under the class's name, which fully_shard has changed.
    conversions += get_checkpoint_conversion_mapping(type(model).__name__.removeprefix("FSDP")) or []
    for conversion in conversions:
        for name in files:
            renamed, pattern = conversion.rename_source_key(name)
            if renamed != name or (pattern is not None and not isinstance(conversion, WeightRenaming)):
                raise UserError(
                    f"model {folder}: {model.config.model_type} checkpoints are converted while they are loaded "
                    f"({name} -> {renamed}), which is not supported; choose an architecture without conversion"
                )


# ---- Hugging Face folders out ----------------------------------------------------------------------------------------


def export_hf(
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    source: Path,
    max_shard_bytes: int = 2 * 1024**3,
) -> None:
    """Write `model` as a folder that from_pretrained, vLLM and load_hf_weights read: safetensors in `dtype`, config,
    generation config, tokenizer and chat template.

    Collective: all ranks gather one tensor after the other; rank 0 holds at most one file of `max_shard_bytes`.
    source: folder that the model came from; gives architecture and generation config.
    The folder appears when it is complete, replacing an older one. Raises UserError on all ranks if writing fails.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    temporary = folder.with_name(folder.name + ".tmp")
    tensors = {name: tensor for name, tensor in _weights(model).items() if name not in _tied_names(model)}
    shards = list(_shards(tensors, dtype, max_shard_bytes))

    def on_rank_0(action: Callable[[], None]) -> None:
        error = None
        if _rank() == 0:
            try:
                action()
            except Exception as caught:  # whatever it is, the other ranks must hear of it instead of waiting
                shutil.rmtree(temporary, ignore_errors=True)
                error = f"export to {folder} failed: {_why(caught)}"
        _raise_together(error)

    def start() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_config(model, tokenizer, temporary, dtype=dtype, source=Path(source))

    on_rank_0(start)
    weight_map, total = {}, 0
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {}
        for name in names:
            whole = _whole(tensors[name])
            if _rank() == 0:
                whole = whole.to(dtype) if whole.is_floating_point() else whole
                content[name] = whole.to("cpu", copy=True).contiguous()
                total += content[name].nbytes
            weight_map[name] = file
        on_rank_0(lambda content=content, file=file: save_file(content, temporary / file, metadata={"format": "pt"}))

    def finish() -> None:
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        mask = os.umask(0)  # can only be read by setting it
        os.umask(mask)
        for path in temporary.iterdir():
            path.chmod(0o666 & ~mask)  # safetensors makes files that nobody else may read
            _sync_file(path)
        _sync_folder(temporary)
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.replace(folder, old)
        os.replace(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
        _sync_folder(folder.parent)

    on_rank_0(finish)


def _tied_names(model: nn.Module) -> set[str]:
    """Names that share the tensor of another name; they are not stored."""
    return set(getattr(model, "all_tied_weights_keys", {}))


def _shards(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, limit: int) -> Iterator[list[str]]:
    """Names in the order of the model, cut into files of at most `limit` bytes (a larger tensor gets its own file)."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        item = torch.empty(0, dtype=dtype if tensor.is_floating_point() else tensor.dtype).element_size()
        if names and size + tensor.numel() * item > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.numel() * item
    yield names


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, gathered from all ranks."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        # With CPU offload the shards lie in main memory, but only the accelerator's backend can gather them.
        return tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor


def _write_config(model: nn.Module, tokenizer: Any, folder: Path, *, dtype: torch.dtype, source: Path) -> None:
    """Everything of a Hugging Face folder but the weights."""
    config = deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard renames the class
    config.save_pretrained(folder)
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    elif getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if getattr(config, "auto_map", None):  # a model with code of its own does not load without it
        for path in source.glob("*.py"):
            shutil.copyfile(path, folder / path.name)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


# ---- which run goes on -----------------------------------------------------------------------------------------------


def find_run(args: Any, *, script: str) -> tuple[Path | None, Path | None]:
    """(folder of the run, checkpoint to start from) for the arguments --resume, --resume-from and --run-dir.

    (None or --run-dir, None): a new run. (folder, None): a run that ended before its first checkpoint starts again in
    its folder. --resume alone takes the newest folder under runs/ that this script made.
    Raises UserError when there is nothing of that name.
    """
    if not (args.resume or args.resume_from):
        return (Path(args.run_dir) if args.run_dir else None), None
    if args.resume_from:
        path = Path(args.resume_from)
        if not path.is_dir():
            raise UserError(f"--resume-from {path}: no such folder")
        if _STEP.fullmatch(path.name):  # a checkpoint: the run is two folders up
            return path.resolve().parents[1], path
    elif args.run_dir:
        path = Path(args.run_dir)
    else:
        runs = Path("runs").glob(f"{Path(script).stem}-*")
        path = max(
            (run for run in runs if (run / "args.json").exists()), key=lambda run: run.stat().st_mtime, default=None
        )
        if path is None:
            raise UserError(
                f"--resume: no run of {Path(script).name} under {Path('runs').resolve()}; name one: --resume-from"
            )
        path = Path(_first(str(path)))
    return path, Checkpointer(path / "checkpoints").latest() if path.exists() else None
