"""Chunked attention of one head, with position biases and true rotary embeddings."""
