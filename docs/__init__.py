"""The documents, and the build of their site."""
