"""Which of our source files decide what a module computes: the module itself, and all that it imports of ours.

Read off the syntax, without importing anything. What the stages of dvc.yaml depend on and what the fingerprint of a
training hashes both come from here.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

from seqrec import ROOT

PACKAGES = ("models", "seqrec")
UNDECIDING = (  # modules and packages that decide no result: editing them repeats nothing
    "seqrec",  # the file __init__.py: version and root
    "seqrec.__main__",
    "seqrec.artifacts",  # names and schemas of files; a new name is a change of its users, too
    "seqrec.code_closure",
    "seqrec.config",  # the values themselves are compared, defaults included
    "seqrec.data.download",  # what was fetched is compared
    "seqrec.tracking",  # what MLflow is told
)
DECIDING = {  # but these do for the module whose work they are
    "seqrec.stages.ingest": "seqrec.data.download",
    "seqrec.stages.register": "seqrec.tracking",
}


def deciding(module: str, root: Path = ROOT) -> tuple[Path, ...]:
    """Return the files that decide what `module` computes: its closure without what decides no result."""
    return closure(module, exempt=[name for name in UNDECIDING if name != DECIDING.get(module)], root=root)


def closure(module: str, *, exempt: Collection[str] = (), lazy: bool = True, root: Path = ROOT) -> tuple[Path, ...]:
    """Return the files, relative to `root` and sorted, of `module` and of what it imports, directly or not.

    Args:
        module: dotted name.
        exempt: modules and packages to leave out, with all that only they import; never `module` itself.
        lazy: whether imports inside functions count. Those for type checking alone never do.
        root: folder of the packages.

    Raises:
        ValueError: there is no such module.
    """
    if _file(module, root) is None:
        raise ValueError(f"{module} is no module below {root}")
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file(name, root)
        if path is None or name in found or (name != module and _is_exempt(name, exempt)):
            continue
        found[name] = path
        waiting += _imports(_text(path), lazy)
        waiting += [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]  # packages run as well
    return tuple(sorted(path.relative_to(root) for path in found.values() if not _is_empty(_text(path))))


def _is_exempt(name: str, exempt: Collection[str]) -> bool:
    if name in PACKAGES:  # naming a top-level package means its file alone
        return name in exempt
    return any(name == one or name.startswith(f"{one}.") for one in exempt if one not in PACKAGES)


def _file(module: str, root: Path) -> Path | None:
    place = root / module.replace(".", "/")
    if module.partition(".")[0] not in PACKAGES:
        return None
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def _imports(text: str, lazy: bool) -> tuple[str, ...]:
    """Return the dotted names that a file imports; of `from a import b`, both a and a.b."""
    names: list[str] = []
    for node in _statements(ast.parse(text), lazy):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return tuple(names)


def _statements(block: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    """Yield the statements in `block`; those for type checking alone are left out."""
    for node in ast.iter_child_nodes(block):
        checked = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if checked or (isinstance(node, ast.FunctionDef) and not lazy):
            continue
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node
            yield from _statements(node, lazy)


@functools.cache
def _is_empty(text: str) -> bool:
    """Say whether there is nothing in a file but its docstring."""
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in ast.parse(text).body)


def git_commit() -> str:
    """Return the commit of the working directory; nothing outside a git repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
