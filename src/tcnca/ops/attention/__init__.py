"""Chunked attention of one or several heads, with position biases and true rotary embeddings."""
