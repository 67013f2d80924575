r"""Numbers as people and models write them, read into exact fractions.

`read_number` takes the text of one answer ("$1,234.50", "**-5**", "\frac{3}{4}", "72 apples.", "3.5e3") and gives its
value, or nothing when the text does not state exactly one number. It evaluates nothing, never raises, and its cost is
bounded: of a text only the first MAX_LENGTH characters count, and exponents above MAX_EXPONENT are no answers.

What a text states can have two readings: "50%" is 50 (the unit was part of the question) and 1/2; "5 million" is
5 and 5,000,000. Two answers agree when they share a reading. docs/rewards.md has the table of such decisions.
"""

import re
import unicodedata
from fractions import Fraction
from typing import Any

MAX_LENGTH = 300
"""Characters of an answer that are looked at; nobody writes a number longer than this."""
MAX_EXPONENT = 300
"""10**300 is beyond any answer, and still cheap to compute with."""
TOLERANCE = Fraction(1, 10**6)
"""Decimals may be rounded to six places; whole numbers must be equal."""

# -- normal form ------------------------------------------------------------------------------------------------------

_SUPERSCRIPTS = {
    ord(sign): f"^{digit}" for digit, sign in enumerate("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
}
_MINUS_SIGNS = re.compile("[\u2212\u2010\u2011\u2012\ufe63\uff0d]")
_EN_DASH_AS_SIGN = re.compile("(?<![\\w)])\u2013(?=[\\d.$\\\\])")
_DASHES = re.compile("[\u2013\u2014\u2015]")

_ARGUMENT = r"\s*(?:\{([^{}]*)\}|(\d))"
_FRACTION = re.compile(r"\\[dtc]?frac" + _ARGUMENT + _ARGUMENT)
_LATEX_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname|boxed|fbox|mbox)\s*\{([^{}]*)\}"
)
_LATEX_NOTHING = re.compile(r"\\(?:left|right|displaystyle|textstyle|bf|rm|quad|qquad|!|\(|\)|\[|\])|\^\{?\\circ\}?")
_LATEX_SPACE = re.compile(r"\\[,;: ]|~")
_TIMES = re.compile(r"\\times|\\cdot|\u00d7|\u22c5|\u00b7")
_TIMES_BETWEEN_NUMBERS = re.compile(r"(?<=[\d)])\s*[*x]\s*(?=[\d(])")
_UNDERSCORE_IN_NUMBER = re.compile(r"(?<=\d)_(?=\d{3})")
_MARKUP = re.compile(r"[*`_\"'\u2018-\u201f\u00ab\u00bb$\u20a0-\u20cf\u00a3\u00a5\u00a2]")


def normalise(text: str) -> str:
    """`text` without markup, LaTeX dress and currency signs, its digits, signs and spaces in ASCII."""
    if not text.isascii():
        text = _to_ascii_digits(text)
    text = text.replace("{,}", ",")
    if "\\" in text:
        text = text.replace("\\\\", "\\").replace("\\$", "").replace("\\%", "%")
        for _ in range(3):  # wrappers may be nested: \boxed{\text{5}}
            text = _LATEX_WRAPPER.sub(r" \1 ", text)
        text = _LATEX_SPACE.sub(" ", _LATEX_NOTHING.sub("", text))
        text = _FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", text)
    text = _TIMES_BETWEEN_NUMBERS.sub("\u00d7", _TIMES.sub("\u00d7", text))
    text = _MARKUP.sub("", _UNDERSCORE_IN_NUMBER.sub("", text))
    return " ".join(text.split())


def _to_ascii_digits(text: str) -> str:
    """Digits of every script, full-width characters, vulgar fractions and minus signs to their ASCII forms."""
    out = []
    for character in text.translate(_SUPERSCRIPTS):
        plain = unicodedata.normalize("NFKC", character)
        if "\u2044" in plain:  # a vulgar fraction: the space keeps "2 1/2" from becoming "21/2"
            plain = " " + plain.replace("\u2044", "/")
        elif len(plain) == 1 and not plain.isascii() and plain.isdecimal():
            plain = str(unicodedata.decimal(plain))
        elif unicodedata.category(character) == "Cf":  # invisible: zero-width spaces, direction marks
            plain = ""
        out.append(plain)
    text = _MINUS_SIGNS.sub("-", "".join(out))
    return _DASHES.sub(" ", _EN_DASH_AS_SIGN.sub("-", text))


# -- grammar ----------------------------------------------------------------------------------------------------------

_DIGITS = (
    r"(?:\d{1,3}(?:\.\d{3})+,\d{1,2}(?!\d)"  # 1.234,50
    r"|[1-9]\d{0,2}(?:, ?\d{2,3})*, ?\d{3}(?!\d)(?:\.\d*)?"  # 1,234.50  and  12,34,567  and  1, 000
    r"|[1-9]\d{0,2}(?: \d{3})+(?!\d)(?:\.\d*)?"  # 1 234
    r"|\d+,\d{1,2}(?!\d)"  # 12,50: no group of thousands, so a decimal comma
    r"|\d+(?:\.\d*)?"
    r"|\.\d+)"
    r"(?:[eE][+-]?\d+(?!\d))?"
)
_SIGN = r"[+-]?\s*"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:(?P<whole>\d+) +(?P<part>\d+) ?/ ?(?P<parts>\d+)"
    rf"|(?P<number>{_DIGITS})(?: ?/ ?(?P<denominator>{_SIGN}{_DIGITS}))?)"
)
_LEAD_IN = re.compile(
    r"(?:(?:the|final|correct|my|answer|result|total|sum|value|solution|is|are|was|equals?|so|thus|therefore|hence"
    r"|approximately|approx|about|around|roughly|only|exactly|usd|eur|gbp|inr|rs|us)\b\.?"
    r"|[a-z] ?(?==)|[=:~\u2248\s,;>(\[{|])*",
    re.IGNORECASE,
)
_TEN_TO_THE = re.compile(r"\s*\u00d7\s*10\s*\^\s*[({]?\s*([+-]?\d+)\s*[)}]?")
_PERCENT = re.compile(r"\s*(?:%|percent\b|per cent\b)", re.IGNORECASE)
_SCALE = re.compile(r"\s*(hundred|thousand|million|billion|trillion|k)\b", re.IGNORECASE)
_SCALES = {"hundred": 10**2, "k": 10**3, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_GOES_ON = re.compile(
    r"\s*[-+\u00d7/^:<>=,.]\s?[-+(.\d]|\s*\^|[a-df-z]?\d|\s*/\s*[-+(\d]"
    r"|.{0,40}?\b(?:or|to|and|through|minus|plus|times)\s+[-+.\d]"
    r"|\s*(?:hours?|hrs?|h|minutes?|mins?|years?|weeks?|days?|months?|feet|foot|ft|pounds?|dollars?|km|kg|m),?\s+\d",
    re.IGNORECASE,
)
"""What may not follow the number: then it was only the first part of an expression, a range, a time or a list."""


def read_number(text: str, *, bare: bool = False) -> tuple[Fraction, ...]:
    """The readings of a text that states one number, its face value first; () when it does not.

    Around the number may stand: words that introduce an answer before it, a unit or words after it, and "... =" before
    it. Not a second number that would change the meaning ("3-5", "7:30", "2 hours and 30 minutes", "1, 2, 3").
    With `bare` there may be nothing but the number, a percent sign or a scale word: "3x" is no number then.
    """
    if bare and len(text) > MAX_LENGTH:
        return ()
    text = normalise(text[:MAX_LENGTH])
    if bare:
        return _read(text, bare=True)
    if "=" in text:
        left, _, right = text.rpartition("=")
        return _read(right) or _read(left)
    return _read(text)


def _read(text: str, *, bare: bool = False) -> tuple[Fraction, ...]:
    start = 0 if bare else _LEAD_IN.match(text).end()
    match = _NUMBER.match(text, start)
    if match is None:
        return ()
    value = _value(match)
    if value is None:
        return ()
    end = match.end()
    power = _TEN_TO_THE.match(text, end)
    if power:
        exponent = int(power[1])
        if abs(exponent) > MAX_EXPONENT:
            return ()
        value, end = value * Fraction(10) ** exponent, power.end()
    readings = (value,)
    if percent := _PERCENT.match(text, end):
        readings, end = (value, value / 100), percent.end()
    elif scale := _SCALE.match(text, end):
        readings, end = (value * _SCALES[scale[1].lower()], value), scale.end()
    goes_on = text[end:].strip() if bare else _GOES_ON.match(text, end)
    return () if goes_on else readings


def _value(match: re.Match[str]) -> Fraction | None:
    negative = "-" in match["sign"]
    if match["whole"]:
        whole, part, parts = int(match["whole"]), int(match["part"]), int(match["parts"])
        value = None if parts == 0 else whole + Fraction(part, parts)
    else:
        value = _decimal(match["number"])
        if match["denominator"]:
            divisor = _decimal(match["denominator"])
            value = None if value is None or not divisor else value / divisor
    return -value if value is not None and negative else value


def _decimal(digits: str) -> Fraction | None:
    """The value of what `_DIGITS` matched, with its sign if it has one."""
    digits = digits.replace(" ", "")
    mantissa, _, exponent = digits.lower().partition("e")
    if exponent and (len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT):
        return None
    comma = mantissa.rfind(",")
    if comma > mantissa.rfind(".") and len(mantissa) - comma - 1 < 3:  # a decimal comma
        mantissa = mantissa[:comma].replace(".", "").replace(",", "") + "." + mantissa[comma + 1 :]
    mantissa = mantissa.replace(",", "").rstrip(".")
    value = Fraction(int(mantissa)) if mantissa.isdecimal() else Fraction(mantissa)
    return value * Fraction(10) ** int(exponent) if exponent else value


# -- comparison -------------------------------------------------------------------------------------------------------


def readings_of(value: Any) -> tuple[Fraction, ...]:
    """The readings of a ground truth: int, float, Decimal, Fraction, a NumPy scalar, or text."""
    if hasattr(value, "item"):  # a NumPy scalar
        value = value.item()
    if isinstance(value, bool):
        return ()
    if isinstance(value, int | Fraction):
        return (Fraction(value),)
    return read_number(str(value))


def same_number(first: tuple[Fraction, ...], second: tuple[Fraction, ...]) -> bool:
    """Whether two answers share a reading: whole numbers exactly, others to `TOLERANCE`."""
    return any(_close(a, b) for a in first for b in second)


def _close(a: Fraction, b: Fraction) -> bool:
    if a.denominator == 1 and b.denominator == 1:
        return a == b
    return abs(a - b) <= TOLERANCE * min(1, max(abs(a), abs(b)))
