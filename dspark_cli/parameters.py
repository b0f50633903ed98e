"""A command's parameters from a dataclass: each field is an option, declared once."""

import inspect
import typing
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

from dspark_cli.options import HEADINGS


def as_parameters(command: Callable[..., None], options: type[Any]) -> None:
    """Give `command`, which takes `**values`, the fields of a dataclass as parameters.

    The help has them under their headings, in the order of HEADINGS and then of the fields.

    Args:
        command: The function that Typer is to read.
        options: Its fields' types say how options are spelled; fields without default are required,
            and those with `init=False` are none.
    """
    hints = typing.get_type_hints(options, include_extras=True)

    def place(field: Field[Any]) -> int:
        heading = hints[field.name].__metadata__[0].rich_help_panel
        return HEADINGS.index(heading) if heading in HEADINGS else -1  # arguments have none

    chosen = sorted((field for field in fields(options) if field.init), key=place)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(options, field.name, inspect.Parameter.empty),
            annotation=hints[field.name],
        )
        for field in chosen
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {field.name: hints[field.name] for field in chosen}
