"""Packages that thresher imports only if they are installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from thresher.errors import UserError


def require(user: str, *modules: str, extra: str = "", command: str = "", otherwise: str = "") -> None:
    """Raise if a module that `user` needs cannot be found; nothing is imported.

    Args:
        extra: The extra of thresher that installs the modules.
        command: What installs them, if it is not pip with the extra or with their names.
        otherwise: What to do instead.
    """
    if absent := [module for module in modules if not _is_importable(module)]:
        packages = f"'thresher[{extra}]'" if extra else " ".join(absent)
        command = command or f"pip install {packages}"
        either = f", or {otherwise}" if otherwise else ""
        raise UserError(f"{user} needs {', '.join(absent)}, which is not installed; run `{command}`{either}")


def load(user: str, module: str, *, extra: str, otherwise: str = "") -> ModuleType:
    """Import a module of an extra; raise if it is absent or broken."""
    require(user, module.partition(".")[0], extra=extra, otherwise=otherwise)
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"{user} needs {module}, which is installed but cannot be imported ({error}); run `pip install "
            f"--force-reinstall 'thresher[{extra}]'`" + (f", or {otherwise}" if otherwise else "")
        ) from error


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
