"""Keeps passwords, tokens and keys out of reports, traces and plans, which are made to be shared.

A secret is recognised by the name before it (``--password x``, ``api_key=x``, ``"token": "x"``), by its own form
(``hf_...``, ``sk-...``, ``AKIA...``), or by its place in an address (``https://user:secret@host``). A secret without
any of these, such as a bare password among the arguments, cannot be distinguished from other text and stays.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"

_WORDS = r"token|password|passwd|passphrase|passcode|pwd|secret|credentials?|authorization|auth|bearer|signature|sig"
_KEYS = r"(?:api|app|access|secret|private|account|auth|shared|encryption|license|ssh|wandb|hf|openai|comet|neptune)"
# Names end with what they hold: `hf-token` holds one, `tokenizer`, `max-tokens` and `token-limit` do not.
_NAME = re.compile(rf"(?:^|.*[-])(?:{_WORDS}|{_KEYS}-?key(?:-id)?)|key|apikey")
_HARMLESS = re.compile(r"\d{1,9}(?:\.\d*)?|true|false|none|null|yes|no|<[^<>]*>|\[[A-Z]+\]|", re.IGNORECASE)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_ASSIGNED = re.compile(r"(?P<name>[+~-]{0,2}[A-Za-z][\w./-]*)=(?P<value>.*)", re.DOTALL)
# Names and the like are bounded, and begin where nothing of theirs stands before: texts can be long, and no part of one
# is to be looked at again from each of its characters.
_NAMED = re.compile(
    r"""(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]{0,63})["']?\s?[=:]\s?["']?(?=[^\s"',;&)}\]])"""
)
_VALUE = re.compile(r"""[^\s"',;&)}\]]+""")
_OPTION_IN_TEXT = re.compile(r"(?<![\w-])(?P<name>--[A-Za-z][\w.-]*) +(?P<value>[^\s'\"-][^\s'\",)]*)")
_MIXED = r"(?=[A-Za-z_-]{0,100}[0-9A-Z])"
_FORMS = tuple(
    re.compile(rf"(?<![A-Za-z0-9])({start})(?:{rest})")
    for start, rest in (
        (r"hf_|api_org_", rf"{_MIXED}[A-Za-z0-9]{{16,}}"),  # Hugging Face
        (
            r"sk-|nvapi-|glpat-|pypi-",
            rf"{_MIXED}[A-Za-z0-9_-]{{16,}}",
        ),  # OpenAI and others, NVIDIA, GitLab, PyPI
        (r"[srp]k_(?:live|test)_|gsk_|npm_|r8_", r"[A-Za-z0-9]{10,}"),  # Stripe, Groq, npm, Replicate
        (r"gh[pousr]_", r"[A-Za-z0-9]{16,}"),  # GitHub
        (r"github_pat_|wandb_v1_", r"[A-Za-z0-9_]{16,}"),
        (r"AKIA|ASIA", r"[0-9A-Z]{16}(?![0-9A-Za-z])"),  # AWS
        (r"AIza", r"[0-9A-Za-z_-]{30,}"),  # Google
        (r"xox[abeprs]-", r"[A-Za-z0-9-]{10,}"),  # Slack
        (r"eyJ", r"[A-Za-z0-9_-]{8,400}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"),  # JSON web tokens
        (r"(?:Bearer|Basic) ", r"[A-Za-z0-9._~+/=-]{8,}"),
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----", r"[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"),
    )
)
_USER = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*://)(?!git@)[^/\s@\"']+@")
_HEX = re.compile(r"[0-9a-f]{40}")
_HEX_AT = re.compile(rf"{_HEX.pattern}(?![\w/.-])")
"""A key of Weights & Biases up to 2025, and a commit of git."""
_COMMIT = re.compile(r"(?:.*-)?(?:revision|rev|ref|commit|sha|sha1|hash|digest|checksum|version)")


def mask_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command line whose secrets are masked: ``--token hf_abc`` becomes ``--token ***``.

    Args:
        arguments: the program first.
    """
    masked, name = [], ""
    for argument in arguments:
        if name and not argument.startswith("-"):
            masked.append(_masked_value(name, argument))
            name = ""
            continue
        name = _plain_name(argument) if _OPTION.fullmatch(argument) else ""
        found = _ASSIGNED.fullmatch(argument)
        if found is not None:
            masked.append(f"{found['name']}={_masked_value(_plain_name(found['name']), found['value'])}")
        else:
            masked.append(MASK if _HEX.fullmatch(argument) else mask_text(argument))
    return tuple(masked)


def mask_text(text: str) -> str:
    """A text whose secrets are masked, such as the message of an exception."""
    text = _USER.sub(rf"\1{MASK}@", text)
    for form in _FORMS:
        text = form.sub(rf"\1{MASK}", text)
    return _mask_assignments(_OPTION_IN_TEXT.sub(_masked_option, text))


def _masked_option(found: re.Match[str]) -> str:
    secret = _is_secret(_plain_name(found["name"]), found["value"])
    return f"{found['name']} {MASK}" if secret else found[0]


def _mask_assignments(text: str) -> str:
    """Mask what stands behind the name of a secret: ``password='x'``, ``"token": "x"``, ``?api_key=x``."""
    parts, start = [], 0
    while (found := _NAMED.search(text, start)) is not None:
        parts.append(text[start : found.end()])
        start = found.end()
        name, value = _plain_name(found["name"]), _HEX_AT.match(text, start)
        if _NAME.fullmatch(name):
            value = _VALUE.match(text, start)
        if value is not None and MASK not in value[0] and _is_secret(name, value[0]):
            parts.append(MASK)
            start = value.end()
    return "".join((*parts, text[start:]))


def _masked_value(name: str, value: str) -> str:
    """The value of an option, masked if the option's name is that of a secret."""
    return MASK if _is_secret(name, value) else mask_text(value)


def _is_secret(name: str, value: str) -> bool:
    """Whether the value of a name is a secret: numbers, flags and the text of a token, such as ``<pad>``, are not."""
    if _NAME.fullmatch(name):
        return _HARMLESS.fullmatch(value) is None
    return _HEX.fullmatch(value) is not None and _COMMIT.fullmatch(name) is None


def _plain_name(name: str) -> str:
    """A name as `_NAME` knows it: ``+model.HF_TOKEN`` is ``hf-token``."""
    last = re.split(r"[./]", name.lstrip("+~-"))[-1]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", last).replace("_", "-").lower()
