"""Statistics over the tokens of all ranks that scripts log and nothing depends on."""

import torch

from common import launch
from common.device import Device


def value_metrics(
    values: torch.Tensor, returns: torch.Tensor, response_mask: torch.Tensor, device: Device
) -> dict[str, float]:
    """Means of a critic's values and of the returns, and how much of the returns' variance the values explain.

    Arguments are (B, T). explained_variance is 1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than
    a constant, below 0 worse than one; 0 where the returns are all the same. A collective.
    """
    values, returns = values[response_mask > 0].double(), returns[response_mask > 0].double()
    columns = {"values": values, "returns": returns, "error": returns - values}
    sums = {name: column.sum() for name, column in columns.items()}
    means = launch.all_reduce_means((sums, len(values)), device=device)
    # A second pass, because a difference of large squares would lose what is small.
    squares = {name: (column - means[name]).square().sum() for name, column in columns.items()}
    variances = launch.all_reduce_means((squares, len(values)), device=device)
    spread = variances["returns"]
    explained = 1.0 - variances["error"] / spread if spread > 1e-12 else 0.0
    return {"values": means["values"], "returns": means["returns"], "explained_variance": explained}


def kl_per_response(
    old_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor, device: Device
) -> float:
    """Mean over the responses of all ranks of sum_t (log pi_old - log pi_ref), in nats. Arguments are (B, T).

    A collective.
    """
    kl = ((old_logprobs - ref_logprobs) * response_mask).double().sum()
    return launch.all_reduce_means(({"kl": kl}, len(response_mask)), device=device)["kl"]
