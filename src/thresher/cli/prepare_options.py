"""The options of `thresher prepare` and the config keys that mean the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import typer


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# {role} is actor_train or validation
CONFIG_KEYS = {
    "template": "{role}.data_args.template",
    "sequence_length": "sequence_length",
    "truncation": "{role}.data_args.truncation",
    "on_bad_row": "{role}.data_args.on_bad_row",
    "special_tokens_in_text": "{role}.data_args.special_tokens_in_text",
    "chosen_key": "chosen_key",
    "rejected_key": "rejected_key",
    "prompt_key": "prompt_key",
    "runtime": "runtime",
    "ray_address": "ray_address",
}
_TRUST = "actor_train.model_args.trust_remote_code=true"
# as errors of preparation write the settings
_IN_ERRORS = {
    **{key.format(role="actor_train"): _option(name) for name, key in CONFIG_KEYS.items() if name != "runtime"},
    "num_processes": "--num-processes",
    "actor_train.data_args.file_name": "the files",
    _TRUST: f"{_TRUST} in a config file and pass it with --config",
}


def reject_config_options(context: typer.Context, *, validation: bool) -> None:
    """Reject options that the config would silently override, and name the key to set instead."""
    from thresher.errors import UserError

    for name in CONFIG_KEYS:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            setting = spell_setting(name, in_config=True, validation=validation)
            raise UserError(
                f"{_option(name)} has no effect with --config; leave it out and pass {setting}{context.params[name]} "
                "instead"
            )


def spell_setting(name: str, *, in_config: bool, validation: bool) -> str:
    """Return how to set an option, up to its value: `--name ` or `key=`."""
    role = "validation" if validation else "actor_train"
    return f"{CONFIG_KEYS[name].format(role=role)}=" if in_config else f"{_option(name)} "


@contextmanager
def name_options_in_errors() -> Iterator[None]:
    """Replace config keys by options in the message of a `UserError`; `key=value` becomes `--key value`."""
    from thresher.errors import UserError

    keys = "|".join(re.escape(key) for key in _IN_ERRORS)
    try:
        yield
    except UserError as error:
        named = re.sub(
            rf"(?<![\w.-])({keys})\b(=?)",
            lambda found: _IN_ERRORS[found[1]] + (" " if found[2] else ""),
            str(error),
        )
        raise UserError(named) from error
