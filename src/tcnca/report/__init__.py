"""The paper's tables and figures, the runs that repeat them, and a report of both."""
