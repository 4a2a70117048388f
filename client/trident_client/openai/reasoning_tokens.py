"""How many tokens of an answer were reasoning.

The server counts an answer's tokens as a whole, and knows nothing of ``<think>`` blocks: the token
that ends a block is looked for in the answer's ids, whose beginnings the server turns into text.
"""

from __future__ import annotations

from collections.abc import Sequence

from trident_client import AsyncClient, Choice, Result, TridentError
from trident_client.openai.output.parser import OutputForm
from trident_client.openai.output.reasoning import CLOSE, reasoning_end

__all__ = ["reasoning_tokens"]


async def reasoning_tokens(
    client: AsyncClient, form: OutputForm, results: Sequence[Result]
) -> int | None:
    """Tokens of all choices up to the end of their blocks, both marks included.

    None where none is looked for, and where the server can not tell: an answer is not lost for that.
    """
    if form.reasoning_parser == "off":
        return None
    try:
        return sum(
            [
                await _of_choice(client, form, choice)
                for result in results
                for choice in result.choices
            ]
        )
    except TridentError:
        return None


async def _of_choice(client: AsyncClient, form: OutputForm, choice: Choice) -> int:
    end = reasoning_end(choice.text, begins_inside=form.reasoning_parser == "open")
    if end == 0:
        return 0
    ids = choice.token_ids
    if ids is None:  # of several choices the server gives no ids: what the text would be made of
        made = {"op": "tokenize", "text": choice.text[:end], "add_special_tokens": False}
        return len((await client.control(made))["token_ids"])
    below, count = 0, len(ids)  # the block ends after more than `below` tokens, `count` at most
    if end == len(choice.text) and not choice.text.endswith(CLOSE):
        return count  # it never ended
    while below + 1 < count:
        middle = (below + count) // 2
        if CLOSE in await client.detokenize(ids[:middle]):
            count = middle
        else:
            below = middle
    return count
