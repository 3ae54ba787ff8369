"""Reads pickles of plain data, and can execute nothing else.

A pickle is a program. Python's unpickler, even one that refuses every global, can be made to allocate
gigabytes by a memo index, to hang or crash by hashing nested tuples, or to grow an integer without end. So a
pickle is read in one of two ways, and neither can do any of this:

- What torch and Python write for a snapshot is recognised, instruction by instruction, by one regular
  expression. Only then is it given to Python's unpickler, which is fast, and still refuses every global.
- Anything else goes to a reader of our own. It knows only the instructions that build dictionaries, lists,
  tuples, text, numbers, booleans and None; no instruction is left that could look up, call or build anything
  else. What it does not know, it refuses by name.
"""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
import re
import struct
from typing import Any, NoReturn

from vramfit.errors import TraceFormatError

_HINT = (
    "Only plain data as torch.cuda.memory._dump_snapshot writes it is read; nothing in the file was executed"
)
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_MAX_INT_BYTES = 16
_MAX_DIGITS = 40
_MAX_PROTOCOL = 5


class _Refused(Exception):
    """What is wrong, without the name of the file."""


class _Mark:
    """The place on the stack where a list, tuple or dictionary begins."""


_MARK = _Mark()


def load_plain(data: bytes, name: str) -> Any:
    """The value that a pickle of plain data holds; ``name`` is for messages.

    Lists and dictionaries that the pickle shares are shared in the value too, so a small file can hold a value that
    is very large to walk through: bound the walk by the size of the file.

    Raises:
        TraceFormatError: the pickle wants something else than plain data, is truncated or makes no sense.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load() if _is_simple(data) else _load(data)
    except pickle.UnpicklingError as error:
        raise TraceFormatError(
            f"{name} is a damaged pickle ({error!s:.80})", "Record or copy it again"
        ) from None
    except _Refused as error:
        raise TraceFormatError(f"{name} {error}", _HINT) from None
    except (IndexError, EOFError, struct.error):
        raise TraceFormatError(
            f"{name} is truncated, or neither a trace nor a snapshot", "Record or copy it again"
        ) from None
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise TraceFormatError(
            f"{name} is a damaged pickle ({type(error).__name__}: {error!s:.80})", "Record or copy it again"
        ) from None


def looks_like_a_pickle(data: bytes) -> bool:
    """Whether ``data`` begins as a pickle of a list or dictionary does, or at least ends as every pickle does."""
    return data.startswith((b"\x80", b"}", b"]", b"(d", b"(l")) or data.endswith(b".")


class _PlainUnpickler(pickle.Unpickler):
    """The second safeguard: no pickle that gets here has an instruction that looks up a global."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is refused")


def _is_simple(data: bytes) -> bool:
    """Whether ``data`` has only the few instructions of a snapshot, and memo indices that it can fill."""
    tokens = _tokens(len(data).bit_length())
    at, end = 0, len(data)
    while at < end:
        found = tokens.match(data, at)
        at = found.end() if found else at
        op = data[at] if at < end else 0
        if op == 0x8C and at + 1 < end:  # SHORT_BINUNICODE
            at += 2 + data[at + 1]
        elif op == 0x58 and at + 4 < end:  # BINUNICODE
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        else:
            return op == 0x2E  # STOP
    return False


@functools.cache
def _tokens(index_bits: int) -> re.Pattern[bytes]:
    """Matches a run of instructions without text. Memo indices are below ``2 ** index_bits``."""
    long1 = b"|".join(rb"\x%02x.{%d}" % (size, size) for size in (8, 6, 5, 4, 3, 2, 1, 7, 9, 0))
    number = rb"(?:K.|M..|J....|\x8a(?:" + long1 + rb"))"
    whole, rest = divmod(min(index_bits, 32), 8)
    index = b"." * whole + ((b"[\\x00-\\x%02x]" % ((1 << rest) - 1)) if rest else b"")
    index += rb"\x00" * (4 - whole - (rest > 0))
    instructions = (
        rb"h.",  # BINGET
        # Tuples only of two numbers: the hash of tuples in tuples can take forever, or all of the C stack.
        number + number + rb"\x86",  # TUPLE2
        number,  # BININT1, BININT2, BININT, LONG1
        rb"\x94",  # MEMOIZE
        rb"j....",  # LONG_BINGET
        rb"r" + index,  # LONG_BINPUT: Python's unpickler fills an array up to the index
        rb"[(}ue\]as]",  # MARK, EMPTY_DICT, SETITEMS, APPENDS, EMPTY_LIST, APPEND, SETITEM
        rb"[N\x88\x89]",  # NONE, NEWTRUE, NEWFALSE
        rb"q.",  # BINPUT
        rb"G.{8}",  # BINFLOAT
        rb"\x95.{8}",  # FRAME
        rb"\x80[\x02-\x05]",  # PROTO
    )
    return re.compile(b"(?>" + b"|".join(instructions) + b")*+", re.DOTALL)


_TEXT_LENGTHS = {0x8C: struct.Struct("<B"), 0x58: struct.Struct("<I"), 0x8D: struct.Struct("<Q")}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}  # NONE, NEWTRUE, NEWFALSE, EMPTY_TUPLE


def _load(data: bytes) -> Any:
    stack: list[Any] = []
    push, pop = stack.append, stack.pop
    memo: dict[int, Any] = {}
    marks: list[int] = []
    at, end = 0, len(data)
    int32, uint32, double = struct.Struct("<i"), struct.Struct("<I"), struct.Struct(">d")
    while True:
        op = data[at]
        at += 1
        # In the order in which snapshots hold them.
        if op == 0x68:  # BINGET
            push(memo[data[at]])
            at += 1
        elif op == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif op == 0x8A:  # LONG1
            size = data[at]
            low, at = at + 1, at + 1 + size
            if size > _MAX_INT_BYTES:
                raise _Refused(f"holds an integer of {size} bytes")
            if at > end:
                raise IndexError
            push(int.from_bytes(data[low:at], "little", signed=True))
        elif op == 0x4B:  # BININT1
            push(data[at])
            at += 1
        elif op == 0x4A:  # BININT
            push(int32.unpack_from(data, at)[0])
            at += 4
        elif op == 0x4D:  # BININT2
            push(data[at] | data[at + 1] << 8)
            at += 2
        elif op == 0x6A:  # LONG_BINGET
            push(memo[uint32.unpack_from(data, at)[0]])
            at += 4
        elif op == 0x28:  # MARK
            marks.append(len(stack))
            push(_MARK)
        elif op == 0x7D:  # EMPTY_DICT
            push({})
        elif op == 0x75:  # SETITEMS
            items = _since_mark(stack, marks)
            _set_items(stack[-1], items)
        elif op == 0x5D:  # EMPTY_LIST
            push([])
        elif op == 0x65:  # APPENDS
            items = _since_mark(stack, marks)
            _append(stack[-1], items)
        elif op == 0x61:  # APPEND
            item = pop()
            _append(stack[-1], [item])
        elif op == 0x73:  # SETITEM
            item, key = pop(), pop()
            _set_items(stack[-1], [key, item])
        elif op in _TEXT_LENGTHS:  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
            length = _TEXT_LENGTHS[op]
            low = at + length.size
            at = low + length.unpack_from(data, at)[0]
            if at > end:
                raise IndexError
            push(str(data[low:at], "utf-8", "surrogatepass"))
        elif op == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif op == 0x72:  # LONG_BINPUT
            memo[uint32.unpack_from(data, at)[0]] = stack[-1]
            at += 4
        elif op in _CONSTANTS:
            push(_CONSTANTS[op])
        elif op == 0x47:  # BINFLOAT
            push(double.unpack_from(data, at)[0])
            at += 8
        elif op in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
            count = op - 0x84
            items = stack[-count:]
            if len(items) < count:
                raise IndexError
            stack[-count:] = [tuple(items)]
        elif op == 0x74:  # TUPLE
            push(tuple(_since_mark(stack, marks)))
        elif op == 0x95:  # FRAME
            at += 8
        elif op == 0x80:  # PROTO
            if data[at] > _MAX_PROTOCOL:
                raise _Refused(f"has pickle protocol {data[at]}, newer than {_MAX_PROTOCOL}")
            at += 1
        elif op == 0x2E:  # STOP
            return _result(stack, marks)
        elif op in _TEXT_OPCODES:
            line_end = data.index(b"\n", at)
            _text_opcode(op, data[at:line_end], stack, memo)
            at = line_end + 1
        elif op == 0x6C:  # LIST
            push(_since_mark(stack, marks))
        elif op == 0x64:  # DICT
            items = _since_mark(stack, marks)
            push({})
            _set_items(stack[-1], items)
        else:
            raise _Refused(_refusal(op))


def _since_mark(stack: list[Any], marks: list[int]) -> list[Any]:
    """Take what lies above the last mark off the stack, and the mark with it."""
    low = marks.pop()
    items = stack[low + 1 :]
    del stack[low:]
    return items


def _set_items(target: Any, items: list[Any]) -> None:
    """Fill a dictionary from keys and values in turn."""
    if type(target) is not dict or len(items) % 2:
        raise _Refused("sets items of something that is not a dictionary")
    for key in items[::2]:
        # Text and numbers only: the hash of a tuple nested deep enough never ends, or ends the interpreter.
        if type(key) is not str and type(key) is not int:
            raise _Refused(f"has a dictionary key that is a {type(key).__name__}")
    target.update(zip(items[::2], items[1::2], strict=True))


def _append(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise _Refused("appends to something that is not a list")
    target.extend(items)


def _result(stack: list[Any], marks: list[int]) -> Any:
    if len(stack) != 1 or marks:
        raise _Refused("is a damaged pickle: it ends in the middle of a value")
    return stack[0]


def _refusal(op: int) -> str:
    name = _NAMES.get(op)
    if name is None:
        return f"is neither a trace nor a snapshot (byte 0x{op:02x} is not a pickle instruction)"
    return f"is refused: its pickle instruction {name} does more than hold plain data"


# Protocol 0 writes values as lines of text.
_TEXT_OPCODES = {ord(code): code for code in "IFLVSpg"}


def _text_opcode(op: int, line: bytes, stack: list[Any], memo: dict[int, Any]) -> None:
    code = _TEXT_OPCODES[op]
    if code in "IFLpg" and len(line) > _MAX_DIGITS:
        raise _Refused(f"holds a number of {len(line)} digits")
    if code == "I":
        stack.append({b"00": False, b"01": True}.get(line) if line in (b"00", b"01") else int(line))
    elif code == "L":
        stack.append(int(line.removesuffix(b"L")))
    elif code == "F":
        stack.append(float(line))
    elif code == "V":
        stack.append(str(line, "raw-unicode-escape"))
    elif code == "S":
        if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
            raise _Refused("is a damaged pickle: a text has no quotes")
        stack.append(line[1:-1].decode("unicode_escape"))
    elif code == "p":
        memo[int(line)] = stack[-1]
    else:
        stack.append(memo[int(line)])
