"""Where in a response the answer stands: after the thinking, inside tags, in the last box. Linear in the text."""

import re

_ANSWER_OPEN = re.compile(r"<\s*answer\s*>", re.IGNORECASE)
_ANSWER_CLOSE = re.compile(r"<\s*/\s*answer\s*>", re.IGNORECASE)
_THINK_TAG = re.compile(r"<\s*(/?)\s*(?:think|thinking)\s*>", re.IGNORECASE)


def after_thinking(response: str) -> str:
    """What follows the last </think>; "" when a <think> was opened and never closed, so that nothing was answered.

    The opening tag may be missing: many chat templates write it at the end of the prompt.
    """
    if "<" not in response:
        return response
    last = None
    for last in _THINK_TAG.finditer(response):
        pass
    if last is None:
        return response
    return response[last.end() :] if last[1] else ""


def last_tagged_answer(response: str) -> str | None:
    """The content of the last complete <answer>...</answer>, over several lines if need be; None without one."""
    text = after_thinking(response)
    close = None
    for close in _ANSWER_CLOSE.finditer(text):
        pass
    if close is None:
        return None
    opening = None
    for opening in _ANSWER_OPEN.finditer(text, 0, close.start()):
        pass
    return None if opening is None else text[opening.end() : close.start()].strip()
