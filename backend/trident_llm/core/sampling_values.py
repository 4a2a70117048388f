"""The values of sampling parameters: from what a client sends to what they mean, one parser each.

Owns the types and ranges of single values; what they mean together, or for a model, is not known here.
Numbers and booleans may arrive as strings. Every refusal names the parameter and says what it must be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trident_llm.core.errors import RequestError, invalid

FIELD = "sampling_parameters"
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_PATTERN_SIZE = 1024
LARGEST_INT = 2**31 - 1


@dataclass(frozen=True)
class RepetitionDetection:
    """Ends a sequence whose last tokens are one pattern, ``min_count`` times in a row."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int

    def repeats(self, token_ids: list[int]) -> bool:
        """Whether ``token_ids`` end in a pattern of the sizes asked for, often enough in a row."""
        for size in range(self.min_pattern_size, self.max_pattern_size + 1):
            length = size * self.min_count
            if length > len(token_ids):
                return False
            if token_ids[-1] == token_ids[-1 - size]:  # spares most copies
                tail = token_ids[-length:]
                if tail[size:] == tail[:-size]:
                    return True
        return False


def bad(name: str, reason: str) -> RequestError:
    """The error that refuses parameter ``name``; ``reason`` says what it must be."""
    return invalid(f"{FIELD}.{name}", reason)


def integer(name: str, value: Any, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``."""
    number: int | None = None
    if isinstance(value, str):
        try:
            number = int(value.strip())
        except ValueError:
            number = None
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None:
        raise bad(name, "must be a whole number")
    if not low <= number <= high:
        raise bad(name, f"must be between {low} and {high}")
    return number


def optional_integer(name: str, value: Any, low: int, high: int) -> int | None:
    """As :func:`integer`, or None, also spelled out."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
        return None
    return integer(name, value, low, high)


def number(name: str, value: Any) -> float:
    """A finite number."""
    result: float | None = None
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            result = float(value)
        except (ValueError, OverflowError):
            result = None
    if result is None or not math.isfinite(result):
        raise bad(name, "must be a finite number")
    return result


def number_between(name: str, value: Any, low: float, high: float) -> float:
    """A number from ``low`` to ``high``, both included."""
    result = number(name, value)
    if not low <= result <= high:
        raise bad(name, f"must be between {low:g} and {high:g}")
    return result


def boolean(name: str, value: Any) -> bool:
    """true or false, also as a string or as 0 and 1."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false", "1", "0"):
        return value.strip().lower() in ("true", "1")
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise bad(name, "must be true or false")


def early_stopping(name: str, value: Any) -> bool | Literal["never"]:
    """true, false or "never"."""
    if value is None:
        return False
    if isinstance(value, str) and value.strip().lower() == "never":
        return "never"
    try:
        return boolean(name, value)
    except RequestError:
        raise bad(name, 'must be true, false or "never"') from None


def top_p(name: str, value: Any) -> float:
    result = number(name, value)
    if not 0.0 < result <= 1.0:
        raise bad(name, "must be above 0 and at most 1")
    return result


def repetition_penalty(name: str, value: Any) -> float:
    result = number(name, value)
    if result <= 0.0:
        raise bad(name, "must be above 0")
    return result


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    """A string or a list of strings, none of them empty, each once."""
    strings = [value] if isinstance(value, str) else value
    return _strings(name, strings, MAX_STOP_STRINGS, MAX_STOP_CHARS)


def bad_words(name: str, value: Any) -> tuple[str, ...]:
    """A list of strings, none of them blank, each once."""
    words = _strings(name, value, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    if not all(word.strip() for word in words):
        raise bad(name, "must not hold a blank string")
    return words


def _from_json(name: str, value: Any) -> Any:
    """What a list or object is when it arrives as a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise bad(name, "must be valid JSON") from None


def _strings(name: str, value: Any, most: int, most_chars: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise bad(name, "must be a list of strings")
    if any(item == "" for item in value):
        raise bad(name, "must not hold an empty string; leave it out instead")
    if len(value) > most:
        raise bad(name, f"must hold at most {most} strings")
    if any(len(item) > most_chars for item in value):
        raise bad(name, f"must hold strings of at most {most_chars} characters")
    if any("\ud800" <= char <= "\udfff" for item in value for char in item):
        raise bad(name, "must hold valid Unicode, no half of a character")
    return tuple(dict.fromkeys(value))


def token_ids(name: str, value: Any, most: int) -> tuple[int, ...]:
    """A list of token ids, each once; None is an empty one."""
    value = _from_json(name, value)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > most:
        raise bad(name, f"must be a list of at most {most} token ids")
    return tuple(dict.fromkeys(integer(name, item, 0, LARGEST_INT) for item in value))


def allowed_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Token ids that may be sampled, at least one; None allows all."""
    value = _from_json(name, value)
    if value is None:
        return None
    ids = token_ids(name, value, LARGEST_INT)
    if not ids:
        raise bad(name, "must hold at least one token id; leave it out to allow all")
    return ids


def logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """An object from token id to bias, as pairs in the order of the ids."""
    value = _from_json(name, value)
    if value is None:
        return ()
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        raise bad(name, f"must be an object of at most {MAX_BIASES} token ids, each with its bias")
    biases = {
        integer(name, key, 0, LARGEST_INT): number_between(name, bias, -100, 100)
        for key, bias in value.items()
    }
    return tuple(sorted(biases.items()))


def truncate_prompt_tokens(name: str, value: Any) -> int | None:
    size = optional_integer(name, value, -1, LARGEST_INT)
    if size == 0:
        raise bad(name, "must be at least 1, or -1 to keep what fits the context")
    return size


def repetition_detection(name: str, value: Any) -> RepetitionDetection | None:
    """An object (or its JSON) with max_pattern_size, min_count and, if wanted, min_pattern_size."""
    value = _from_json(name, value)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise bad(name, "must be a JSON object")
    if not value.keys() <= {"max_pattern_size", "min_pattern_size", "min_count"}:
        raise bad(name, "may hold max_pattern_size, min_pattern_size and min_count only")
    largest = integer(name, value.get("max_pattern_size", 0), 0, MAX_PATTERN_SIZE)
    smallest = integer(name, value.get("min_pattern_size", 0), 0, MAX_PATTERN_SIZE)
    if smallest > largest:
        raise bad(name, "must have min_pattern_size at most max_pattern_size")
    if largest == 0:
        return None
    count = integer(name, value.get("min_count", 0), 0, LARGEST_INT)
    if count < 2:
        raise bad(name, "must have min_count of at least 2")
    return RepetitionDetection(largest, max(1, smallest), count)
