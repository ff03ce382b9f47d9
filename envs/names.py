"""Env names: from what a person types (``Ant``, ``pong``) to the exact id that an engine knows (``Ant-v5``)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from envs.base import EnvError

_FEW = 20  #: so many ids may be listed in a message
_VERSION = re.compile(r"-v(\d+)$")


def resolve_among(name: str, known_ids: Iterable[str], engine: str) -> str:
    """Return the id that ``name`` means among ``known_ids``, those of ``engine``.

    An exact id passes; a name without version means its newest version; upper and lower case are told apart only where
    that decides between several names.

    Raises:
        EnvError: no id or several ids match; the message lists the closest ones.
    """
    ids = tuple(known_ids)
    if name in ids:
        return name
    newest = _newest_versions(ids)
    if name in newest:
        return newest[name]
    folded = {match for key, match in (*newest.items(), *zip(ids, ids, strict=True)) if key.lower() == name.lower()}
    if len(folded) == 1:
        return folded.pop()
    if folded:
        raise EnvError(f"env.id={name} is ambiguous: {', '.join(sorted(folded))}")
    raise EnvError(f"env.id={name} is unknown to env.engine={engine}{_suggestion(name, ids)}")


def _newest_versions(ids: Iterable[str]) -> dict[str, str]:
    newest: dict[str, str] = {}
    for known in sorted(ids, key=_version):
        newest[_VERSION.sub("", known)] = known
    return newest


def _version(known: str) -> int:
    match = _VERSION.search(known)
    return int(match.group(1)) if match else -1


def _suggestion(name: str, ids: Iterable[str]) -> str:
    """The ids closest to ``name``, compared without case and, where it has none, without version; or all, if few."""
    stem = (lambda known: known) if _VERSION.search(name) else (lambda known: _VERSION.sub("", known))
    by_stem = {stem(known).lower(): known for known in sorted(ids, key=_version)}
    closest = difflib.get_close_matches(name.lower(), by_stem, n=5, cutoff=0.6)
    if closest:
        return f"; closest: {', '.join(by_stem[key] for key in closest)}"
    return f", which has {', '.join(sorted(by_stem.values()))}" if len(by_stem) <= _FEW else ""
