"""No call in the package can unpickle or execute text, checked on the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import thresher

PACKAGE = Path(thresher.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pd.read_pickle"}
UNSAFE_YAML = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def unsafe_calls(tree: ast.AST) -> Iterator[str]:
    """Describe the imports and calls that can execute code from a file, each as `line: what`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            from_module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            modules = {from_module, *(alias.name for alias in node.names)}
            yield from (
                f"{node.lineno}: imports {name}" for name in modules if name.partition(".")[0] in FORBIDDEN_MODULES
            )
        if not isinstance(node, ast.Call):
            continue
        called = name_of(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if called in FORBIDDEN_CALLS | UNSAFE_YAML or called.endswith(".read_pickle"):
            yield f"{node.lineno}: calls {called}"
        weights_only = given.get("weights_only")
        if called == "torch.load" and not (isinstance(weights_only, ast.Constant) and weights_only.value is True):
            yield f"{node.lineno}: calls torch.load without weights_only=True"
        pickles = given.get("allow_pickle")
        if pickles is not None and not (isinstance(pickles, ast.Constant) and pickles.value is False):
            yield f"{node.lineno}: calls {called} with allow_pickle"
        shell = given.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            yield f"{node.lineno}: calls {called} with a shell"
        trust = given.get("trust_remote_code")
        if isinstance(trust, ast.Constant) and trust.value is True:
            yield f"{node.lineno}: calls {called} with trust_remote_code=True"


def test_no_file_of_the_package_can_execute_its_input() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    assert PACKAGE / "models" / "loading" / "load.py" in trees
    found = [f"{path.relative_to(PACKAGE)}:{each}" for path, tree in trees.items() for each in unsafe_calls(tree)]
    # arguments of calls between ranks, whose digest rank 0 has signed; test_launch_store.py
    assert [each.partition(":")[0] for each in found] == ["runtime/launch_session.py"]
    assert found[0].endswith(": imports pickle")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import cloudpickle as cp",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "pandas.read_pickle(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_unsafe_code_is_found(source: str) -> None:
    assert [found[:3] for found in unsafe_calls(ast.parse(f"\n{source}"))] == ["2: "]


def test_safe_code_is_not_reported() -> None:
    safe = "torch.load(path, weights_only=True); yaml.safe_load(text); np.load(path, allow_pickle=False); model.eval()"
    assert list(unsafe_calls(ast.parse(safe))) == []
