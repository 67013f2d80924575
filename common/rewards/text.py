"""Where in a response the answer stands: after the thinking, inside tags, in the last box. Linear in the text."""

import re
from collections import deque

_ANSWER_OPEN = re.compile(r"<answer>", re.IGNORECASE)
_ANSWER_CLOSE = re.compile(r"</answer>", re.IGNORECASE)
_THINK_TAG = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


def _last(pattern: re.Pattern[str], text: str, end: int | None = None) -> re.Match[str] | None:
    """The last match in `text[:end]`."""
    matches = deque(pattern.finditer(text, 0, len(text) if end is None else end), maxlen=1)
    return matches[0] if matches else None


def after_thinking(response: str) -> str:
    """What follows the last </think>; "" when a <think> was opened and never closed, so that nothing was answered.

    The opening tag may be missing: many chat templates write it at the end of the prompt.
    """
    tag = _last(_THINK_TAG, response)
    if tag is None:
        return response
    return response[tag.end() :] if tag[1] else ""


def last_tagged_answer(response: str) -> str | None:
    """The content of the last complete <answer>...</answer>, over several lines if need be; None without one."""
    text = after_thinking(response)
    close = _last(_ANSWER_CLOSE, text)
    opening = _last(_ANSWER_OPEN, text, close.start()) if close else None
    return text[opening.end() : close.start()].strip() if opening else None
