"""Patterns for the values of a JSON schema's ``format``.

Owns the list of formats that are honoured. It must not know schemas.

Invariant: whatever a pattern matches is valid for its format (the RFC named beside it). The
reverse does not hold: rare but valid spellings are left out, so a model has them out of reach.
"""

from __future__ import annotations

_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
)
# The years 1000 to 2999; 29 February in leap years alone.
_LEAP_YEAR = r"(?:[12]\d(?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)"
_DATE = rf"(?:[12]\d{{3}}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_HOUR_MINUTE}:[0-5]\d(?:\.\d{{1,9}})?(?:Z|[+\-]{_HOUR_MINUTE})"
_DURATION_TIME = r"T(?:\d{1,9}H(?:\d{1,9}M(?:\d{1,9}S)?)?|\d{1,9}M(?:\d{1,9}S)?|\d{1,9}S)"
_DURATION_DATE = r"(?:\d{1,9}Y(?:\d{1,9}M(?:\d{1,9}D)?)?|\d{1,9}M(?:\d{1,9}D)?|\d{1,9}D)"
# Few and short labels between single dots and hyphens: no name is too long, none looks like
# Punycode, and the pattern stays cheap to compile.
_HOST = r"[a-z0-9]{1,20}(?:[.\-][a-z0-9]{1,20}){0,3}"
_LOCAL = r"[A-Za-z0-9_+]{1,20}(?:[.\-][A-Za-z0-9_+]{1,20})?"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_HEX = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        rf"(?:{_HEX}:){{7}}{_HEX}",
        *(rf"(?:{_HEX}:){{1,{7 - n}}}(?::{_HEX}){{1,{n}}}" for n in range(1, 7)),
        rf"(?:{_HEX}:){{1,7}}:",
        rf":(?::{_HEX}){{1,7}}",
        "::",
    ]
)
_URI = (
    rf"[a-z][a-z0-9+.\-]{{0,15}}://{_HOST}(?::[1-9]\d{{0,3}})?(?:/[A-Za-z0-9._~\-=&?/]*)?"
    r"(?:#[A-Za-z0-9._~\-]*)?"
)

FORMAT_PATTERNS: dict[str, str] = {
    "date": _DATE,  # RFC 3339
    "time": _TIME,  # RFC 3339, without leap seconds
    "date-time": rf"{_DATE}T{_TIME}",  # RFC 3339
    "duration": (  # RFC 3339, appendix A
        rf"P(?:\d{{1,9}}W|{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME})"
    ),
    "email": rf"{_LOCAL}@{_HOST}",  # RFC 5321
    "hostname": _HOST,  # RFC 1123
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",  # RFC 2673
    "ipv6": _IPV6,  # RFC 4291
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",  # RFC 4122
    "uri": _URI,  # RFC 3986, with an authority
}
