"""The one kind of error that is part of the interface: bad input, said in one sentence."""

from typing import List


class InputError(ValueError):
    """Bad input: one clear sentence that says what was wrong and what is allowed.

    In a notebook the traceback is left out, so that a papermill run ends in the sentence
    itself; on the command line ``__main__`` prints it and exits with code 1.
    """

    def _render_traceback_(self) -> List[str]:
        """Hook of IPython: what to show in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]
