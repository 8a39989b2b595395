"""Generation: a language model continues a prompt token by token, with a state instead of the whole past."""

from tcnca.generation.api import generate, stream
from tcnca.generation.batching import Batcher, Request
from tcnca.generation.prefix import PrefixCache
from tcnca.generation.text import stream_text, stream_texts

__all__ = [
    "Batcher",
    "PrefixCache",
    "Request",
    "generate",
    "stream",
    "stream_text",
    "stream_texts",
]
