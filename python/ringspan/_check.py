"""Checks of single values for every front: the value as it is used, or InvalidArgument with its name and what was expected."""

import numbers
import operator
import reprlib

from .errors import InvalidArgument

INT32, INT64 = 2**31 - 1, 2**63 - 1  # the greatest integers of the core


def flag(value, name, hint=""):
    """True or False. Anything else is a mistake, such as causal="top_left", which is true of itself."""
    if value is True or value is False:
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise InvalidArgument(f"{name} ({value!r}) must be True or False{hint}")


def whole(value, name, least=None):
    """An integer of any size; 1e6 is one, True is not."""
    if isinstance(value, bool):
        number = None
    elif isinstance(value, int):  # first: what torch.compile traces is one
        number = value
    elif isinstance(value, float):
        number = int(value) if value.is_integer() else None
    else:
        try:
            number = operator.index(value)
        except TypeError:
            number = None
    if number is None or (least is not None and number < least):
        raise InvalidArgument(f"{name} ({value!r}) must be an integer" + ("" if least is None else f" of at least {least}"))
    return number


def integer(value, name, least=None, most=INT64):
    """An integer in [least, most], which the core holds."""
    number, lowest = whole(value, name, least), -most - 1 if least is None else least
    if not lowest <= number <= most:
        raise InvalidArgument(f"{name} ({number}) must be in [{lowest}, {most}]")
    return number


def integers(values, name, least=None, most=INT64):
    """A list of integers in [least, most], of anything that can be gone through; of None none."""
    if values is None:
        return []
    try:
        values = list(values)
    except TypeError:
        raise InvalidArgument(f"{name} ({values!r}) must be a list of integers") from None
    return [integer(value, f"{name}[{i}]", least, most) for i, value in enumerate(values)]


def packed(values, name, tokens=None):
    """cu_seqlens, of 32 bits as the core's: of documents that follow each other, all `tokens` of them."""
    entries = integers(values, name, 0, INT32)
    if entries[:1] != [0] or any(end < begin for begin, end in zip(entries, entries[1:])):
        raise InvalidArgument(f"{name} ({reprlib.repr(entries)}) must begin with 0 and not descend")
    if tokens is not None and entries[-1] != tokens:
        raise InvalidArgument(f"{name} ends at {entries[-1]}; it must end at the number of tokens ({tokens})")
    return entries


def number(value, name):
    """A float; a NumPy scalar is one, a bool is not."""
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise InvalidArgument(f"{name} ({value!r}) must be a number")
    try:
        return float(value) + 0.0  # -0.0 is 0.0
    except OverflowError:  # an integer of hundreds of digits
        raise InvalidArgument(f"{name} must be a number below 1.8e308") from None


def positive(value, name):
    value = number(value, name)
    if not value > 0:  # NaN is not
        raise InvalidArgument(f"{name} ({value}) must be positive")
    return value


def dropout(value, name):
    value = number(value, name)
    if not 0.0 <= value < 1.0:
        raise InvalidArgument(f"{name} ({value}) must be in [0, 1)")
    return value


def seed(value, name):
    """Of dropout: 64 bits."""
    value = whole(value, name)
    if not 0 <= value < 2**64:
        raise InvalidArgument(f"{name} ({value}) must be in [0, 2^64)")
    return value


def text(value, name, hint=""):
    """A name or pattern; '|' separates the options of a call where they travel as one text."""
    if not isinstance(value, str) or "|" in value:
        raise InvalidArgument(f"{name} ({value!r}) must be a text without '|'{hint}")
    return value
