"""What a run is made of before weights are read: objective, layout, pairs, plan. The same on every rank."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from thresher.builders.data import StoreBuilder, build_curriculum, open_stores, shares_of
from thresher.builders.engines import quantization_of, trained_parts
from thresher.builders.objective import build_objective, for_data, trains_rewards, warn_about_labels
from thresher.builders.reference_mode import ReferenceMode, frozen_weights_digest, reference_mode, same_initial_weights
from thresher.config import DPOConfig
from thresher.config.dpo import EVAL_METRICS
from thresher.data.batching.batches import CostModel, MicroBatching, ScoringBatching
from thresher.data.batching.mismatched import Examples, MismatchedAnswers, VisitPlan
from thresher.data.batching.plan import Plan, make_plan
from thresher.data.example import Scored
from thresher.data.prepare.prepare import prepare
from thresher.data.store.joined import Stores
from thresher.engines.accumulate import empty_metrics
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.models.layouts import VARLEN, Layout, LayoutName, choose_layout, transformers_attention, with_ends
from thresher.models.loading.load import DTYPES, load_model_config, load_tokenizer, set_pad_token
from thresher.models.loading.load_sharded import build_without_weights
from thresher.models.loading.location import named_model
from thresher.models.loading.quantization import quantized_modules
from thresher.models.probe import what_packed_rows_lack

logger = logging.getLogger(__name__)

# large enough for matrix products to run at full speed, small enough for activations to stay small
DEFAULT_TOKENS_PER_MICRO_BATCH = 4096
# what all ranks must agree on; the rest is built from the config
_SENT = ("objective", "mode", "frozen_weights", "layout", "train", "validation", "plan", "max_tokens")


class RunInputs:
    """The parts of a run, each built on first use; the checks, the plan and the run share one object.

    A part that cannot be built raises a UserError. A rank gets a pickled copy, which is small, because a store is sent
    as its path. The copy has no config, which may contain secrets: the rank adds the one that it was given.
    """

    def __init__(self, config: DPOConfig, build_store: StoreBuilder = prepare):
        self.config = config
        self._build_store = build_store  # tokenizes pairs that are not prepared yet
        # token budget of a micro-batch, chosen for all ranks; None for the layout's default
        self.max_tokens = config.actor_train.training_args.max_tokens_per_micro_batch

    def replace(self, **parts: Any) -> RunInputs:
        """Return a copy with some parts replaced, which keeps those that are built."""
        changed = RunInputs.__new__(RunInputs)
        vars(changed).update(vars(self) | parts)
        return changed

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SENT}

    def open(self) -> None:
        """Open the pairs, preparing those that are not prepared yet, and say why rows cannot be packed."""
        if (note := self._found_layout[2]) is not None:
            logger.info("%s", note)
        _ = self.plan

    @property
    def policy_path(self) -> str:
        return str(self.config.policy_path)  # the checks of files have rejected a config without a model

    @property
    def loads_reference(self) -> bool:
        """Whether the reference has a model besides the policy; an invalid loss may need one."""
        try:
            return self.mode in ("precompute", "concurrent")
        except UserError:
            return True

    @property
    def reference_path(self) -> str | None:
        """The model of the reference, if it is loaded and not the policy's."""
        return self.config.reference_path if self.loads_reference and not same_initial_weights(self.config) else None

    @cached_property
    def objective(self) -> Objective:
        return build_objective(self.config)

    @cached_property
    def mode(self) -> ReferenceMode:
        return reference_mode(self.config, self.objective)

    @cached_property
    def frozen_weights(self) -> str | None:
        """The digest of the weights that are not trained; None if all are."""
        return frozen_weights_digest(self.config, self.mode)

    @cached_property
    def model_configs(self) -> dict[str, PreTrainedConfig]:
        """By path: of the policy, and of a separate reference."""
        trusts = self.config.actor_train.model_args.trust_remote_code
        configs = {self.policy_path: load_model_config(self.policy_path, trust_remote_code=trusts)}
        if (path := self.reference_path) is not None:
            configs[path] = load_model_config(path, trust_remote_code=self.config.trusts_reference_code)
        return configs

    @cached_property
    def _found_layout(self) -> tuple[PreTrainedTokenizerBase, Layout, str | None]:
        return find_layout(self.config)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._found_layout[0]

    @cached_property
    def layout(self) -> Layout:
        return self._found_layout[1]

    @cached_property
    def _stores(self) -> tuple[Stores, Stores | None]:
        stores = open_stores(self.config, self.tokenizer, self._build_store)
        self.objective = for_data(self.objective, *stores)
        warn_about_labels(self.objective, stores[0])
        if stores[1] is not None:
            self._check_best_metric(stores[1])
        if names := [name for name in stores[0].parts if name]:
            self.objective = replace(self.objective, groups=tuple(f"train/{name}" for name in names))
        return stores

    def _check_best_metric(self, validation: Stores) -> None:
        # of labelled responses, the margin is the difference of two means
        measured = {*empty_metrics(self.objective), "rewards/margins"}
        sets = [f"eval/{name}/" for name in validation.parts if name]
        subsets = [f"{name}/{each}" for name, part in validation.parts.items() if name for each in part.subsets]
        of_subsets = empty_metrics(replace(self.objective, groups=tuple(subsets))).keys() - measured
        found = {f"{prefix}{name}" for prefix in ("eval/", *sets) for name in measured}
        metric = self.config.metric_for_best_model
        if metric not in found | {f"eval/{name}" for name in of_subsets}:
            names = " + ".join(loss.name for loss, _ in self.objective.terms)
            of_sets = (
                f", of all pairs or of a part of them ({', '.join([*sets, *(f'eval/{each}/' for each in subsets)])})"
                if sets
                else ""
            )
            raise UserError(
                f"metric_for_best_model is {metric}, which is not measured with {names}; use "
                f"{', '.join(each for each in EVAL_METRICS if each.removeprefix('eval/') in measured)}{of_sets}"
            )

    @cached_property
    def train(self) -> Stores:
        return self._stores[0]

    @cached_property
    def validation(self) -> Stores | None:
        return self._stores[1]

    @cached_property
    def train_examples(self) -> Examples:
        """The training set as the losses read it."""
        if not self.objective.reads_mismatched:
            return self.train
        return MismatchedAnswers(self.train, cast("VisitPlan", self.plan))

    @cached_property
    def validation_examples(self) -> Examples | None:
        if self.validation is None or not self.objective.reads_mismatched:
            return self.validation
        return MismatchedAnswers.of_sets(self.validation)

    @cached_property
    def plan(self) -> Plan:
        config = self.config
        shares, order = shares_of(config, self.train), config.actor_train.data_args.order
        plan = make_plan(
            sum(share.count for share in shares) or len(self.train),
            seed=config.seed,
            pairs_per_step=config.pairs_per_step,
            max_steps=config.max_steps,
            num_epochs=config.num_train_epochs,
            shares=shares,
            order="sequential" if order == "sequential" else "proportional",
            curriculum=build_curriculum(order, self.train),
        )
        return VisitPlan(**vars(plan)) if self.objective.reads_mismatched else plan

    @cached_property
    def policy(self) -> nn.Module:
        """The policy on the meta device, with its adapters."""
        args = self.config.actor_train.model_args
        model = build_without_weights(
            self.policy_path,
            dtype=DTYPES[args.master_dtype],
            attn_implementation=transformers_attention(args.attn_implementation),
            trust_remote_code=args.trust_remote_code,
            is_reward_model=trains_rewards(self.config),
            quantization=quantization_of(args),
        )
        # as engines/native stores it
        return trained_parts(args).apply(model, frozen_dtype=DTYPES[args.dtype])

    @cached_property
    def num_parameters(self) -> tuple[int, int]:
        """The policy's parameters, adapters included, and how many of them are trained."""
        packed = {module.weight: module.num_elements for module in quantized_modules(self.policy).values()}
        sizes = [(packed.get(each, each.numel()), each.requires_grad) for each in self.policy.parameters()]
        return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


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
    # the models that must support the layout: the policy, and the reference if it is a different model
    trusted = {config.policy_path: args.trust_remote_code}
    trusted.setdefault(config.reference_path, config.trusts_reference_code)
    models = [load_model_config(path, trust_remote_code=trust) for path, trust in trusted.items() if path is not None]
    layout, note = choose_layout(
        requested, models, attention, pad_id, scored=scored_of(config), probe=what_packed_rows_lack
    )
    # the reference computes the rows of the policy, so that both round alike
    return tokenizer, with_ends(layout) if args.moe_aux_loss_coef else layout, note or reason


def scored_of(config: DPOConfig) -> Scored:
    """What the policy scores: the response, the prompt too, or the sequence as a whole."""
    if trains_rewards(config):
        return "end"
    return "response" if config.apply_loss_mask else "all"


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


def build_micro_batching(inputs: RunInputs, hidden_size: int) -> MicroBatching:
    """Split steps by a token budget if the layout packs rows, by pairs if it pads them."""
    layout, lengths, max_tokens = inputs.layout, inputs.train_examples.lengths, inputs.max_tokens
    costs = CostModel(attention_per_key=1 / (6 * hidden_size), shares_prompt=layout.shares_prompt)
    if not layout.needs_pair_attention:
        max_pairs = inputs.config.actor_train.training_args.per_device_train_batch_size
        return MicroBatching(lengths, costs, max_tokens, max_pairs)
    return MicroBatching(lengths, costs, max_tokens or DEFAULT_TOKENS_PER_MICRO_BATCH)


def build_eval_batching(inputs: RunInputs) -> ScoringBatching:
    """Batch validation pairs by the token budget of training, and by a number of pairs if that is set."""
    training = inputs.config.actor_train.training_args
    is_packed = inputs.layout.needs_pair_attention
    return scoring_batching(inputs, training.per_device_eval_batch_size if is_packed else training.pairs_per_eval_batch)


def scoring_batching(inputs: RunInputs, max_pairs: int | None) -> ScoringBatching:
    """Batch pairs that are only scored: about as many tokens as a training micro-batch, in at most max_pairs pairs."""
    layout, budget = inputs.layout, inputs.max_tokens or DEFAULT_TOKENS_PER_MICRO_BATCH
    costs = CostModel(attention_per_key=0, shares_prompt=layout.shares_prompt)
    return ScoringBatching(budget, max_pairs, costs if layout.needs_pair_attention else None)
