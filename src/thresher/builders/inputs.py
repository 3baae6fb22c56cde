"""The inputs of a run that need no model weights: objective, layout, pairs, plan. They are the same on every rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from thresher.builders.data import StoreBuilder, open_stores
from thresher.config import DPOConfig
from thresher.data.batching.batches import CostModel, MicroBatching, ScoringBatching
from thresher.data.batching.plan import Plan, make_plan
from thresher.data.store.reader import PairStore
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.models.layouts import VARLEN, Layout, LayoutName, choose_layout
from thresher.models.loading.load import load_model_config, load_tokenizer, set_pad_token
from thresher.models.loading.location import named_model

logger = logging.getLogger(__name__)

# large enough for matrix products to run at full speed, small enough for activations to stay small
DEFAULT_TOKENS_PER_MICRO_BATCH = 4096


@dataclass(frozen=True)
class RunInputs:
    """Cheap to pickle: a store is sent as its path, and the receiver memory-maps its files.

    max_tokens: token budget of a micro-batch, chosen for all ranks; None: the default of the layout.
    """

    objective: Objective
    layout: Layout
    train: PairStore
    validation: PairStore | None
    plan: Plan
    max_tokens: int | None = None


def open_inputs(config: DPOConfig, objective: Objective, build_store: StoreBuilder) -> RunInputs:
    """Build what needs no model, preparing pairs that are not prepared yet; mistakes show up within seconds."""
    tokenizer, layout = build_layout(config)
    train, validation = open_stores(config, tokenizer, build_store)
    max_tokens = config.actor_train.training_args.max_tokens_per_micro_batch
    return RunInputs(objective, layout, train, validation, build_plan(config, len(train)), max_tokens)


def build_layout(config: DPOConfig) -> tuple[PreTrainedTokenizerBase, Layout]:
    """Load the tokenizer and choose how pairs are arranged in a batch; log the reason if it is not the fastest way."""
    tokenizer, layout, note = find_layout(config)
    if note is not None:
        logger.info("%s", note)
    return tokenizer, layout


def find_layout(config: DPOConfig) -> tuple[PreTrainedTokenizerBase, Layout, str | None]:
    """Load the tokenizer and choose the layout, with the reason if rows cannot be packed."""
    path, args = named_model(config.tokenizer_path), config.actor_train.model_args
    tokenizer = load_tokenizer(path, trust_remote_code=args.trust_remote_code)
    pad_id = set_pad_token(tokenizer, args.pad_token, path)
    of_reference = config.reference.model_args.attn_implementation
    if VARLEN in (args.attn_implementation, of_reference) and of_reference not in (None, args.attn_implementation):
        raise UserError(
            f"reference.model_args.attn_implementation is {of_reference}, and actor_train's is "
            f"{args.attn_implementation}; {VARLEN} is for both models: set it in actor_train.model_args alone"
        )
    attention = args.attn_implementation or of_reference
    requested, reason = _supported_layout(config)
    layout, note = choose_layout(
        requested, _model_configs(config), attention, pad_id, scores_prompt=not config.apply_loss_mask
    )
    return tokenizer, layout, note or reason


def _supported_layout(config: DPOConfig) -> tuple[LayoutName, str | None]:
    """Return the layout to choose: `padded`, and why, instead of `auto` if a strategy does not support packed rows."""
    for section, role in (("actor_train", config.actor_train), ("reference", config.reference)):
        supported = role.strategy.layouts
        if config.layout == "auto" and not {"shared", "packed"} <= set(supported):
            return "padded", f"using layout padded: {role.strategy_name} does not support packed rows"
        if config.layout not in ("auto", *supported):
            raise UserError(
                f"{section}: {role.strategy_name} does not support layout {config.layout}; use layout=auto or "
                f"layout={' or layout='.join(supported)}"
            )
    return config.layout, None


def _model_configs(config: DPOConfig) -> list[PreTrainedConfig]:
    """The models that must support the layout: the policy, and the reference if it is another model."""
    trusted = {config.policy_path: config.actor_train.model_args.trust_remote_code}
    trusted.setdefault(config.reference_path, config.trusts_reference_code)
    return [load_model_config(path, trust_remote_code=trust) for path, trust in trusted.items() if path is not None]


def build_plan(config: DPOConfig, num_pairs: int) -> Plan:
    return make_plan(
        num_pairs,
        seed=config.seed,
        pairs_per_step=config.pairs_per_step,
        max_steps=config.max_steps,
        num_epochs=config.num_train_epochs,
    )


def build_micro_batching(config: DPOConfig, inputs: RunInputs, hidden_size: int) -> MicroBatching:
    """Split steps by a token budget if the layout packs rows, by pairs if it pads them."""
    layout, lengths, max_tokens = inputs.layout, inputs.train.lengths, inputs.max_tokens
    costs = CostModel(attention_per_key=1 / (6 * hidden_size), shares_prompt=layout.shares_prompt)
    if not layout.needs_pair_attention:
        max_pairs = config.actor_train.training_args.per_device_train_batch_size
        return MicroBatching(lengths, costs, max_tokens, max_pairs)
    return MicroBatching(lengths, costs, max_tokens or DEFAULT_TOKENS_PER_MICRO_BATCH)


def build_eval_batching(config: DPOConfig, inputs: RunInputs) -> ScoringBatching:
    """Batch validation pairs by the token budget of training, and by a number of pairs if that is set."""
    training = config.actor_train.training_args
    is_packed = inputs.layout.needs_pair_attention
    return scoring_batching(inputs, training.per_device_eval_batch_size if is_packed else training.pairs_per_eval_batch)


def scoring_batching(inputs: RunInputs, max_pairs: int | None) -> ScoringBatching:
    """Batch pairs that are only scored: about as many tokens as a training micro-batch, in at most max_pairs pairs."""
    layout, budget = inputs.layout, inputs.max_tokens or DEFAULT_TOKENS_PER_MICRO_BATCH
    costs = CostModel(attention_per_key=0, shares_prompt=layout.shares_prompt)
    return ScoringBatching(budget, max_pairs, costs if layout.needs_pair_attention else None)
