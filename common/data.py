"""From parquet files to token ids: prompts for RL, examples for fine-tuning, pairs, and the order in which they come.

A row of an RL file has verl's five fields; files written by verl, TinyZero, `datasets` or pandas load as they are:

    data_source   str: which rule scores the response (common/rewards)
    prompt        a list of chat messages {role, content}, or a plain string (one user message)
    ability       str, optional and not read
    reward_model  {style: "rule" | "model", ground_truth: anything}
    extra_info    a dict of anything, optional

A row for fine-tuning has `prompt` and `response`, or `messages`; a row of preferences has `chosen` and `rejected`, with
or without `prompt`. Nothing is tokenised before it is needed. docs/data.md describes the formats, with examples.
"""

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from common import rows as row_files
from common.launch import UserError
from common.rows import Rows, cached

RL_COLUMNS = ("data_source", "prompt", "reward_model")

PLAIN_TEMPLATE = (
    "{% if messages | length == 1 %}{{ messages[0]['content'] }}{% else %}"
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}{% endif %}"
)
"""The template of models without one: a lone message as it stands, several as `User: ...` / `Assistant: ...` turns."""

Messages = list[dict[str, Any]]
Kwargs = dict[str, Any] | None


def check_files(files: Sequence[str], columns: Sequence[str] = RL_COLUMNS) -> list[Path]:
    """The parquet files behind paths, folders and globs, after a cheap look at their footers (see common/rows.py)."""
    return row_files.check_files(files, columns)


# -- chat templates ---------------------------------------------------------------------------------------------------


def to_messages(value: Any, *, where: str) -> Messages:
    """Chat messages from whatever a cell holds: a list or array of {role, content}, the same as JSON, or a string.

    A string is one user message. Keys that Arrow filled with None are dropped; content given as a list of text parts is
    joined. `where` names the cell in messages.

    Raises:
        UserError: it is none of these.
    """
    if isinstance(value, np.ndarray | tuple):
        value = list(value)
    if isinstance(value, str):
        value = _messages_in_json(value) or [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        what = f"a {type(value).__name__}" if value else "empty"
        raise UserError(f"{where} is {what}; needed: a list of chat messages, or a string")
    messages = []
    for number, message in enumerate(value):
        if isinstance(message, list):
            message = dict(message)  # Arrow's map type gives pairs
        message = drop_none(message)
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: message {number} has no 'role': {str(message)[:80]}")
        messages.append(message | {"content": _content(message, f"{where}: message {number}")})
    return messages


def _content(message: dict[str, Any], where: str) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list) and content and all(part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UserError(f"{where} has no text as 'content': {str(message)[:80]}")
    return content


def _messages_in_json(text: str) -> Messages | None:
    if not text.startswith("[{"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in value) else None


def drop_none(value: Any) -> Any:
    """`value` without the None-filled keys that Arrow gives every row of a struct column; lists keep their Nones."""
    if isinstance(value, dict):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_none(item) for item in value]
    return value


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    add_generation_prompt: bool,
    chat_template_kwargs: Kwargs = None,
) -> str:
    """The text of a conversation under the tokenizer's template, or under `PLAIN_TEMPLATE` when it has none.

    - A last message by the assistant is a prefill when a response is to follow: the response continues it.
    - A lone user message that was written with the template's own markup (TinyZero's files) stands as it is.
    - `{"chat_template": "plain"}` among the keyword arguments asks for the plain template by name.

    Raises:
        UserError: the template refuses the messages, or has no such keyword argument.
    """
    kwargs = dict(chat_template_kwargs or {})
    template = kwargs.pop("chat_template", None) or tokenizer.chat_template or "plain"
    if isinstance(template, dict):  # a tokenizer may have several, named
        template = template.get("default", next(iter(template.values())))
    if template == "plain":
        template = PLAIN_TEMPLATE
    elif len(messages) == 1 and _has_markup(tokenizer, template, messages[0]["content"]):
        return messages[0]["content"]
    for name in kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", template) and name not in ("tools", "documents"):
            raise UserError(f"--chat-template-kwargs: the chat template of this model has no '{name}'")
    prefill = add_generation_prompt and messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt and not prefill,
            continue_final_message=prefill,
            **kwargs,
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"the chat template refuses messages by {roles}: {' '.join(str(error).split())}") from error
    return text


@functools.lru_cache(maxsize=8)
def _markup(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, ...]:
    """The special tokens that a template writes around a user's message."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "-"}], chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return tuple(token for token in _special_tokens(tokenizer).values() if token in text)


def _has_markup(tokenizer: PreTrainedTokenizerBase, template: str, content: str) -> bool:
    return any(token in content for token in _markup(tokenizer, template))


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


@functools.lru_cache(maxsize=8)
def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]


def _with_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """`ids` with BOS exactly once if the tokenizer uses it: templates may or may not have written it themselves."""
    bos = tokenizer.bos_token_id
    return [bos, *ids] if _adds_bos(tokenizer) and ids[:1] != [bos] else ids


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of many texts, without special tokens added; a fast tokenizer uses all its threads."""
    if not texts:
        return []
    # Not verbose: a text over the model's own limit is the length filter's business.
    return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    add_generation_prompt: bool,
    chat_template_kwargs: Kwargs = None,
) -> list[int]:
    """Token ids of a conversation: the template applied once, BOS exactly once. See `render_chat`."""
    text = render_chat(
        tokenizer, messages, add_generation_prompt=add_generation_prompt, chat_template_kwargs=chat_template_kwargs
    )
    return _with_bos(tokenizer, encode_texts(tokenizer, [text])[0])


# -- the length filter ------------------------------------------------------------------------------------------------

UNKNOWN = np.iinfo(np.int64).max
"""The length bound of a row that has to be tokenised to know."""
ENCODE_ROWS = 512
"""Rows that are tokenised at a time; the tokenizer spreads them over its threads."""
REMEMBERED_ROWS = 20_000
"""When more rows than this had to be tokenised, the result is kept in the cache folder."""
_MOST_MESSAGES = 16
_MOST_ROLES = 7

Part = tuple[str, str]
"""(column, role of its text when it holds a plain string): one piece of a conversation."""
Conversations = Callable[[Sequence[str]], list[list[Part]]]
"""The conversations in a row of a file with these columns, each as its parts in order."""


class LengthFilter:
    """Finds the rows that fit a limit, tokenising only those that could be too long.

    No tokenizer makes more tokens than a text has bytes, and the template adds the same text to every row with the same
    roles. So Arrow sums up bytes, at millions of rows a second, and only rows above the limit in bytes are tokenised.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, add_generation_prompt: bool, kwargs: Kwargs) -> None:
        self.tokenizer = tokenizer
        self.add_generation_prompt = add_generation_prompt
        self.kwargs = kwargs
        self._template_bytes = functools.lru_cache(maxsize=None)(self._measure_template)

    def upper_bounds(self, rows: Rows, conversations: Conversations) -> np.ndarray:
        """(len(rows),) int64: at least as many as a row's longest conversation has tokens, or UNKNOWN."""
        bounds = np.full(len(rows), UNKNOWN)
        for start, batch in rows.batches():
            if batch.num_rows:
                each = [self._bounds_of_batch(batch, parts) for parts in conversations(batch.schema.names)]
                bounds[start : start + batch.num_rows] = np.max(each, axis=0)
        return bounds

    def _bounds_of_batch(self, batch: pa.RecordBatch, parts: Sequence[Part]) -> np.ndarray:
        unknown = np.full(batch.num_rows, UNKNOWN)
        content_bytes = np.zeros(batch.num_rows, dtype=np.int64)
        shapes: list[np.ndarray] = []
        role_names: list[str] = []
        for column, role in parts:
            measured = _measure_column(batch[column], role, role_names)
            if measured is None or len(role_names) > _MOST_ROLES:
                return unknown
            content_bytes += measured[0]
            shapes.append(measured[1])
        # One number for each row's sequence of roles; rows with the same one get the same text from the template.
        _, first_rows, which = np.unique(np.stack(shapes, axis=1), axis=0, return_index=True, return_inverse=True)
        overheads = np.array([self._template_bytes(_roles_of_row(batch, row, parts)) for row in first_rows])
        overheads = overheads[which.reshape(-1)]
        return np.where(overheads == UNKNOWN, UNKNOWN, content_bytes + np.minimum(overheads, UNKNOWN // 2))

    def _measure_template(self, roles: tuple[str, ...]) -> int:
        """Bytes that the template adds to messages by these roles, and 2 for BOS and EOS; UNKNOWN if it varies."""
        contents = [f"Sentinel{number}." for number in range(len(roles))]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            text = render_chat(
                self.tokenizer,
                messages,
                add_generation_prompt=self.add_generation_prompt,
                chat_template_kwargs=self.kwargs,
            )
        except UserError:
            return UNKNOWN  # said with the row's name when it is tokenised
        if any(text.count(content) > 1 for content in contents):
            return UNKNOWN
        return len(text.encode()) + 2

    def fitting(
        self,
        rows: Rows,
        limit: int,
        conversations: Conversations,
        exact_lengths: Callable[[np.ndarray], list[int]],
    ) -> np.ndarray:
        """(number kept,) int64: running indices of the rows whose conversations all have at most `limit` tokens.

        exact_lengths: the token counts of some rows, for a row with several conversations that of the longest
        """
        unsure = np.flatnonzero(self.upper_bounds(rows, conversations) > limit)

        def measure() -> np.ndarray:
            lengths = [length for chunk in _progress(unsure) for length in exact_lengths(chunk)]
            return unsure[np.array(lengths, dtype=np.int64) > limit]

        if len(unsure) > REMEMBERED_ROWS:
            name = f"too-long-{self._fingerprint(rows, limit)}.npy"
            too_long = np.load(cached(name, lambda path: _save_array(path, measure())))
        else:
            too_long = measure()
        return np.delete(np.arange(len(rows)), too_long)

    def _fingerprint(self, rows: Rows, limit: int) -> str:
        """Changes with anything that the lengths depend on."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else json.dumps(self.tokenizer.get_vocab())
        settings = repr((limit, self.kwargs, self.add_generation_prompt, self.tokenizer.chat_template))
        return hashlib.sha256("\n".join((rows.fingerprint(), settings, vocabulary)).encode()).hexdigest()[:16]


def _save_array(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:  # given a name, np.save would add a suffix to it
        np.save(file, array)


def _progress(indices: np.ndarray) -> Iterator[np.ndarray]:
    """Chunks of `indices`, with a progress bar when there are many of them."""
    chunks = [indices[start : start + ENCODE_ROWS] for start in range(0, len(indices), ENCODE_ROWS)]
    with Progress(transient=True, disable=len(indices) < REMEMBERED_ROWS) as progress:
        yield from progress.track(chunks, description="measuring lengths")


def _measure_column(array: pa.Array, role: str, role_names: list[str]) -> tuple[np.ndarray, np.ndarray] | None:
    """(bytes of content, a number for the sequence of roles) of each row; None when it takes a closer look to know."""
    if array.null_count:
        return None
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        if pc.any(pc.starts_with(array, "[{")).as_py():  # could be messages in JSON
            return None
        sizes = pc.binary_length(array).to_numpy(zero_copy_only=False)
        return sizes, np.full(len(array), _role_number(role, role_names))
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        return None
    messages = array.flatten()
    if not pa.types.is_struct(messages.type) or messages.null_count:
        return None
    children = {field.name: child for field, child in zip(messages.type, messages.flatten(), strict=True)}
    others = [child for name, child in children.items() if name not in ("role", "content")]
    if any(child.null_count < len(child) for child in others) or not {"role", "content"} <= set(children):
        return None
    roles, contents = children["role"], children["content"]
    if roles.null_count or contents.null_count or not pa.types.is_string(contents.type):
        return None
    counts = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
    if len(counts) == 0 or counts.min() == 0 or counts.max() > _MOST_MESSAGES:
        return None
    encoded = roles.dictionary_encode()
    numbers = np.array([_role_number(name, role_names) for name in encoded.dictionary.to_pylist()])
    numbers = numbers[encoded.indices.to_numpy(zero_copy_only=False)]
    starts = np.concatenate([[0], np.cumsum(counts)])
    place = np.arange(len(numbers)) - np.repeat(starts[:-1], counts)
    sizes = pc.binary_length(contents).to_numpy(zero_copy_only=False)
    return np.add.reduceat(sizes.astype(np.int64), starts[:-1]), np.add.reduceat(numbers * 8**place, starts[:-1])


def _role_number(role: str, role_names: list[str]) -> int:
    """1, 2, ...: a digit to base 8, as long as there are at most `_MOST_ROLES`."""
    if role not in role_names:
        role_names.append(role)
    return role_names.index(role) + 1


def _roles_of_row(batch: pa.RecordBatch, row: int, parts: Sequence[Part]) -> tuple[str, ...]:
    roles = []
    for column, role in parts:
        value = batch[column][row].as_py()
        roles += [role] if isinstance(value, str) else [message["role"] for message in value]
    return tuple(roles)


# -- data sets --------------------------------------------------------------------------------------------------------


class Dataset:
    """Rows that fit a length limit, turned into examples when they are asked for.

    `report` says what became of the rows: {"read", "kept", "dropped": {reason: count}}.
    """

    def __init__(self, rows: Rows, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Kwargs) -> None:
        self.rows = rows
        self.tokenizer = tokenizer
        self.chat_template_kwargs = chat_template_kwargs
        self.kept: np.ndarray = np.arange(len(rows))
        self.report: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.kept)

    def keep(self, kept: np.ndarray, dropped: Counter[str], limit: int, what: str) -> None:
        """Set what is kept, write the report and refuse an empty result.

        Raises:
            UserError: nothing is left: how many there were, and the limit.
        """
        self.kept = kept
        self.report = {"read": len(self.rows), "kept": len(kept), "dropped": dict(dropped)}
        files = ", ".join(str(path) for path in self.rows.paths)
        if len(self.rows) == 0:
            raise UserError(f"{files}: no rows")
        if len(kept) == 0:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
            raise UserError(
                f"{files}: none of the {len(self.rows)} {what} is usable: {reasons}. Raise the limit {limit}?"
            )

    def _kept_within(self, index: int, length: int, limit: int) -> None:
        """The bounds of `LengthFilter` hold for the templates we know; one that breaks them must not go unseen."""
        if length > limit:
            raise UserError(
                f"{self.rows.name(index)}: has {length} tokens, over the limit of {limit}, though it has fewer bytes: "
                "this chat template writes more for some contents than for others. Remove the row, or raise the limit"
            )


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised, with what its reward needs."""

    index: int
    """Row number over all files, dropped rows counted."""
    prompt_ids: list[int]
    data_source: str
    ground_truth: Any
    """As the file has it, without None-filled keys; None when the row has none."""
    extra_info: dict[str, Any]
    reward_style: str
    """"rule" or "model"."""
    messages: Messages


class PromptDataset(Dataset):
    """The prompts of one or more files. Made by `load_prompts`."""

    def __init__(
        self, rows: Rows, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Kwargs, max_prompt_length: int
    ) -> None:
        super().__init__(rows, tokenizer, chat_template_kwargs)
        self.max_prompt_length = max_prompt_length

    @functools.cached_property
    def data_sources(self) -> set[str]:
        """The different values of data_source, over all rows read."""
        return {source for _, batch in self.rows.batches() for source in pc.unique(batch["data_source"]).to_pylist()}

    def _messages(self, index: int, prompt: Any) -> Messages:
        return to_messages(prompt, where=f"{self.rows.name(index)}: prompt")

    def _render(self, index: int, messages: Messages) -> str:
        try:
            return render_chat(
                self.tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=self.chat_template_kwargs
            )
        except UserError as error:
            raise UserError(f"{self.rows.name(index)}: prompt: {error}") from error

    def __getitem__(self, i: int) -> Prompt:
        index = int(self.kept[i])
        row = self.rows[index]
        where = self.rows.name(index)
        messages = self._messages(index, row["prompt"])
        text = self._render(index, messages)
        prompt_ids = _with_bos(self.tokenizer, encode_texts(self.tokenizer, [text])[0])
        self._kept_within(index, len(prompt_ids), self.max_prompt_length)
        reward_model = to_dict(row["reward_model"], where=f"{where}: reward_model")
        return Prompt(
            index=index,
            prompt_ids=prompt_ids,
            data_source=row["data_source"],
            ground_truth=reward_model.get("ground_truth"),
            extra_info=to_dict(row.get("extra_info"), where=f"{where}: extra_info"),
            reward_style=reward_model.get("style", "rule"),
            messages=messages,
        )

    def check_first_rows(self) -> None:
        """Make one example of each file: a column of another form shows at once, not at step 500.

        Raises:
            UserError: naming the row.
        """
        for start in self.rows.starts[:-1]:
            place = int(np.searchsorted(self.kept, start))
            if place < len(self):
                prompt = self[place]
                if not isinstance(prompt.data_source, str):
                    raise UserError(f"{self.rows.name(prompt.index)}: 'data_source' is no text: {prompt.data_source!r}")

    def lengths(self, indices: np.ndarray) -> list[int]:
        """Exact token counts of some rows."""
        prompts = self.rows.column("prompt", indices)
        texts = [self._render(i, self._messages(i, prompt)) for i, prompt in zip(indices, prompts, strict=True)]
        return [len(_with_bos(self.tokenizer, ids)) for ids in encode_texts(self.tokenizer, texts)]


def to_dict(value: Any, *, where: str) -> dict[str, Any]:
    """A dict from a struct, a map or a JSON object in a string; {} for null. None-filled keys are dropped.

    Raises:
        UserError: it is something else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"{where} is the text {value[:60]!r}; needed: a struct, or a JSON object") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{where} is a {type(value).__name__}; needed: a struct, or a JSON object")
    return drop_none(value)


def load_prompts(
    files: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    chat_template_kwargs: Kwargs = None,
) -> PromptDataset:
    """The prompts of the files, those over `max_prompt_length` tokens (template included) dropped and counted.

    Raises:
        UserError: a file, column or value is missing or wrong (named with its row), or no prompt fits.
    """
    rows = Rows(check_files(files), (*RL_COLUMNS, "extra_info"))
    for column in RL_COLUMNS:
        rows.refuse_nulls(column)
    dataset = PromptDataset(rows, tokenizer, chat_template_kwargs, max_prompt_length)
    length_filter = LengthFilter(tokenizer, add_generation_prompt=True, kwargs=chat_template_kwargs)
    kept = length_filter.fitting(rows, max_prompt_length, lambda _: [[("prompt", "user")]], dataset.lengths)
    dropped = Counter({f"longer than {max_prompt_length} tokens": len(rows) - len(kept)})
    dataset.keep(kept, +dropped, max_prompt_length, "prompts")
    dataset.check_first_rows()
    return dataset


# -- examples for supervised fine-tuning ------------------------------------------------------------------------------


@dataclass
class SFTExample:
    """A conversation as ids; `loss_mask` is 1 on the tokens that the assistant writes, the end of its turn included."""

    input_ids: list[int]  # (T,)
    loss_mask: list[int]  # (T,)


def render_response(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, response: str, chat_template_kwargs: Kwargs = None
) -> tuple[str, str, bool]:
    """(text before the response, the response to the end of its turn, whether EOS must be added to it as an id).

    The template decides how a turn ends; a model without a template ends it with EOS.

    Raises:
        UserError: the template changes the response beyond recognition.
    """
    before = render_chat(tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=chat_template_kwargs)
    kwargs = chat_template_kwargs or {}
    if kwargs.get("chat_template") == "plain" or not (tokenizer.chat_template or "chat_template" in kwargs):
        return before, (" " if before.endswith("Assistant:") else "") + response, True
    turn = {"role": "assistant", "content": response}
    if messages[-1]["role"] == "assistant":  # a prefill, which the response continues
        *messages, prefill = messages
        turn["content"] = prefill["content"] + response
    after = render_chat(
        tokenizer, [*messages, turn], add_generation_prompt=False, chat_template_kwargs=chat_template_kwargs
    )
    content_end = after.rfind(response.strip()) + len(response.strip())
    if after.startswith(before):
        text = after[len(before) :]
        content_end = max(content_end - len(before), 0)
    elif response.strip() in after:  # the generation prompt has something that finished turns lack
        text = response.strip() + after[content_end:]
        content_end = len(response.strip())
    else:
        raise UserError(f"the chat template drops or rewrites parts of the response {response[:60]!r}")
    ends = [
        place + len(token)
        for token in _special_tokens(tokenizer).values()
        if token and (place := text.find(token, content_end)) >= 0
    ]
    return (before, text[: min(ends)], False) if ends else (before, text, True)


class SFTDataset(Dataset):
    """Conversations to imitate. Made by `load_sft`.

    `kept` holds (row, turn): the turn is -1 where one example trains all of the assistant's turns. Some templates write
    a finished turn otherwise than the model generated it (they drop its thinking): there each turn is an example of its
    own, in the context that the model will see.
    """

    def __init__(
        self, rows: Rows, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Kwargs, max_length: int
    ) -> None:
        super().__init__(rows, tokenizer, chat_template_kwargs)
        self.max_length = max_length

    @functools.cached_property
    def rewrites_history(self) -> bool:
        """Whether the template renders a finished turn otherwise than as prompt and response."""
        talk = [{"role": "user", "content": "Hi."}]
        before, response, _ = render_response(self.tokenizer, talk, "Yes.", self.chat_template_kwargs)
        talk += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Ok."}]
        later = render_chat(
            self.tokenizer, talk, add_generation_prompt=True, chat_template_kwargs=self.chat_template_kwargs
        )
        return not later.startswith(before + response)

    def conversation(self, index: int) -> tuple[Messages, list[int]]:
        """(messages of a row, the places of the turns to train on)."""
        row, where = self.rows[index], self.rows.name(index)
        if "messages" in row:
            messages = to_messages(row["messages"], where=f"{where}: messages")
            return messages, [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        prompt = to_messages(row["prompt"], where=f"{where}: prompt")
        response = to_response(row["response"], where=f"{where}: response")
        return [*prompt, {"role": "assistant", "content": response}], [len(prompt)]

    def turns(self, index: int) -> list[int]:
        """The turns of a row that make an example each; [-1] when one example trains all of them."""
        if "messages" not in self.rows.columns_at(index):
            return [-1]
        turns = self.conversation(index)[1]
        return turns if self.rewrites_history or not turns else [-1]

    def pieces(self, index: int, turn: int) -> list[tuple[str, str, bool]]:
        """The text of one turn of a row, or of all its turns when `turn` is -1.

        Returns for each turn: what is new before it, what the assistant writes, and whether EOS must be added to that.
        """
        messages, turns = self.conversation(index)
        pieces = []
        rendered = ""
        for place in turns if turn < 0 else [turn]:
            try:
                before, response, add_eos = render_response(
                    self.tokenizer, messages[:place], messages[place]["content"], self.chat_template_kwargs
                )
            except UserError as error:
                raise UserError(f"{self.rows.name(index)}: {error}") from error
            if not before.startswith(rendered):
                raise UserError(f"{self.rows.name(index)}: the chat template rewrites earlier turns of this row")
            pieces.append((before[len(rendered) :], response, add_eos))
            rendered = before + response
        return pieces

    def examples(self, rows: Sequence[list[tuple[str, str, bool]]]) -> list[SFTExample]:
        """One example for each row of pieces, tokenised together."""
        texts = [text for pieces in rows for before, response, _ in pieces for text in (before, response)]
        ids = iter(encode_texts(self.tokenizer, texts))
        examples = []
        for pieces in rows:
            example = SFTExample(input_ids=[], loss_mask=[])
            for _, _, add_eos in pieces:
                context, written = next(ids), next(ids)
                if not example.input_ids:
                    context = _with_bos(self.tokenizer, context)
                written = written + [self.tokenizer.eos_token_id] * add_eos
                example.input_ids += context + written
                example.loss_mask += [0] * len(context) + [1] * len(written)
            examples.append(example)
        return examples

    def lengths(self, indices: np.ndarray) -> list[int]:
        """Exact token counts of some rows, of a row with several examples that of the longest."""
        turns = [(index, turn) for index in indices.tolist() for turn in self.turns(index)]
        longest = dict.fromkeys(indices.tolist(), 0)
        examples = self.examples([self.pieces(index, turn) for index, turn in turns])
        for (index, _), example in zip(turns, examples, strict=True):
            longest[index] = max(longest[index], len(example.input_ids))
        return list(longest.values())

    def __getitem__(self, i: int) -> SFTExample:
        index, turn = (int(value) for value in self.kept[i])
        [example] = self.examples([self.pieces(index, turn)])
        self._kept_within(index, len(example.input_ids), self.max_length)
        return example


def to_response(value: Any, *, where: str) -> str:
    """The text of a response: a string, or a list with one message by the assistant.

    Raises:
        UserError: it is something else, or empty.
    """
    if value is not None and not isinstance(value, str):
        messages = to_messages(value, where=where)
        value = messages[0]["content"] if [message["role"] for message in messages] == ["assistant"] else None
    if not value:
        raise UserError(f"{where} is empty or no text; needed: a string, or one message by the assistant")
    return value


def load_sft(
    files: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    chat_template_kwargs: Kwargs = None,
) -> SFTDataset:
    """Fine-tuning examples from rows with `messages` (loss on all assistant turns), or with `prompt` and `response`.

    Rows over `max_length` tokens, and conversations in which the assistant says nothing, are dropped and counted.

    Raises:
        UserError: a file, column or value is missing or wrong (named with its row), or no row is left.
    """
    paths = check_files(files, columns=())
    for path in paths:
        _, names = row_files.footer(path)
        if "messages" not in names:
            check_files([str(path)], columns=("prompt", "response"))
    rows = Rows(paths, ("messages", "prompt", "response"))
    for column in ("messages", "prompt", "response"):
        rows.refuse_nulls(column)
    dataset = SFTDataset(rows, tokenizer, chat_template_kwargs, max_length)

    def conversations(names: Sequence[str]) -> list[list[Part]]:
        return [[("messages", "user")]] if "messages" in names else [[("prompt", "user"), ("response", "assistant")]]

    length_filter = LengthFilter(tokenizer, add_generation_prompt=False, kwargs=chat_template_kwargs)
    fitting = length_filter.fitting(rows, max_length, conversations, dataset.lengths)
    kept = [(index, turn) for index in fitting.tolist() for turn in dataset.turns(index)]
    silent = len(fitting) - len({index for index, _ in kept})
    dropped = Counter(
        {f"longer than {max_length} tokens": len(rows) - len(fitting), "without an assistant turn": silent}
    )
    dataset.keep(np.array(kept, dtype=np.int64).reshape(-1, 2), +dropped, max_length, "examples")
    return dataset


def read_rows(dataset: PromptDataset | SFTDataset, rows: Iterable[int]) -> tuple[list[Prompt], list[list[int]]]:
    """Some rows' prompts and, where a data set is for fine-tuning, the ids of their responses (else none).

    Of a conversation the last turn of the assistant is the response, and all before it the prompt. Such prompts have
    nothing that a reward would need, and their row is the example's number.
    """
    if isinstance(dataset, PromptDataset):
        return [dataset[row] for row in rows], []
    prompts, responses = [], []
    for row in rows:
        example = dataset[row]
        start = len(example.loss_mask) - example.loss_mask[::-1].index(0)
        prompts.append(Prompt(row, example.input_ids[:start], "", None, {}, "rule", []))
        responses.append(example.input_ids[start:])
    return prompts, responses


# -- preferences ------------------------------------------------------------------------------------------------------


@dataclass
class PairExample:
    """Two responses to one prompt, each to the end of its turn."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]


class PairDataset(Dataset):
    """Preferences. Made by `load_pairs`."""

    def __init__(
        self, rows: Rows, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Kwargs, max_length: int
    ) -> None:
        super().__init__(rows, tokenizer, chat_template_kwargs)
        self.max_length = max_length

    def pair(self, index: int) -> tuple[Messages, str, str]:
        """(prompt messages, chosen response, rejected response) of a row."""
        row, where = self.rows[index], self.rows.name(index)
        contexts, responses = [], []
        for name in ("chosen", "rejected"):
            value = row[name]
            if isinstance(value, list) and len(value) > 1:  # the whole conversation
                messages = to_messages(value, where=f"{where}: {name}")
                contexts.append(messages[:-1])
                value = messages[-1:]
            elif row.get("prompt") is not None:
                contexts.append(to_messages(row["prompt"], where=f"{where}: prompt"))
            else:
                raise UserError(f"{where}: '{name}' is a lone response; needed: a 'prompt', or whole conversations")
            responses.append(to_response(value, where=f"{where}: {name}"))
        if contexts[0] != contexts[1]:
            raise UserError(f"{where}: 'chosen' and 'rejected' answer different conversations")
        return contexts[0], responses[0], responses[1]

    def example(self, index: int) -> PairExample:
        prompt, *responses = self.pair(index)
        encoded = []
        for response in responses:
            try:
                before, text, add_eos = render_response(self.tokenizer, prompt, response, self.chat_template_kwargs)
            except UserError as error:
                raise UserError(f"{self.rows.name(index)}: {error}") from error
            encoded.append(encode_texts(self.tokenizer, [text])[0] + [self.tokenizer.eos_token_id] * add_eos)
        prompt_ids = _with_bos(self.tokenizer, encode_texts(self.tokenizer, [before])[0])
        return PairExample(prompt_ids=prompt_ids, chosen_ids=encoded[0], rejected_ids=encoded[1])

    def __getitem__(self, i: int) -> PairExample:
        index = int(self.kept[i])
        example = self.example(index)
        self._kept_within(index, _pair_length(example), self.max_length)
        return example


def _pair_length(example: PairExample) -> int:
    return len(example.prompt_ids) + max(len(example.chosen_ids), len(example.rejected_ids))


def load_pairs(
    files: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    chat_template_kwargs: Kwargs = None,
) -> PairDataset:
    """Preferences from rows with `chosen` and `rejected`: two responses to `prompt`, or two whole conversations.

    Rows whose longer side has over `max_length` tokens, the prompt included, are dropped and counted.

    Raises:
        UserError: a file, column or value is missing or wrong (named with its row), or no row is left.
    """
    rows = Rows(check_files(files, columns=("chosen", "rejected")), ("prompt", "chosen", "rejected"))
    for column in ("chosen", "rejected"):
        rows.refuse_nulls(column)
    dataset = PairDataset(rows, tokenizer, chat_template_kwargs, max_length)

    def conversations(names: Sequence[str]) -> list[list[Part]]:
        prompt = [("prompt", "user")] if "prompt" in names else []
        return [[*prompt, (side, "assistant")] for side in ("chosen", "rejected")]

    def exact_lengths(indices: np.ndarray) -> list[int]:
        return [_pair_length(dataset.example(index)) for index in indices]

    length_filter = LengthFilter(tokenizer, add_generation_prompt=False, kwargs=chat_template_kwargs)
    kept = length_filter.fitting(rows, max_length, conversations, exact_lengths)
    dropped = Counter({f"longer than {max_length} tokens": len(rows) - len(kept)})
    dataset.keep(kept, +dropped, max_length, "pairs")
    return dataset


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
        seed: int,
        *,
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
        self._order: tuple[int, torch.Tensor] | None = None

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
        share = self.batch_size // self.world_size
        first = self.consumed + self.rank * share
        self.consumed += self.batch_size
        return [self._row(place) for place in range(first, first + share)]

    def _row(self, place: int) -> int:
        """The row at a place in the endless sequence of epochs."""
        epoch, position = divmod(place, self.num_rows)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch))
        return int(self._order[1][position])

    def _permutation(self, epoch: int) -> torch.Tensor:
        """(num_rows,) the order of an epoch."""
        if not self.shuffle:
            return torch.arange(self.num_rows)
        # Its own generator, seeded by value: neither the global RNG nor the epochs before have a say.
        seed = np.random.SeedSequence([self.seed, epoch]).generate_state(1, dtype=np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed) & (2**63 - 1))
        return torch.randperm(self.num_rows, generator=generator)

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
