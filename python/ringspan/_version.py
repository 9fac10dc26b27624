from ._core import VERSION

__version__ = f"{VERSION // 10000}.{VERSION // 100 % 100}.{VERSION % 100}"
