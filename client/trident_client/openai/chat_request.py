"""The body of ``POST /v1/chat/completions``, and what it asks of the model server."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trident_client.openai.errors import bad_request
from trident_client.openai.fields import Generation, StreamOptions
from trident_client.openai.output.parser import OutputForm
from trident_client.openai.settings import GatewaySettings
from trident_client.openai.tools import Tool, ToolUse, read_tool_choice

__all__ = ["ChatRequest", "Message"]


class Message(BaseModel):
    """One message. Its content is the model server's to check, and its other fields the template's."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]

    def for_template(self) -> dict[str, Any]:
        """As templates know it; a developer's message is what was once a system's."""
        message = self.model_dump(exclude_none=True)
        if self.role == "developer":
            message["role"] = "system"
        return message


class ChatRequest(Generation):
    """The body."""

    messages: list[Message] = Field(min_length=1, max_length=2048)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: Literal[False] | None = None  # the template writes them

    def check(self) -> None:
        """Raises `ApiError` for what contradicts itself."""
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs", "needs logprobs to be true")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "may be given only with stream")
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs", "is not given in a stream")
        if self.return_token_ids and (self.n or 1) > 1:
            raise bad_request("return_token_ids", "may be given only with n of 1")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise bad_request("best_of", "must be n in a stream: the best are known at the end")

    def tool_use(self, settings: GatewaySettings) -> ToolUse:
        """What the request's tools mean for its prompt and its output."""
        use = read_tool_choice(
            self.tools or [],
            self.tool_choice,
            tool_parser=settings.tool_parser,
            parallel=self.parallel_tool_calls is not False,
        )
        if use.constrains_or_parses and self._form_names():
            name = self._form_names()[0]
            raise bad_request(
                name, "cannot be given together with tools unless tool_choice is none"
            )
        return use

    def form(self, use: ToolUse, settings: GatewaySettings) -> OutputForm:
        """What to look for in the output."""
        template = self.chat_template_kwargs or {}
        thinks = all(template.get(name) is not False for name in ("enable_thinking", "thinking"))
        # A grammar leaves no room for a block of reasoning, and a last message that goes on is past it.
        free = not (use.is_forced or self._form_names() or self.continue_final_message)
        return OutputForm(
            reasoning_parser=settings.reasoning_parser if thinks and free else "off",
            tool_parser=use.parser,
            named=use.named,
            names=use.names,
            max_calls=None if self.parallel_tool_calls is not False else 1,
        )

    def options(self, use: ToolUse) -> dict[str, Any]:
        """What goes to the server beside the messages."""
        sampling = {**self.given(), **use.sampling}
        if use.parser not in ("off", "array") and self.skip_special_tokens is None:
            # The marks of calls are special tokens in some models.
            sampling["skip_special_tokens"] = False
        limit = self.max_completion_tokens
        limit = self.max_tokens if limit is None else limit
        template = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            template.setdefault("reasoning_effort", self.reasoning_effort)
        return {
            **sampling,
            # The server takes the word for "to the end of the context"; None would be left out.
            "max_tokens": "null" if limit is None else limit,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "prompt_logprobs": self.prompt_logprobs,
            "tools": use.tools or None,
            "chat_template_kwargs": template or None,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }

    def renames(self, use: ToolUse) -> dict[str, str]:
        """The server's names of parameters that are called otherwise here."""
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if use.sampling:
            names["structured_outputs"] = "tools"
        return names

    def _form_names(self) -> list[str]:
        """Parameters given that prescribe the output's form."""
        names = [name for name in self.given() if name.startswith(("guided_", "structured_"))]
        return names if self.response_format is None else [*names, "response_format"]
