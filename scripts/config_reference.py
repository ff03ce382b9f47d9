"""Write ``docs/config.md``, every key with its default and its meaning: ``python scripts/config_reference.py``.

All of it is read from `trainer.config`, its comments included, from `trainer.validation` and from ``configs``.
"""

from __future__ import annotations

import ast
import inspect
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

from trainer import config
from trainer.config import Config
from trainer.keys import KEYS, Key, as_text
from trainer.schema import CONFIG_FOLDER
from trainer.validation import allowed

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"
_HEAD = """# Configuration

Every key of `scripts/train.py`, as `key=value` on the command line. Presets set several at once; a key that is given
wins over every preset. A default below holds where no preset sets the key; without `env=` that of Ant does.
`python scripts/train.py env=Ant --cfg job` prints what a command would run with. This page is written by
`python scripts/config_reference.py`.
"""
_TUNED = """The settings under `configs/env` are tuned for PPO. `configs/algo_env/impala_<env>.yaml` adds what
IMPALA needs there: PPO's own recipe from actors that are one update behind (`impala_as_ppo`), or settings that were
tuned for it (`Ant`, `CartPole`, `TMaze`, frames). An env without such a file has the defaults above, near the paper's.
"""
#: The configuration's sections, in their order.
_SECTIONS = {name: type(value) for name, value in vars(Config()).items() if is_dataclass(value)}


def meanings() -> dict[str, str]:
    """What the comment that begins with ``#:`` says of each key, on the line of its field or on those before it."""
    source = inspect.getsource(config)
    tokens = tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__)
    said = [token for token in tokens if token.string.startswith("#:")]
    # a comment on a line of its own is about the next one
    comments = {token.start[0] + token.line.strip().startswith("#:"): token.string[2:].strip() for token in said}
    prefixes = {kind.__name__: f"{name}." for name, kind in _SECTIONS.items()} | {Config.__name__: ""}
    return {
        prefixes[node.name] + field.target.id: comments.get(field.lineno, "")
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in prefixes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id not in _SECTIONS
    }


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield ""
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"
    yield ""


def _rows(keys: Iterable[Key], said: dict[str, str]) -> Iterator[tuple[str, ...]]:
    for key in keys:
        yield f"`{key.name}`", f"`{as_text(key.default)}`", allowed(key.name), said[key.name].replace(" | ", ", ")


def page() -> str:
    """The page's text."""
    said, head = meanings(), ("key", "default", "may be", "meaning")
    lines = [_HEAD, "## The run", *_table(head, _rows((key for key in KEYS.values() if not key.section), said))]
    for name, kind in _SECTIONS.items():
        own = (key for key in KEYS.values() if key.section == name)
        lines += [f"## {name}", "", (inspect.getdoc(kind) or "").replace("``", "`"), *_table(head, _rows(own, said))]
    groups = [folder for folder in sorted(CONFIG_FOLDER.iterdir()) if folder.is_dir() and folder.name != "algo_env"]
    presets = ((f"`{g.name}=`", ", ".join(f"`{p.stem}`" for p in sorted(g.glob("*.yaml")))) for g in groups)
    lines += ["## Presets", *_table(("group", "presets, the files under `configs/<group>`"), presets), _TUNED]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
