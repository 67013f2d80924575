"""The models beside PPO's policy, before any is loaded: what they will score, whether they can, and their memory."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common import checkpoint, memory, rewards
from common.data import PromptDataset, to_dict
from common.device import GIB, get_device
from common.launch import UserError, require


def sources_by_style(dataset: PromptDataset) -> dict[str, set[str]]:
    """ "rule" and "model" -> the data_sources of the rows with that reward_model.style, over all rows read."""
    found: dict[str, set[str]] = {"rule": set(), "model": set()}
    for _, batch in dataset.rows.batches():
        cells = batch["reward_model"]
        if pa.types.is_struct(cells.type) and cells.type.get_field_index("style") >= 0:
            styles = pc.struct_field(cells, "style")
        else:
            styles = pa.array([to_dict(cell, where="reward_model").get("style") for cell in cells.to_pylist()])
        is_model = pc.fill_null(pc.equal(styles.cast(pa.string()), "model"), False)
        for style, rows in (("model", is_model), ("rule", pc.invert(is_model))):
            found[style] |= set(pc.unique(batch["data_source"].filter(rows)).to_pylist())
    return found


def check_arguments(args: Any) -> None:
    """Refuse numbers that PPO's formulas cannot take. Raises UserError."""
    for name in ("gamma", "gae_lambda"):
        value = getattr(args, name)
        require(0 <= value <= 1, f"--{name.replace('_', '-')} {value}: it must lie between 0 and 1")
    require(args.value_clip >= 0, f"--value-clip {args.value_clip}: a range cannot be negative; 0 turns it off")
    require(
        args.dual_clip == 0 or args.dual_clip > 1,
        f"--dual-clip {args.dual_clip}: it bounds a ratio and must be above 1; 0 turns it off",
    )
    require(
        args.kl_target is None or min(args.kl_target, args.kl_coef, args.kl_horizon) > 0,
        f"--kl-target {args.kl_target} --kl-coef {args.kl_coef} --kl-horizon {args.kl_horizon}: to steer the "
        "coefficient, all three must be above 0",
    )
    require(
        0 <= args.critic_warmup < args.steps,
        f"--critic-warmup {args.critic_warmup} of --steps {args.steps}: the policy would never learn",
    )


def check_rewards(
    args: Any, tokenizer: PreTrainedTokenizerBase, train_data: PromptDataset, test_data: PromptDataset | None
) -> Path | None:
    """Every row must have a rule or a reward model that scores it. Returns the reward model's folder, if there is one.

    Raises:
        UserError: naming the data_source that nothing scores, or why the reward model cannot read the policy's tokens.
    """
    for dataset in filter(None, (train_data, test_data)):
        sources = sources_by_style(dataset)
        for source in sorted(sources["rule"]):
            require(
                args.reward_fn is not None or rewards.knows(source),
                f"data_source '{source}' has no reward rule: bring one with --reward-fn file.py:name",
            )
        require(
            args.reward_model is not None or not sources["model"],
            f"data_source {', '.join(sorted(sources['model']))} has rows with reward_model.style 'model': name the "
            "model that scores them with --reward-model (algos/reward_model.py trains one)",
        )
    if args.reward_model is None:
        return None
    require(
        bool(sources_by_style(train_data)["model"]),
        f"--reward-model {args.reward_model}: no row of the training files has reward_model.style 'model', so it "
        "would score nothing",
    )
    folder = checkpoint.resolve_model(args.reward_model)
    if "score.weight" not in checkpoint.safetensors_files(folder):
        raise UserError(f"--reward-model {folder}: has no score.weight, so it is no reward model of one number")
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    require(
        theirs.get_vocab() == tokenizer.get_vocab(),
        f"--reward-model {folder}: its tokenizer has other tokens than the policy's, whose ids it would have to read",
    )
    return folder


def memory_table(args: Any) -> str:
    """The memory of each of `--dry-run` ranks: the policy's table, and what critic and reward model add to it."""
    lines = [
        memory.table(args, ranks=args.dry_run, frozen_models=int(args.kl_coef > 0)),
        "",
        "  in addition, all the time:",
    ]
    for what, name in (("critic", args.critic_model or args.model), ("reward model", args.reward_model)):
        if name is not None:
            folder = checkpoint.resolve_model(name)
            frozen = int(what == "reward model")
            rows = memory.plan(folder, args, ranks=args.dry_run, frozen_models=frozen, device=get_device())
            kinds = "frozen models" if frozen else "sharded)"
            size = sum(size for row, size in rows.items() if kinds in row)
            lines.append(f"  {what}, sharded: {size / GIB:.3f}")
    return "\n".join(lines)
