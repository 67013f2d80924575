"""From parquet files to token ids: prompts for RL, examples for fine-tuning, and the order in which they come.

A row of an RL file has verl's five fields; files written by verl, TinyZero, `datasets` or pandas load as they are:

    data_source   str: which rule scores the response (common/rewards)
    prompt        a list of chat messages {role, content}, or a plain string (one user message)
    ability       str, optional and not read
    reward_model  {style: "rule" | "model", ground_truth: anything}
    extra_info    anything, optional

Nothing is tokenised before it is needed. Files above `IN_MEMORY_BYTES` are converted once to Arrow's own format in a
cache folder and memory-mapped from there, so a million rows cost a rank neither start-up time nor memory.
docs/data.md describes the formats, with examples.
"""

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerBase

from common.launch import UserError

RL_COLUMNS = ("data_source", "prompt", "reward_model")
OPTIONAL_RL_COLUMNS = ("extra_info",)

IN_MEMORY_BYTES = 64 * 2**20
"""Parquet files that together hold more than this are read through a memory-mapped copy."""

PLAIN_TEMPLATE = (
    "{% if messages | length == 1 %}{{ messages[0]['content'] }}{% else %}"
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}{% endif %}"
)
"""The template of models without one: a lone message as it stands, several as `User: ...` / `Assistant: ...` turns."""

Messages = list[dict[str, Any]]


# -- files ------------------------------------------------------------------------------------------------------------


def expand_files(files: Sequence[str]) -> list[Path]:
    """The parquet files behind paths, folders and globs, each once, in the order given (a folder's by name).

    Raises:
        UserError: something named does not exist, or a folder mixes the files of several splits.
    """
    paths: list[Path] = []
    for name in files:
        path = Path(name).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*.parquet") if not p.name.startswith("."))
            if not found:
                raise UserError(f"{name}: no .parquet file in this folder")
            _refuse_mixed_splits(name, found)
        elif path.is_file():
            found = [path]
        else:
            found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
            if not found:
                raise UserError(f"{name}: no such file or folder, and no file matches it as a pattern")
        paths.extend(found)
    if not paths:
        raise UserError("no data files given")
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(path.resolve(), path)
    return list(unique.values())


def _refuse_mixed_splits(folder: str, paths: Sequence[Path]) -> None:
    """A folder that holds train.parquet beside test.parquet would silently train on the test set."""
    splits = {}
    for path in paths:
        word = re.match(r"(train|test|valid|val|dev|eval)", path.name)
        if word:
            splits.setdefault(word[1], path.name)
    if len(splits) > 1:
        raise UserError(f"{folder}: holds the files of several splits ({', '.join(splits.values())}); name the files")


def check_files(files: Sequence[str], columns: Sequence[str] = RL_COLUMNS) -> list[Path]:
    """Check that the files exist, are parquet and have the columns, reading nothing but their footers.

    Returns the files. Files without rows may lack columns: a writer cannot know the types of nothing.

    Raises:
        UserError: naming the file and the column.
    """
    paths = expand_files(files)
    for path in paths:
        metadata, names = _footer(path)
        missing = [column for column in columns if column not in names]
        if missing and metadata.num_rows > 0:
            raise UserError(
                f"{path}: no column '{missing[0]}' in any row; it has {', '.join(sorted(names)) or 'no columns'}. "
                f"Needed: {', '.join(columns)} (docs/data.md)"
            )
    return paths


def _footer(path: Path) -> tuple[pq.FileMetaData, set[str]]:
    """The metadata of a parquet file and the names of its top-level columns."""
    try:
        with pq.ParquetFile(path) as file:
            return file.metadata, set(file.schema_arrow.names)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a parquet file that can be read ({_one_line(error)})") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


class Rows:
    """The rows of several parquet files, each file read with its own types, addressed by one running index.

    Files are never concatenated into one table: `ground_truth` may be a string in one file and a struct in the next.
    """

    def __init__(self, paths: Sequence[Path], columns: Sequence[str]) -> None:
        self.paths = list(paths)
        self.tables = [_read_table(path, columns) for path in paths]
        self.starts = np.cumsum([0] + [table.num_rows for table in self.tables])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """(which file, which row in it) of a running index."""
        which = int(np.searchsorted(self.starts, index, side="right")) - 1
        return which, index - int(self.starts[which])

    def __getitem__(self, index: int) -> dict[str, Any]:
        which, row = self.locate(index)
        return self.tables[which].slice(row, 1).to_pylist(maps_as_pydicts="strict")[0]

    def name(self, index: int) -> str:
        """`file, row n`, for messages."""
        which, row = self.locate(index)
        return f"{self.paths[which]}, row {row}"


def _read_table(path: Path, columns: Sequence[str]) -> pa.Table:
    with pq.ParquetFile(path) as file:
        present = [column for column in columns if column in file.schema_arrow.names]
        return file.read(columns=present)


# -- chat template ----------------------------------------------------------------------------------------------------


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    add_generation_prompt: bool,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> str:
    """The text of a conversation under the tokenizer's template, or under `PLAIN_TEMPLATE` when it has none.

    A last message by the assistant is a prefill: the response continues it. `{"chat_template": "plain"}` asks for the
    plain template by name.
    """
    kwargs = dict(chat_template_kwargs or {})
    if kwargs.get("chat_template") == "plain" or (not tokenizer.chat_template and "chat_template" not in kwargs):
        kwargs["chat_template"] = PLAIN_TEMPLATE
    prefill = add_generation_prompt and messages[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=add_generation_prompt and not prefill,
        continue_final_message=prefill,
        **kwargs,
    )


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a rendered conversation, with BOS exactly once if the tokenizer uses one.

    Templates may or may not write BOS themselves, so it is never added blindly.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    while ids[:2] == [bos, bos]:
        ids = ids[1:]
    if ids[:1] != [bos] and tokenizer.encode("a")[:1] == [bos]:
        ids = [bos, *ids]
    return ids


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    add_generation_prompt: bool,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation: the template applied once, BOS exactly once."""
    text = render_chat(
        tokenizer, messages, add_generation_prompt=add_generation_prompt, chat_template_kwargs=chat_template_kwargs
    )
    return encode_text(tokenizer, text)


# -- prompts for RL ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised, with what its reward needs."""

    index: int
    """Row number over all files, dropped rows counted."""
    prompt_ids: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    reward_style: str
    """"rule" or "model"."""
    messages: Messages


class PromptDataset:
    """The prompts of one or more files that fit the length limit. Tokenised when asked for."""

    def __init__(
        self,
        rows: Rows,
        kept: Sequence[int],
        report: dict[str, Any],
        *,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> None:
        self.rows = rows
        self.kept = kept
        self.report = report
        self.tokenizer = tokenizer
        self.chat_template_kwargs = chat_template_kwargs
        self.data_sources = {source for table in rows.tables for source in pc.unique(table["data_source"]).to_pylist()}

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, i: int) -> Prompt:
        index = int(self.kept[i])
        row = self.rows[index]
        messages = to_messages(row["prompt"], where=f"{self.rows.name(index)}: prompt")
        reward_model = drop_none(row["reward_model"])
        return Prompt(
            index=index,
            prompt_ids=encode_chat(
                self.tokenizer,
                messages,
                add_generation_prompt=True,
                chat_template_kwargs=self.chat_template_kwargs,
            ),
            data_source=row["data_source"],
            ground_truth=reward_model.get("ground_truth"),
            extra_info=drop_none(row.get("extra_info") or {}),
            reward_style=reward_model.get("style", "rule"),
            messages=messages,
        )


def load_prompts(
    files: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> PromptDataset:
    """The prompts of the files, those over `max_prompt_length` tokens (template included) dropped and counted.

    Raises:
        UserError: a file, column or value is missing or wrong, or no prompt fits.
    """
    rows = Rows(check_files(files), RL_COLUMNS + OPTIONAL_RL_COLUMNS)
    kept = []
    for index in range(len(rows)):
        messages = to_messages(rows[index]["prompt"], where=f"{rows.name(index)}: prompt")
        ids = encode_chat(tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=chat_template_kwargs)
        if len(ids) <= max_prompt_length:
            kept.append(index)
    if not kept:
        raise UserError(f"{', '.join(files)}: all {len(rows)} prompts are longer than {max_prompt_length} tokens")
    dropped = len(rows) - len(kept)
    report = {"read": len(rows), "kept": len(kept), "dropped": {f"longer than {max_prompt_length} tokens": dropped}}
    return PromptDataset(rows, kept, report, tokenizer=tokenizer, chat_template_kwargs=chat_template_kwargs)


def drop_none(value: Any) -> Any:
    """`value` without the None-filled keys that Arrow gives every row of a struct column; lists keep their Nones."""
    if isinstance(value, dict):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_none(item) for item in value]
    return value


def to_messages(value: Any, *, where: str) -> Messages:
    """Chat messages from what a `prompt` or `messages` cell may hold: a list of {role, content}, or a string."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise UserError(f"{where} is {type(value).__name__ if value else 'empty'}; needed: chat messages or a string")
    messages = drop_none(value)
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise UserError(f"{where}: message {number} needs 'role' and 'content', it is {str(message)[:80]!r}")
    return messages


# -- examples for supervised fine-tuning ------------------------------------------------------------------------------


@dataclass
class SFTExample:
    """A conversation as ids; `loss_mask` is 1 on the tokens that the assistant writes, the end of its turn included."""

    input_ids: list[int]  # (T,)
    loss_mask: list[int]  # (T,)


def response_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    response: str,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Ids of `response` as the model should write it after `messages`: up to and including the end of its turn.

    The template decides what ends a turn; without a template it is the tokenizer's EOS.
    """
    before = render_chat(tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=chat_template_kwargs)
    if not tokenizer.chat_template:
        return [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
    after = render_chat(
        tokenizer,
        [*messages, {"role": "assistant", "content": response}],
        add_generation_prompt=False,
        chat_template_kwargs=chat_template_kwargs,
    )
    if not after.startswith(before):
        raise UserError("the chat template does not render a response right after the generation prompt")
    ids = tokenizer.encode(after[len(before) :], add_special_tokens=False)
    special = set(tokenizer.all_special_ids)
    ends = [position for position, token in enumerate(ids) if token in special]
    return ids[: ends[-1] + 1] if ends else [*ids, tokenizer.eos_token_id]


class SFTDataset:
    """Fine-tuning examples that fit the length limit. Tokenised when asked for."""

    def __init__(
        self, rows: Rows, kept: Sequence[int], report: dict[str, Any], tokenizer: PreTrainedTokenizerBase, kwargs: Any
    ) -> None:
        self.rows = rows
        self.kept = kept
        self.report = report
        self.tokenizer = tokenizer
        self.chat_template_kwargs = kwargs

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, i: int) -> SFTExample:
        index = int(self.kept[i])
        return _sft_example(self.rows[index], self.rows.name(index), self.tokenizer, self.chat_template_kwargs)


def _sft_example(row: dict[str, Any], where: str, tokenizer: PreTrainedTokenizerBase, kwargs: Any) -> SFTExample:
    if row.get("messages") is not None:
        messages = to_messages(row["messages"], where=f"{where}: messages")
    else:
        messages = to_messages(row["prompt"], where=f"{where}: prompt")
        messages = [*messages, {"role": "assistant", "content": row["response"]}]
    input_ids: list[int] = []
    loss_mask: list[int] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt_ids = encode_chat(tokenizer, messages[:turn], add_generation_prompt=True, chat_template_kwargs=kwargs)
        response_ids = response_tokens(tokenizer, messages[:turn], message["content"], chat_template_kwargs=kwargs)
        new_ids = prompt_ids[len(input_ids) :]
        input_ids += new_ids + response_ids
        loss_mask += [0] * len(new_ids) + [1] * len(response_ids)
    return SFTExample(input_ids=input_ids, loss_mask=loss_mask)


def load_sft(
    files: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> SFTDataset:
    """Fine-tuning examples from rows with `prompt` and `response`, or with `messages`; longer ones are dropped."""
    rows = Rows(check_files(files, columns=()), ("prompt", "response", "messages"))
    kept = []
    for index in range(len(rows)):
        example = _sft_example(rows[index], rows.name(index), tokenizer, chat_template_kwargs)
        if len(example.input_ids) <= max_length:
            kept.append(index)
    if not kept:
        raise UserError(f"{', '.join(files)}: all {len(rows)} examples are longer than {max_length} tokens")
    dropped = len(rows) - len(kept)
    report = {"read": len(rows), "kept": len(kept), "dropped": {f"longer than {max_length} tokens": dropped}}
    return SFTDataset(rows, kept, report, tokenizer, chat_template_kwargs)


# -- the order of rows ------------------------------------------------------------------------------------------------


class BatchSampler:
    """Which rows come in which step: every row once an epoch, in an order that only the seed and the epoch decide.

    All epochs' permutations are laid end to end and global batch k is [k * batch_size, (k + 1) * batch_size) of that:
    a batch may straddle two epochs, so no row is ever lost. Rank r takes the r-th contiguous slice of each batch,
    whatever the number of ranks; the position in that sequence is the whole state.

        sampler = BatchSampler(num_rows=64, batch_size=16, seed=1, rank=0, world_size=2)
        sampler.next_batch()  # 8 row indices for rank 0; rank 1 gets the other 8
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
    ) -> None:
        if num_rows < 1:
            raise UserError("no rows to sample from")
        if batch_size < 1 or batch_size % world_size != 0:
            raise UserError(f"a batch of {batch_size} prompts does not divide over {world_size} ranks")
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.consumed = 0
        """Rows handed out so far, over all ranks and epochs."""
        self._order: tuple[int, list[int]] | None = None

    @property
    def epoch(self) -> int:
        """Epochs completed so far."""
        return self.consumed // self.num_rows

    @property
    def position(self) -> int:
        """Rows of the current epoch handed out so far."""
        return self.consumed % self.num_rows

    def next_batch(self) -> list[int]:
        """The row indices of this rank's slice of the next global batch."""
        batch = [self._row(self.consumed + offset) for offset in range(self.batch_size)]
        self.consumed += self.batch_size
        share = self.batch_size // self.world_size
        return batch[self.rank * share : (self.rank + 1) * share]

    def _row(self, place: int) -> int:
        """The row at a place in the endless sequence of epochs."""
        epoch, position = divmod(place, self.num_rows)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch))
        return self._order[1][position]

    def _permutation(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_rows))
        # Its own generator, seeded by value: neither the global RNG nor the epochs before have a say.
        seed = np.random.SeedSequence([self.seed, epoch]).generate_state(1, dtype=np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed) & (2**63 - 1))
        return torch.randperm(self.num_rows, generator=generator).tolist()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, "num_rows": self.num_rows, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the saved sampler stood; the number of ranks and the batch size may have changed.

        Raises:
            UserError: the data or the seed are not those of the saved run, so the order would be another one.
        """
        for name, mine in (("num_rows", self.num_rows), ("seed", self.seed)):
            if state[name] != mine:
                raise UserError(f"resume: the run was started with {name}={state[name]}, this one has {mine}")
        self.consumed = state["epoch"] * self.num_rows + state["position"]
