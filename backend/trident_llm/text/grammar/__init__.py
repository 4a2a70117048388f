"""Structured outputs: what may follow in an output, from its description to masks of tokens.

``spec`` reads what a request says, with ``schema*``, ``formats``, ``pattern`` and ``tags`` for the
kinds of description; ``compiler`` compiles it within limits, in a ``worker`` process first, through
``backend``, the one that knows the library; ``matcher`` follows one sequence.
"""
