"""What a setting means: the comment on its line in the dataclass, for help texts and for the reference."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
import typing


def meanings(cls: type) -> dict[str, str]:
    """Return the comment on the lines of each field of a dataclass and of its parents."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(owner))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        by_line = {token.start[0]: token.string[1:].strip() for token in tokens if token.type == tokenize.COMMENT}
        alone = {n for n, line in enumerate(source.splitlines(), start=1) if line.lstrip().startswith("#")}
        body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
        for node in body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                above = by_line.get(node.lineno - 1, "") if node.lineno - 1 in alone else ""
                texts = [above, *(by_line.get(line, "") for line in lines)]
                found[node.target.id] = "; ".join(text for text in texts if text)
    return found
