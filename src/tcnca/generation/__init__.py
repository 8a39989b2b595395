"""Generation: a language model goes on from a prompt, token by token, with a state instead of the whole past."""

from tcnca.generation.sampling import generate, stream

__all__ = ["generate", "stream"]
