"""What is done to a Hugging Face model before it is trained."""

from torch import nn


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: the same tokens must get the same numbers twice, or ratios would compare noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    # Attention looks its rate up, most often in its module, which had it from the configuration; some in the latter.
    for holder in (*model.modules(), model.config):
        for name, value in vars(holder).items():
            if "dropout" in name and isinstance(value, float):
                setattr(holder, name, 0.0)


def compile_layers(model: nn.Module, *, backend: str = "inductor") -> None:
    """torch.compile each decoder layer, for sequences of any length. Before FSDP shards the model.

    Layer by layer, so that FSDP can still gather one at a time, and so that all layers share what is compiled for the
    first. Attention over packed rows stays as it is: it depends on a layout that differs in every micro-batch.
    """
    for layer in model.get_decoder().layers:
        layer.compile(backend=backend, dynamic=True)
