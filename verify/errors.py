"""Errors meant for people. Anything else that escapes is a bug of ours (exit code 3)."""


class UsageError(Exception):
    """The gate was asked for something that cannot be done: says what, which argument, and what to do. Exit code 4."""


class AdapterError(UsageError):
    """An implementation's declaration contradicts its operator, or its file cannot be loaded."""


class SubjectError(Exception):
    """An implementation raised, or returned something that is not the operator's output. The law is broken."""
