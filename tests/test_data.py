"""Reading what users bring: rows of every form, chat templates of every habit, and the limit on length."""

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from common import data
from common.data import encode_chat, load_pairs, load_prompts, load_sft, render_chat
from common.launch import UserError
from common.rows import Rows

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Qwen's habits: no BOS, a turn ends with <|im_end|> and a line break, thinking can be turned off."""
LLAMA = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Llama's habits: BOS in the template, EOS ends a turn."""
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3's habits: a finished turn looks otherwise than it was generated."""
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Gemma's habit: no system messages."""


def make_tokenizer(template: str | None = CHATML, *, bos: str | None = None, adds_bos: bool = False) -> Any:
    """A tokenizer whose tokens are bytes and a few special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
    if adds_bos:
        bos_id = backend.token_to_id(bos)
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    eos = "</s>" if template == LLAMA else "<|im_end|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos, chat_template=template
    )


TOKENIZER = make_tokenizer()
USER = [{"role": "user", "content": "2+2?"}]


def row(**changes: Any) -> dict[str, Any]:
    """A row in the five-field form."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": USER,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    } | changes


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in row().items() if key != name}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write(rows, name) -> the path of a parquet file with these rows."""

    def write_rows(rows: Sequence[dict[str, Any]], name: str = "train.parquet") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
        return str(path)

    return write_rows


def prompts(*files: str, limit: int = 500, tokenizer: Any = TOKENIZER, **kwargs: Any) -> data.PromptDataset:
    return load_prompts(files, tokenizer=tokenizer, max_prompt_length=limit, **kwargs)


def text_of(dataset: data.PromptDataset, i: int = 0) -> str:
    return dataset.tokenizer.decode(dataset[i].prompt_ids)


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_a_row_as_verl_writes_it(write: Callable) -> None:
    dataset = prompts(write([row()]))
    prompt = dataset[0]
    assert text_of(dataset) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert (prompt.index, prompt.data_source, prompt.ground_truth, prompt.reward_style) == (
        0,
        "openai/gsm8k",
        "4",
        "rule",
    )
    assert prompt.extra_info == {"split": "train", "index": 0}
    assert prompt.messages == USER
    assert dataset.report == {"read": 1, "kept": 1, "dropped": {}}
    assert dataset.data_sources == {"openai/gsm8k"}


PROMPT_FORMS = {
    "a string": "2+2?",
    "messages as JSON": json.dumps(USER),
    "a key filled with None": [{"role": "user", "content": "2+2?", "name": None, "tool_calls": None}],
    "text parts": [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}],
}


@pytest.mark.parametrize("form", PROMPT_FORMS)
def test_prompts_of_every_form_give_the_same_ids(write: Callable, form: str) -> None:
    expected = prompts(write([row()], "a.parquet"))[0].prompt_ids
    dataset = prompts(write([row(prompt=PROMPT_FORMS[form])], "b.parquet"))
    assert dataset[0].prompt_ids == expected
    assert dataset.lengths(np.array([0])) == [len(expected)]


@pytest.mark.parametrize("value", [np.array(USER, dtype=object), tuple(USER), [list(USER[0].items())]])
def test_to_messages_takes_what_pandas_and_arrow_make_of_lists(value: Any) -> None:
    assert data.to_messages(value, where="x") == USER


@pytest.mark.parametrize("value", [[], None, 3, [{"content": "x"}], [{"role": "user"}], ["text"], [None]])
def test_a_prompt_that_is_none(value: Any) -> None:
    with pytest.raises(UserError, match="train.parquet, row 7: prompt"):
        data.to_messages(value, where="train.parquet, row 7: prompt")


def test_an_image_is_refused_and_not_dropped() -> None:
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]
    with pytest.raises(UserError, match="no text"):
        data.to_messages([{"role": "user", "content": parts}], where="x")


def test_several_turns_and_a_system_message(write: Callable) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "2+2?"},
    ]
    dataset = prompts(write([row(prompt=messages)]))
    assert text_of(dataset) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_last_turn_by_the_assistant_is_continued(write: Callable) -> None:
    messages = [*USER, {"role": "assistant", "content": "Let me think.\n<think>"}]
    dataset = prompts(write([row(prompt=messages)]))
    assert text_of(dataset) == ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nLet me think.\n<think>")


def test_a_prompt_with_the_templates_own_markup_stands_as_it_is(write: Callable) -> None:
    """TinyZero writes the whole conversation into one user message."""
    rendered = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nLet me solve this.\n<think>"
    dataset = prompts(write([row(prompt=[{"role": "user", "content": rendered}])]))
    assert text_of(dataset) == rendered


TRUTHS = ["72", 72, 7.5, ["a", "b"], {"target": 24, "numbers": [1, 2]}, Decimal("1.50"), True]


@pytest.mark.parametrize("truth", TRUTHS, ids=repr)
def test_ground_truths_of_every_type(write: Callable, truth: Any) -> None:
    dataset = prompts(write([row(reward_model={"style": "rule", "ground_truth": truth})]))
    assert dataset[0].ground_truth == truth


def test_ground_truths_of_different_types_in_different_files(write: Callable) -> None:
    files = [
        write([row(reward_model={"style": "rule", "ground_truth": truth})], f"{number}.parquet")
        for number, truth in enumerate(TRUTHS)
    ]
    dataset = prompts(*files)
    assert [dataset[i].ground_truth for i in range(len(dataset))] == TRUTHS
    assert [dataset[i].index for i in range(len(dataset))] == list(range(len(TRUTHS)))


def test_none_filled_keys_are_dropped_everywhere(write: Callable) -> None:
    """Arrow gives every row the union of all rows' keys."""
    rows = [
        row(reward_model={"style": "rule", "ground_truth": {"target": 3, "numbers": [1, 2]}}, extra_info={"a": 1}),
        row(reward_model={"style": "rule", "ground_truth": {"answer": "x"}}, extra_info={"b": {"c": None, "d": 2}}),
    ]
    dataset = prompts(write(rows))
    assert dataset[0].ground_truth == {"target": 3, "numbers": [1, 2]}
    assert dataset[1].ground_truth == {"answer": "x"}
    assert [dataset[0].extra_info, dataset[1].extra_info] == [{"a": 1}, {"b": {"d": 2}}]


@pytest.mark.parametrize("absent", ["ability", "extra_info"])
def test_optional_columns(write: Callable, absent: str) -> None:
    dataset = prompts(write([without(absent)]))
    assert dataset[0].ground_truth == "4"
    if absent == "extra_info":
        assert dataset[0].extra_info == {}


def test_a_null_extra_info_is_empty(write: Callable) -> None:
    assert prompts(write([row(extra_info=None), row()]))[0].extra_info == {}


def test_structs_as_json_and_style_model(write: Callable) -> None:
    path = write([row(reward_model=json.dumps({"style": "model"}), extra_info='{"k": [1, null]}')])
    prompt = prompts(path)[0]
    assert (prompt.ground_truth, prompt.reward_style, prompt.extra_info) == (None, "model", {"k": [1, None]})


def test_extra_columns_and_other_arrow_types(write: Callable, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row(data_source="a"), row(data_source="b")])
    table = table.set_column(0, "data_source", table["data_source"].dictionary_encode())
    message = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    prompt = pa.array([USER, USER], type=pa.large_list(message))
    table = table.set_column(1, "prompt", prompt).append_column("embedding", pa.array([[0.5], [0.25]]))
    extra = pa.array([[("k", "v")], []], type=pa.map_(pa.string(), pa.string()))
    table = table.set_column(4, "extra_info", extra)
    pq.write_table(table, tmp_path / "types.parquet")
    dataset = prompts(str(tmp_path / "types.parquet"))
    assert [dataset[i].data_source for i in range(2)] == ["a", "b"]
    assert dataset[0].messages == USER
    assert [dataset[i].extra_info for i in range(2)] == [{"k": "v"}, {}]
    assert dataset.data_sources == {"a", "b"}


# -- what is wrong is named -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", ["data_source", "prompt", "reward_model"])
def test_a_missing_column_is_named_with_its_file(write: Callable, absent: str) -> None:
    good, bad = write([row()], "good.parquet"), write([without(absent)], "bad.parquet")
    with pytest.raises(UserError, match=rf"bad\.parquet, row 0: no column '{absent}'.*data\.md"):
        prompts(good, bad)
    with pytest.raises(UserError, match=absent):
        data.check_files([good, bad])


@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model"])
def test_a_null_is_named_with_its_row(write: Callable, column: str) -> None:
    path = write([row(), row(), row(**{column: None})])
    with pytest.raises(UserError, match=rf"train\.parquet, row 2: '{column}' is empty"):
        prompts(path)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"reward_model": "72"}, r"reward_model is a int"),
        ({"reward_model": "seventy-two"}, r"reward_model is the text 'seventy-two'"),
        ({"reward_model": ["72"]}, r"reward_model is a list"),
        ({"extra_info": "index 0"}, r"extra_info is the text 'index 0'"),
        ({"data_source": 7}, r"'data_source' is no text: 7"),
    ],
)
def test_a_column_of_another_form_is_named_at_the_start(write: Callable, bad: dict, said: str) -> None:
    with pytest.raises(UserError, match=rf"b\.parquet, row 0: {said}"):
        prompts(write([row()], "a.parquet"), write([row(**bad)], "b.parquet"))


@pytest.mark.parametrize("bad", [[], [{"role": "user", "content": None}], [{"role": None, "content": "x"}]])
def test_a_broken_prompt_is_named_with_its_row(write: Callable, bad: Any) -> None:
    with pytest.raises(UserError, match=r"train\.parquet, row 1: prompt"):
        prompts(write([row(), row(prompt=bad)]))


def test_files_that_do_not_exist(tmp_path: Path) -> None:
    for name in (tmp_path / "none.parquet", tmp_path / "*.parquet", tmp_path):
        with pytest.raises(UserError, match=r"no such file|no \.parquet file"):
            data.check_files([str(name)])
    with pytest.raises(UserError, match="no data files"):
        data.check_files([])


@pytest.mark.parametrize("content", [b"", b"PAR1", b'{"a": 1}\n'])
def test_files_that_are_no_parquet(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.parquet: not a parquet file"):
        data.check_files([str(tmp_path / "x.parquet")])


def test_a_file_damaged_in_the_middle(write: Callable) -> None:
    path = Path(write([row() for _ in range(200)]))
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train\.parquet"):
        prompts(str(path))


def test_folders_and_globs(write: Callable, tmp_path: Path) -> None:
    for name in ("shards/b.parquet", "shards/a.parquet", "shards/more/c.parquet", "other/d.parquet"):
        write([row(data_source=name)], name)
    (tmp_path / "shards" / "README.md").write_text("no data")
    (tmp_path / "shards" / ".hidden.parquet").write_text("no data")

    def sources(*files: str) -> list[str]:
        dataset = prompts(*files)
        return [dataset[i].data_source for i in range(len(dataset))]

    assert sources(f"{tmp_path}/shards") == ["shards/a.parquet", "shards/b.parquet", "shards/more/c.parquet"]
    assert sources(f"{tmp_path}/*/[ab].parquet") == ["shards/a.parquet", "shards/b.parquet"]
    assert sources(f"{tmp_path}/**/[cd].parquet") == ["other/d.parquet", "shards/more/c.parquet"]
    assert sources(f"{tmp_path}/other", f"{tmp_path}/shards/a.parquet") == ["other/d.parquet", "shards/a.parquet"]
    assert sources(f"{tmp_path}/other", f"{tmp_path}/other/d.parquet") == ["other/d.parquet"], "each file once"


def test_a_folder_with_train_and_test_would_leak(write: Callable, tmp_path: Path) -> None:
    write([row()], "gsm8k/train.parquet")
    write([row()], "gsm8k/test-00000-of-00001.parquet")
    with pytest.raises(UserError, match="several splits"):
        prompts(str(tmp_path / "gsm8k"))


def test_empty_files(write: Callable, tmp_path: Path) -> None:
    empty = str(tmp_path / "empty.parquet")
    pq.write_table(pa.table({}), empty)
    schema = write([row()][:0] or [row()], "one.parquet")
    pq.write_table(pq.read_table(schema).slice(0, 0), tmp_path / "typed.parquet")
    assert len(prompts(empty, schema, str(tmp_path / "typed.parquet"))) == 1
    with pytest.raises(UserError, match="no rows"):
        prompts(empty)


# -- the limit on length ----------------------------------------------------------------------------------------------


def length(content: str, tokenizer: Any = TOKENIZER) -> int:
    return len(encode_chat(tokenizer, [{"role": "user", "content": content}], add_generation_prompt=True))


@pytest.mark.parametrize("as_string", [False, True])
def test_a_prompt_of_the_limit_is_kept_and_one_more_token_is_not(write: Callable, as_string: bool) -> None:
    limit = length("x" * 30)
    contents = ["x" * size for size in (29, 30, 31, 5, 32)]
    rows = [row(prompt=c if as_string else [{"role": "user", "content": c}]) for c in contents]
    dataset = prompts(write(rows), limit=limit)
    assert [dataset[i].index for i in range(len(dataset))] == [0, 1, 3]
    assert len(dataset[1].prompt_ids) == limit
    assert dataset.report == {"read": 5, "kept": 3, "dropped": {f"longer than {limit} tokens": 2}}


def test_no_prompt_fits(write: Callable) -> None:
    with pytest.raises(UserError, match=r"none of the 3 prompts .*longer than 4 tokens.*limit 4"):
        prompts(write([row()] * 3), limit=4)


@settings(max_examples=40, deadline=None)
@given(
    conversations=st.lists(
        st.lists(
            st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text(max_size=12)),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=12,
    ),
    limit=st.integers(20, 160),
    template=st.sampled_from([CHATML, LLAMA, FORGETFUL, None]),
)
def test_the_filter_agrees_with_tokenising_everything(
    tmp_path_factory: pytest.TempPathFactory, conversations: list, limit: int, template: str | None
) -> None:
    tokenizer = make_tokenizer(template, bos="<s>", adds_bos=template != FORGETFUL)
    all_messages = [
        [{"role": r, "content": c.encode(errors="ignore").decode()} for r, c in talk] for talk in conversations
    ]
    path = str(tmp_path_factory.mktemp("filter") / "x.parquet")
    pq.write_table(pa.Table.from_pylist([row(prompt=messages) for messages in all_messages]), path)
    try:
        exact = [len(encode_chat(tokenizer, messages, add_generation_prompt=True)) for messages in all_messages]
    except UserError:  # a prefill that is empty, say
        return
    expected = [i for i, count in enumerate(exact) if count <= limit]
    if not expected:
        with pytest.raises(UserError, match="none of the"):
            prompts(path, limit=limit, tokenizer=tokenizer)
        return
    assert prompts(path, limit=limit, tokenizer=tokenizer).kept.tolist() == expected


def test_only_rows_that_could_be_too_long_are_tokenised(write: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write([row(prompt=[{"role": "user", "content": "x" * size}]) for size in (5, 10, 200)])
    measured = []
    exact = data.PromptDataset.lengths
    monkeypatch.setattr(data.PromptDataset, "lengths", lambda self, i: measured.extend(i.tolist()) or exact(self, i))
    prompts(path, limit=150)
    assert measured == [2]


def test_a_template_that_breaks_the_bound_is_not_missed(write: Callable) -> None:
    sneaky = CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{% if 'a' in m['content'] %}" + "b" * 99 + "{% endif %}"
    )
    tokenizer = make_tokenizer(sneaky)
    dataset = prompts(write([row(prompt="hi"), row(prompt="say a")]), limit=100, tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"row 1.*over the limit of 100"):
        dataset[1]


# -- chat templates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [LLAMA, CHATML, None])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_exactly_once(template: str | None, adds_bos: bool) -> None:
    tokenizer = make_tokenizer(template, bos="<s>", adds_bos=adds_bos)
    ids = encode_chat(tokenizer, USER, add_generation_prompt=True)
    in_use = adds_bos or template == LLAMA
    assert ids.count(tokenizer.bos_token_id) == int(in_use)
    assert (ids[0] == tokenizer.bos_token_id) == in_use


def test_bos_once_in_a_prompt_that_was_rendered_before() -> None:
    tokenizer = make_tokenizer(LLAMA, bos="<s>", adds_bos=True)
    rendered = render_chat(tokenizer, USER, add_generation_prompt=True)
    ids = encode_chat(tokenizer, [{"role": "user", "content": rendered}], add_generation_prompt=True)
    assert ids == encode_chat(tokenizer, USER, add_generation_prompt=True)
    assert ids.count(tokenizer.bos_token_id) == 1


def test_bos_once_in_fine_tuning_and_pairs(write: Callable) -> None:
    tokenizer = make_tokenizer(LLAMA, bos="<s>", adds_bos=True)
    path = write([{"prompt": "2+2?", "response": "4", "chosen": "4", "rejected": "5"}])
    example = load_sft([path], tokenizer=tokenizer, max_length=99)[0]
    pair = load_pairs([path], tokenizer=tokenizer, max_length=99)[0]
    bos = tokenizer.bos_token_id
    assert example.input_ids.count(bos) == 1
    assert (pair.prompt_ids + pair.chosen_ids).count(bos) == 1
    assert example.input_ids == pair.prompt_ids + pair.chosen_ids


def test_template_arguments_reach_the_template() -> None:
    text = render_chat(TOKENIZER, USER, add_generation_prompt=True, chat_template_kwargs={"enable_thinking": False})
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_template_arguments_that_do_nothing_are_refused(write: Callable) -> None:
    with pytest.raises(UserError, match="no 'enable_thinkin'"):
        prompts(write([row()]), chat_template_kwargs={"enable_thinkin": False})


def test_a_template_that_refuses_a_row_names_it(write: Callable) -> None:
    path = write([row(), row(prompt=[{"role": "system", "content": "Be brief."}, *USER])])
    with pytest.raises(UserError, match=r"train\.parquet, row 1: prompt: .*System role not supported"):
        prompts(path, tokenizer=make_tokenizer(GEMMA))


def test_the_plain_template() -> None:
    base = make_tokenizer(None)
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert render_chat(base, USER, add_generation_prompt=True) == "2+2?"
    assert render_chat(base, talk, add_generation_prompt=True) == "System: S\n\nUser: U\n\nAssistant:"
    asked_for = {"chat_template": "plain"}
    assert render_chat(TOKENIZER, USER, add_generation_prompt=True, chat_template_kwargs=asked_for) == "2+2?"


def test_a_tokenizer_that_knows_several_templates() -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = {"default": CHATML, "tool_use": "?"}
    assert render_chat(tokenizer, USER, add_generation_prompt=True).startswith("<|im_start|>user")


# -- fine-tuning ------------------------------------------------------------------------------------------------------


def parts(example: data.SFTExample, tokenizer: Any = TOKENIZER) -> list[tuple[str, int]]:
    """The example as runs of text with the same mask."""
    runs: list[tuple[list[int], int]] = []
    for token, mask in zip(example.input_ids, example.loss_mask, strict=True):
        if not runs or runs[-1][1] != mask:
            runs.append(([], mask))
        runs[-1][0].append(token)
    return [(tokenizer.decode(ids), mask) for ids, mask in runs]


def sft(*files: str, limit: int = 999, tokenizer: Any = TOKENIZER, **kwargs: Any) -> data.SFTDataset:
    return load_sft(files, tokenizer=tokenizer, max_length=limit, **kwargs)


TALK = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.mark.parametrize("prompt", ["2+2?", USER])
@pytest.mark.parametrize("response", ["4", [{"role": "assistant", "content": "4"}]])
def test_loss_on_the_response_and_the_end_of_its_turn(write: Callable, prompt: Any, response: Any) -> None:
    example = sft(write([{"prompt": prompt, "response": response}]))[0]
    assert parts(example) == [("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", 0), ("4<|im_end|>", 1)]


def test_loss_on_all_of_the_assistants_turns(write: Callable) -> None:
    dataset = sft(write([{"messages": TALK}]))
    assert len(dataset) == 1
    assert parts(dataset[0]) == [
        ("<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n", 0),
        ("Hello.<|im_end|>", 1),
        ("\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("4<|im_end|>", 1),
    ]


def test_turns_of_a_prompt_are_context_only(write: Callable) -> None:
    example = sft(write([{"prompt": TALK[:3], "response": "4"}]))[0]
    assert [text for text, mask in parts(example) if mask] == ["4<|im_end|>"]


def test_the_context_is_the_prompt_of_rl_token_for_token(write: Callable) -> None:
    path = write([row() | {"response": "4"}])
    example, prompt = sft(path)[0], prompts(path)[0]
    assert example.input_ids[: example.loss_mask.index(1)] == prompt.prompt_ids


def test_eos_ends_a_turn_where_the_template_says_so(write: Callable) -> None:
    tokenizer = make_tokenizer(LLAMA, bos="<s>")
    example = sft(write([{"messages": TALK}]), tokenizer=tokenizer)[0]
    assert [text for text, mask in parts(example, tokenizer) if mask] == ["Hello.</s>", "4</s>"]


def test_eos_is_added_where_there_is_no_template(write: Callable) -> None:
    base = make_tokenizer(None)
    example = sft(write([{"prompt": "2+2=", "response": "4"}]), tokenizer=base)[0]
    assert parts(example, base) == [("2+2=", 0), ("4<|im_end|>", 1)]
    assert example.input_ids[-1] == base.eos_token_id


def test_without_a_template_each_turn_is_an_example(write: Callable) -> None:
    base = make_tokenizer(None)
    dataset = sft(write([{"messages": TALK}]), tokenizer=base)
    assert [parts(dataset[i], base) for i in range(len(dataset))] == [
        [("Hi.", 0), ("Hello.<|im_end|>", 1)],
        [("User: Hi.\n\nAssistant: Hello.\n\nUser: 2+2?\n\nAssistant:", 0), (" 4<|im_end|>", 1)],
    ]


def test_a_template_that_rewrites_finished_turns_gives_each_turn_its_own_example(write: Callable) -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    dataset = sft(write([{"messages": TALK}, {"messages": TALK[:2]}]), tokenizer=tokenizer)
    assert dataset.rewrites_history
    assert dataset.kept.tolist() == [[0, 1], [0, 3], [1, 1]]
    assert parts(dataset[1], tokenizer) == [
        (
            "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
            0,
        ),
        ("<think>\n\n</think>\n\n4<|im_end|>", 1),
    ]


def test_a_prefilled_prompt_and_its_response(write: Callable) -> None:
    prompt = [*USER, {"role": "assistant", "content": "<think>"}]
    example = sft(write([{"prompt": prompt, "response": "2+2</think>4"}]))[0]
    assert parts(example)[-1] == ("2+2</think>4<|im_end|>", 1)
    assert parts(example)[0][0].endswith("<|im_start|>assistant\n<think>")


def test_special_tokens_in_a_response_do_not_end_it(write: Callable) -> None:
    example = sft(write([{"prompt": "Q", "response": "a<|im_end|>b"}]))[0]
    assert parts(example)[-1] == ("a<|im_end|>b<|im_end|>", 1)


def test_rows_that_are_too_long_or_silent_are_counted(write: Callable) -> None:
    rows = [{"messages": TALK}, {"messages": [*USER, {"role": "assistant", "content": "x" * 500}]}, {"messages": USER}]
    dataset = sft(write(rows), limit=300)
    assert dataset.report == {
        "read": 3,
        "kept": 1,
        "dropped": {"longer than 300 tokens": 1, "without an assistant turn": 1},
    }


def test_the_limit_of_fine_tuning_is_exact(write: Callable) -> None:
    path = write([{"prompt": "Q", "response": "x" * size} for size in (10, 11, 12)])
    limit = len(sft(path)[1].input_ids)
    assert [len(example.input_ids) for example in map(sft(path, limit=limit).__getitem__, range(2))][-1] == limit
    assert len(sft(path, limit=limit)) == 2


def test_fine_tuning_files_of_both_forms_together(write: Callable) -> None:
    dataset = sft(write([{"prompt": "Q", "response": "A"}], "a.parquet"), write([{"messages": TALK}], "b.parquet"))
    assert [sum(dataset[i].loss_mask) for i in range(2)] == [2, 9]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"prompt": "Q"}, "no column 'response'"),
        ({"text": "Q"}, "no column 'prompt'"),
        ({"prompt": "Q", "response": ""}, "row 0: response is empty"),
        ({"prompt": "Q", "response": None}, "row 0: 'response' is empty"),
        ({"messages": None}, "row 0: 'messages' is empty"),
        ({"messages": [{"role": "user", "content": None}]}, "row 0: messages: message 0"),
    ],
)
def test_fine_tuning_rows_that_are_wrong(write: Callable, bad: dict, said: str) -> None:
    with pytest.raises(UserError, match=rf"train\.parquet.*{said}"):
        sft(write([bad]))[0]


# -- pairs ------------------------------------------------------------------------------------------------------------


def pairs(*files: str, limit: int = 999, tokenizer: Any = TOKENIZER) -> data.PairDataset:
    return load_pairs(files, tokenizer=tokenizer, max_length=limit)


def as_conversation(answer: str) -> list[dict[str, str]]:
    return [*USER, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(
    "pair",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": USER, "chosen": "4", "rejected": "5"},
        {"prompt": USER, "chosen": as_conversation("4")[1:], "rejected": as_conversation("5")[1:]},
        {"chosen": as_conversation("4"), "rejected": as_conversation("5")},
        {"prompt": "2+2?", "chosen": as_conversation("4"), "rejected": as_conversation("5")},
    ],
)
def test_pairs_of_every_form(write: Callable, pair: dict) -> None:
    example = pairs(write([pair]))[0]
    decoded = [TOKENIZER.decode(ids) for ids in (example.prompt_ids, example.chosen_ids, example.rejected_ids)]
    assert decoded == ["<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "4<|im_end|>", "5<|im_end|>"]


def test_the_longer_side_of_a_pair_counts(write: Callable) -> None:
    path = write(
        [{"prompt": "Q", "chosen": "x" * a, "rejected": "x" * b} for a, b in ((9, 5), (5, 9), (10, 1), (1, 10))]
    )
    one = pairs(path)[0]
    dataset = pairs(path, limit=len(one.prompt_ids) + len(one.chosen_ids))
    assert dataset.kept.tolist() == [0, 1]
    assert sum(dataset.report["dropped"].values()) == 2


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"chosen": "4", "rejected": "5"}, "lone response"),
        ({"prompt": "Q", "chosen": "4"}, "no column 'rejected'"),
        ({"prompt": "Q", "chosen": "4", "rejected": ""}, "rejected is empty"),
        ({"chosen": as_conversation("4"), "rejected": [TALK[0], TALK[1]]}, "different conversations"),
    ],
)
def test_pairs_that_are_wrong(write: Callable, bad: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        pairs(write([bad]))[0]


# -- large files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOLORL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("common.rows.MAPPED_ROWS", 10)
    monkeypatch.setattr("common.rows.CONVERT_ROWS", 7)
    return tmp_path / "cache"


def mixed_rows(count: int) -> list[dict[str, Any]]:
    return [row(data_source=f"source-{i % 3}", prompt=[{"role": "user", "content": "x" * i}]) for i in range(count)]


def test_a_mapped_file_reads_like_one_in_memory(write: Callable, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(mixed_rows(40))
    mapped = prompts(path, limit=60)
    assert len(list(cache.glob("*.arrow"))) == 1
    monkeypatch.setattr("common.rows.MAPPED_ROWS", 1000)
    in_memory = prompts(path, limit=60)
    assert mapped.kept.tolist() == in_memory.kept.tolist()
    assert [mapped[i] for i in range(len(mapped))] == [in_memory[i] for i in range(len(in_memory))]
    assert mapped.data_sources == in_memory.data_sources


def test_a_mapped_file_with_categories(write: Callable, cache: Path, tmp_path: Path) -> None:
    table = pa.Table.from_pylist(mixed_rows(40))
    table = table.set_column(0, "data_source", table["data_source"].dictionary_encode())
    pq.write_table(table, tmp_path / "categories.parquet", row_group_size=5)
    dataset = prompts(str(tmp_path / "categories.parquet"))
    assert [dataset[i].data_source for i in range(6)] == [f"source-{i % 3}" for i in range(6)]


def test_a_changed_file_is_converted_anew(write: Callable, cache: Path) -> None:
    assert len(prompts(write(mixed_rows(20)))) == 20
    assert len(prompts(write(mixed_rows(30)))) == 30


def test_the_lengths_of_a_large_file_are_measured_once(
    write: Callable, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "REMEMBERED_ROWS", 3)
    path = write(mixed_rows(40))
    first = prompts(path, limit=60).kept.tolist()
    monkeypatch.setattr(data.PromptDataset, "lengths", lambda *_: pytest.fail("measured again"))
    assert prompts(path, limit=60).kept.tolist() == first
    with pytest.raises(pytest.fail.Exception):
        prompts(path, limit=61)


def test_a_conversion_that_was_killed_is_done_again(write: Callable, cache: Path) -> None:
    path = write(mixed_rows(20))
    prompts(path)
    [mapped] = cache.glob("*.arrow")
    mapped.rename(mapped.with_name(f"{mapped.name}.tmp"))
    mapped.with_name(f"{mapped.name}.tmp").write_bytes(b"half")
    assert len(prompts(path)) == 20


def test_a_home_that_cannot_be_written(write: Callable, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = cache.with_name("file")
    blocker.write_text("")
    monkeypatch.setenv("SOLORL_CACHE", str(blocker / "sub"))
    monkeypatch.setenv("HOME", str(blocker))
    assert len(prompts(write(mixed_rows(20)))) == 20


def test_rows_locates_over_several_files(write: Callable) -> None:
    files = [write([row(data_source=f"{f}-{i}") for i in range(f)], f"{f}.parquet") for f in (1, 3, 2)]
    rows = Rows([Path(file) for file in files], ("data_source",))
    assert [rows[i]["data_source"] for i in range(len(rows))] == ["1-0", "3-0", "3-1", "3-2", "2-0", "2-1"]
    assert rows.name(4).endswith("2.parquet, row 0")
    assert rows.column("data_source", np.array([0, 2, 5])) == ["1-0", "3-1", "2-1"]
