"""What a scorer may return, and how a failure is told. Imports nothing heavy: the worker processes use it too."""

import traceback
from pathlib import Path
from typing import Any


def where(error: BaseException, path: str | None = None) -> str:
    """`file:line: Kind: message` of an error; the line is the deepest one in the user's file, if there is one."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    if path is not None:
        mine = [frame for frame in frames if Path(frame.filename).resolve() == Path(path).resolve()]
        frames = mine or frames
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def plain_result(result: Any) -> float | dict[str, Any]:
    """A score as JSON can carry it: a float, or a dict with a "score" and whatever else is simple.

    NaN and infinity pass: the trainer refuses to learn from them, and says which rows they were.

    Raises:
        TypeError, ValueError: it is no score.
    """
    if isinstance(result, dict):
        if "score" not in result:
            raise ValueError(f"the dict has no 'score', only {sorted(map(str, result))}")
        extras = {}
        for key, value in result.items():
            value = value.item() if hasattr(value, "item") else value
            if isinstance(value, str | int | float | bool):
                extras[str(key)] = value
        return extras | {"score": plain_score(result["score"])}
    return plain_score(result)


def plain_score(result: Any) -> float:
    if result is None or isinstance(result, str | bytes):
        raise TypeError(f"the score is {result!r}, not a number")
    return float(result)
