"""Were jobs run alike: with the same settings, as far as they look at them, on the same data?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from splitgrow.paper.bench import LATER, ONLY

SHOWN = 4  # differences that an error names


def key_of_fields(settings: Mapping[str, Any]) -> str:
    """Names the folder of what is computed with settings: an older version may have had fewer."""
    return sha256(json.dumps(told(settings), sort_keys=True).encode()).hexdigest()[:8]


def told(settings: Mapping[str, Any], *methods: str) -> dict[str, Any]:
    """What tells settings apart, whatever fields were known when they were written.

    Those that only other methods than ``methods`` look at do not.
    """
    kept = {k: v for k, v in settings.items() if k not in LATER or v != LATER[k]}
    return {k: v for k, v in kept.items() if all(m in ONLY.get(k, methods) for m in methods)}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two jobs differ in, by the name of the field; nothing where they compare.

    ``data``, a digest of the data set, counts where both have it: it came later.
    """
    methods = one["job"]["method"], other["job"]["method"]
    mine, theirs = (told(job["settings"], *methods) for job in (one, other))
    pairs = {
        name: (mine.get(name, LATER.get(name)), theirs.get(name, LATER.get(name)))
        for name in mine | theirs
        if mine.get(name, ...) != theirs.get(name, ...)
    }
    data = one.get("data"), other.get("data")
    return pairs if None in data or data[0] == data[1] else {**pairs, "data set": data}


def words_of(found: Mapping[str, tuple[Any, Any]], one: str, other: str) -> str:
    """The first few differences: ``epochs: 2 there, 4 now``."""
    shown = [f"{name}: {a} {one}, {b} {other}" for name, (a, b) in list(found.items())[:SHOWN]]
    if len(found) > SHOWN:
        shown.append(f"and {len(found) - SHOWN} more")
    return "; ".join(shown)
