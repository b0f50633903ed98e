"""How prompts are worded: options of every command that reads rows."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from dspark_cli.jsonl import loads
from dspark_cli.options import IN_OUT, option
from engine.errors import ConfigError, RequestError
from engine.text import clashing_names

Chat = Annotated[
    bool,
    option(
        IN_OUT,
        "--chat: a `prompt` is one user message for the chat template. --raw: it is continued as "
        "it is. messages and turns always use the template.",
        "--chat/--raw",
    ),
]
ChatTemplate = Annotated[
    Path | None,
    option(IN_OUT, "Jinja file to use in place of the model's.", exists=True, dir_okay=False),
]
ChatTemplateKwargs = Annotated[
    str | None,
    option(
        IN_OUT, "Variables for the template, as '{\"enable_thinking\": false}'.", metavar="JSON"
    ),
]


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The chat template, and what it is given."""

    chat_template: ChatTemplate = None
    chat_template_kwargs: ChatTemplateKwargs = None

    def template_text(self) -> str | None:
        """What --chat-template holds.

        Raises:
            ConfigError: It cannot be read.
        """
        if self.chat_template is None:
            return None
        try:
            return self.chat_template.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read --chat-template {self.chat_template}: {error}"
            ) from None

    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the template.

        Raises:
            ConfigError: They are not a JSON object, or name what the template is given already.
        """
        if self.chat_template_kwargs is None:
            return {}
        try:
            found = loads(self.chat_template_kwargs.encode("utf-8", "surrogateescape"))
        except RequestError as error:
            hint = "write it as " + json.dumps({"enable_thinking": False})
            raise ConfigError(f"--chat-template-kwargs: {error}", hint) from None
        if clash := clashing_names(found):
            raise ConfigError(
                f"--chat-template-kwargs may not name {', '.join(clash)}: the template is given "
                "these already",
                "leave them out",
            )
        return found
