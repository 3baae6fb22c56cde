"""What a check finds, and the checks of settings and paths that import neither torch nor transformers.

Problems stop a run; all of them are raised as one error.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ParamSpec

from thresher.builders.data_parts import DataPart, data_parts
from thresher.config import DPOConfig
from thresher.data.settings import DataSettings
from thresher.data.sources.resolve import at_revision, find_in_directory, resolve_sources
from thresher.errors import UserError, unusable_path
from thresher.models.loading.location import find_model, find_tokenizer, named_model
from thresher.optional import require

_LARGEST_USUAL_RATE = 0.01  # of tiny models in tests and examples


Messages = Iterator[UserError | UserWarning]  # problems and warnings, each a line for the user
P = ParamSpec("P")


def problems_of(call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Messages:
    """Call a function that raises a UserError for a problem."""
    try:
        call(*args, **kwargs)
    except UserError as error:
        yield error


def report(checks: Iterable[Callable[[], Messages]]) -> list[str]:
    """Run all checks; raise their problems, each once, as one error, or return their warnings."""
    found: list[UserError | UserWarning] = []
    for check in checks:
        # a check may also raise: several need the same model, and a model that cannot be loaded is one problem
        try:
            found.extend(check())
        except UserError as error:
            found.append(error)
    problems = list(dict.fromkeys(str(each) for each in found if isinstance(each, UserError)))
    if problems:
        lines = (f"  - {each.replace(chr(10), chr(10) + '    ')}" for each in problems)
        raise UserError(problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n" + "\n".join(lines))
    return list(dict.fromkeys(map(str, found)))


def check_tracker_names(config: DPOConfig) -> Messages:
    from thresher.observability.trackers.libraries import check_name  # of the driver: workers check their machine alone

    for name in config.track_with:
        yield from problems_of(check_name, name)


def check_ray(config: DPOConfig) -> Messages:
    if config.uses_ray:
        given = config.non_default("runtime", "ray_address")
        user = f"{given[0]}: {getattr(config, given[0])}" if given else "a run with several workers"
        yield from problems_of(require, user, "ray", extra="ray", otherwise="" if given else "start it with torchrun")


def check_unused_settings(config: DPOConfig) -> Messages:
    """Validation has found them in a file, but not in a config made in Python."""
    for text in config.unused_settings:
        yield UserError(text)
    if config.num_gpus_per_node is None:
        return
    # it describes the machine, so it may stay when a config of a cluster runs on CPUs or in one process
    if not (config.actor_train.device_mapping or config.reference.device_mapping):
        yield UserWarning("num_gpus_per_node has no effect without a device_mapping")
    elif not config.uses_ray and config.runtime != "torchrun":
        yield UserWarning("num_gpus_per_node has no effect in one process")


def check_evaluation_steps(config: DPOConfig) -> Messages:
    """Warn about checkpoints that are never evaluated, and so never the best one."""
    save, evaluate = config.save_steps, config.eval_steps
    strategies = (config.save_strategy, config.eval_strategy)
    if config.validation is None or config.save_strategy == "no":
        return
    if "epoch" in strategies:
        if strategies[0] != strategies[1]:
            yield UserWarning(
                f"save_strategy is {strategies[0]} and eval_strategy is {strategies[1]}: only checkpoints of steps "
                "with an evaluation can be the best one; set both to the same"
            )
        return
    if save == 0 or (config.max_steps or math.inf) <= save:
        return
    evaluate = 0 if config.eval_strategy == "no" else evaluate
    if evaluate and save % evaluate:
        both = math.lcm(save, evaluate)
        yield UserWarning(
            f"save_steps {save} is not a multiple of eval_steps {evaluate}: only the checkpoints of every {both} steps "
            "and of the last step are evaluated, so only they can be the best one"
        )
    elif not evaluate and "metric_for_best_model" in config.model_fields_set:
        yield UserWarning("eval_steps is 0: only the last checkpoint is evaluated, so no other can be the best one")


def check_learning_rate(config: DPOConfig) -> Messages:
    rate = config.actor_train.training_args.learning_rate
    if rate > _LARGEST_USUAL_RATE:
        yield UserWarning(
            f"actor_train.training_args.learning_rate is {rate:g}, which destroys most pretrained models within steps; "
            "usual are 5e-7 to 5e-6 for all weights, and up to 1e-4 for LoRA"
        )


def check_models(config: DPOConfig) -> Messages:
    for path in dict.fromkeys((config.policy_path, config.reference_path)):
        yield from problems_of(lambda path: find_model(named_model(path)), path)
    if (tokenizer := config.actor_train.model_args.tokenizer_name_or_path) is not None:
        yield from problems_of(find_tokenizer, tokenizer)


def check_data(config: DPOConfig) -> Messages:
    for part in data_sections(config):
        args = part.args
        # imported on use: what most wrong paths need not wait for, such as numpy and pyarrow
        if args.store:
            from thresher.data.store.reader import ExampleStore

            yield from problems_of(ExampleStore.open, args.store)
            continue
        if not args.file_name:
            yield from problems_of(DataSettings, args.file_name, section=part.section, named=part.named)
        for name in args.file_name:
            yield from problems_of(
                resolve_sources, [at_revision(find_in_directory(name, args.dataset_dir), args.revision)]
            )
        if args.template not in ("auto", "raw"):
            from thresher.data.tokenization.chat_template import find_template_file

            yield from problems_of(find_template_file, args.template, f"{part.named or part.section}.template")


def check_prompts_file(config: DPOConfig) -> Messages:
    path = None if config.samples is None else config.samples.prompts_file
    if path is not None and not Path(path).is_file():
        yield UserError(f"samples.prompts_file {path} does not exist; give a file with one prompt per line")


def check_directories(config: DPOConfig) -> Messages:
    for path in (config.output_dir, config.logging_dir, config.reference.cache_dir):
        if path is None:
            continue
        directory = Path(path).expanduser()
        existing = existing_parent(directory)
        if not existing.is_dir():
            yield unusable_path(directory, os.strerror(errno.ENOTDIR))
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield unusable_path(directory, os.strerror(errno.EACCES))


def check_checkpoint_path(config: DPOConfig) -> Messages:
    setting = config.resume_from_checkpoint
    if setting and setting != "auto":
        from thresher.checkpoint.manager import resolve_resume

        # sizes only: digests are verified when the checkpoint is loaded
        yield from problems_of(resolve_resume, setting, Path(), digests=False)


SETTINGS = (check_ray, check_unused_settings, check_tracker_names, check_evaluation_steps, check_learning_rate)
PATHS = (check_models, check_data, check_prompts_file, check_directories, check_checkpoint_path)


def data_sections(config: DPOConfig) -> list[DataPart]:
    """All data of the run: that of training, and of validation if it has its own."""
    return [*data_parts(config).values(), *data_parts(config, validation=True).values()]


def existing_parent(directory: Path) -> Path:
    """Return a directory, or the nearest directory above it that exists."""
    return next(each for each in (directory, *directory.absolute().parents) if os.access(each, os.F_OK))
