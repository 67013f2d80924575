"""What is done to a model before it is trained: no dropout, and layers compiled that compute what they computed."""

import pytest
import torch
from conftest import TINY
from test_packing import batch, largest_gap, models
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from common.models import compile_layers, disable_dropout


def test_no_dropout_is_left_in_any_place() -> None:
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.arange(10)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    disable_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)


SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("kind", ["in the module", "in the configuration"])
def test_no_dropout_is_left_in_attention_that_looks_its_rate_up(kind: str) -> None:
    if kind == "in the module":
        config = AutoConfig.from_pretrained(TINY / "model", attention_dropout=0.5)
    else:
        config = AutoConfig.for_model("persimmon", **SIZES, attention_dropout=0.5)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.arange(10)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    disable_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_compiled_layers_give_what_they_gave() -> None:
    plain, packed = models("qwen3, the embedded model's")
    compile_layers(packed, backend="aot_eager")
    logprobs, gradients = largest_gap(plain, packed, batch()[2])
    assert logprobs < 1e-5 and gradients < 1e-5
    assert packed.state_dict().keys() == plain.state_dict().keys()  # checkpoints, exports and syncs go by these names


def graphs_compiled(model: nn.Module, lengths: list[int]) -> int:
    counted = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        counted.append(graph)
        return graph

    compile_layers(model, backend=backend)
    for length in lengths:
        model(torch.arange(length)[None], use_cache=False)
    return len(counted)


def test_layers_and_lengths_share_what_is_compiled() -> None:
    torch._dynamo.reset()
    one, three = (models("qwen3, the embedded model's")[0] for _ in range(2))
    del one.model.layers[1:]
    first = graphs_compiled(one, [9])
    torch._dynamo.reset()
    assert graphs_compiled(three, [9, 12, 20]) == first > 0
