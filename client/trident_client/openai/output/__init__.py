"""What a model's text means: reasoning, content and tool calls, told apart while it is made.

Knows nothing of HTTP or of the model server. Invariant, of every parser here: the joined output does
not depend on where the text is cut into pieces.
"""
