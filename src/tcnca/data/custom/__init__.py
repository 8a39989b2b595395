"""The user's own data: files of text, tables or arrays, read without a line of code."""

from tcnca.data.custom.options import CustomOptions
from tcnca.data.custom.read import read_own

__all__ = ["CustomOptions", "read_own"]
