"""`python -m tcnca.cli` is `tcnca`."""

from tcnca.cli import app

app()
