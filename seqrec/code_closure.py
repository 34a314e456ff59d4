"""Finds the source files of this project that decide what a module computes: the module and its own imports.

The imports are read from the syntax, without importing anything. The dependencies of the stages in dvc.yaml and the
fingerprints of trainings are both based on these files.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from seqrec.artifacts import ROOT

MODELS = "seqrec.models"
AVERAGE = Path("seqrec/models/ensemble.py")  # which can be any model: `options.members`
UNDECIDING = (  # modules and packages that cannot change results; editing them repeats no stage
    "seqrec.__init__",  # version and root
    "seqrec.__main__",
    "seqrec.code_closure",
    "seqrec.config",  # the settings are compared, including defaults
    "seqrec.data.download",  # the downloaded data is compared
    "seqrec.models.__init__",  # names of architectures; module and class of the one in use are compared
    "seqrec.tracking",  # logging to MLflow
)
DECIDING = {  # module -> modules of UNDECIDING that decide its results
    "seqrec.stages.ingest": "seqrec.data.download",
    "seqrec.stages.register": "seqrec.tracking",
}


def deciding(module: str, *models: str, root: Path = ROOT) -> tuple[Path, ...]:
    """Return the files that decide what `module` computes: its closure without modules that cannot change results.

    Args:
        module: dotted name.
        models: the modules of the models that it computes with. The files of other models are left out, although the
            functions of a stage import some of them.
        root: folder of the packages.
    """
    exempt = [name for name in UNDECIDING if name != DECIDING.get(module)]
    found = closure(module, exempt=exempt, root=root)
    folder, shared = Path(*MODELS.split(".")), closure(MODELS, root=root)  # what the package itself imports
    files = {path for path in found if path.parent != folder or path in (*shared, AVERAGE)}
    for model in models:
        files.update(closure(model, exempt=exempt, root=root))
    return tuple(sorted(files))


def closure(module: str, *, exempt: Collection[str] = (), lazy: bool = True, root: Path = ROOT) -> tuple[Path, ...]:
    """Return the files, relative to `root` and sorted, of `module` and of its direct and indirect imports.

    The module itself may lie outside `root` if it has been imported, as a user's own model has. Then the modules in its
    folder count, too.

    Args:
        module: dotted name.
        exempt: modules and packages to leave out, with all that only they import; `NAME.__init__` is the file
            __init__.py of a package alone. A module that is named as `module` is never left out.
        lazy: whether imports inside functions count; imports for type checking only never count.
        root: folder of the packages.

    Raises:
        ValueError: there is no such module.
    """
    start = _file(module, root) or _imported_file(module)
    if start is None:
        raise ValueError(f"{module} is not a module below {root}, and was not imported from a file")
    own = None if _file(module, root) else start.parent
    files: list[Path] = []
    waiting, known = [module], set[str]()
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        known.add(name)
        path = start if name == module else _file(name, root) or _beside(name, own)
        if path is None or _is_exempt(name, exempt, module):
            continue
        text = path.read_text(encoding="utf-8")
        if not _is_empty(text):
            files.append(path)
        waiting += _imports(text, lazy)
        waiting += [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]  # packages run as well
    return tuple(sorted(path.relative_to(root) if path.is_relative_to(root) else path for path in files))


def _is_exempt(name: str, exempt: Collection[str], start: str) -> bool:
    if f"{name}.__init__" in exempt:
        return True
    return name != start and any(name == prefix or name.startswith(f"{prefix}.") for prefix in exempt)


def _imported_file(module: str) -> Path | None:
    """Return the file of a module that this process has imported, if it has one."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file and file.endswith(".py") else None


def _file(module: str, root: Path) -> Path | None:
    if module.partition(".")[0] != "seqrec":
        return None
    base = root / module.replace(".", "/")
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def _beside(module: str, folder: Path | None) -> Path | None:
    """Return the file of a module that a user's own file in `folder` imports, if it lies there and is no package's."""
    if folder is None:
        return None
    base = folder / module.replace(".", "/")
    files = (_imported_file(module), base.with_suffix(".py"), base / "__init__.py")
    mine = (file for file in files if file and file.is_file() and file.is_relative_to(folder))
    return next((file for file in mine if "site-packages" not in file.parts), None)


@functools.cache
def _imports(text: str, lazy: bool) -> tuple[str, ...]:
    """Return the dotted names that a file imports; of `from a import b`, both a and a.b."""
    names: list[str] = []
    for node in _statements(ast.parse(text), lazy):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = [node.module] if node.module else []  # `from . import a` names none
            names += (*package, *(".".join([*package, alias.name]) for alias in node.names))
    return tuple(names)


def _statements(block: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    """Yield the statements in `block`, except those for type checking only."""
    for node in ast.iter_child_nodes(block):
        checked = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if checked or (isinstance(node, ast.FunctionDef) and not lazy):
            continue
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node
            yield from _statements(node, lazy)


@functools.cache
def _is_empty(text: str) -> bool:
    """Return whether a file holds only a docstring."""
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in ast.parse(text).body)


def git_commit() -> str:
    """Return the commit of the working directory; nothing outside a git repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
