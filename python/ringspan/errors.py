"""What ringspan raises. Every class also derives from the Python exception that it is a case of."""


class Error(Exception):
    """Base of all errors of ringspan."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong by itself or against another one."""


class Unsupported(Error, NotImplementedError):
    """The request is meaningful, but this combination is not implemented."""


class CommError(Error, RuntimeError):
    """A rank died, disagreed or stayed silent past the deadline. After it, except after a disagreement, the group stays failed."""


class OutOfBudget(Error, MemoryError):
    """No plan fits the memory budget; the message names the smallest possible one."""


class DeviceError(Error, RuntimeError):
    """A device refused a launch or an allocation."""


class UnknownArgument(InvalidArgument, TypeError):
    """A function was given an argument that it does not have; the message names the alternative."""
