"""The user's own data: files of text, tables or arrays, read without a line of code."""

from tcnca.data.own.options import OwnOptions
from tcnca.data.own.read import read_own

__all__ = ["OwnOptions", "read_own"]
