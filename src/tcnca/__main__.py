"""`python -m tcnca` is `tcnca`."""

from tcnca.cli import app

app()
