"""A command's parameters from a dataclass: each field is an option, declared once."""

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any


def as_parameters(command: Callable[..., None], options: type[Any]) -> None:
    """Give `command`, which takes `**values`, the fields of a dataclass as parameters.

    Args:
        command: The function that Typer is to read.
        options: Its fields' types say how options are spelled; fields without default are required.
    """
    hints = typing.get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(options, field.name, inspect.Parameter.empty),
            annotation=hints[field.name],
        )
        for field in fields(options)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {field.name: hints[field.name] for field in fields(options)}
