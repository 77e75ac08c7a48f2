"""The command line, one file a verb; `main` takes the call apart."""

PROGRAM = "python -m delta_runtime"
"""As it is called."""
