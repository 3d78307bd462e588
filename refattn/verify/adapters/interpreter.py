"""What an interpreter that runs in this process tells of itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field


class NoInterpreterError(Exception):
    """An interpreter cannot be started; the message says what it needs."""


@dataclass
class Interpreter:
    """An interpreter that runs in this process."""

    label: str
    unseen: str
    """What it does not check."""

    failing: dict[str, str] = field(default_factory=dict)
    """Operations that failed the self-test by storage types."""

    ran: dict[str, str] = field(default_factory=dict)
    """The configurations that ran, by kernels."""

    homes: tuple[str, ...] = ()
    """Folders of files that raise for what it does not have."""

    lacks: Callable[[BaseException, str], bool] = lambda error, raised_in: isinstance(
        error, NotImplementedError | AttributeError
    )
    """Whether an error says so that a function of these files has raised."""

    world: Callable[[], AbstractContextManager[None]] = nullcontext
    """In its ``with`` block the machine looks as if it had what kernels ask for: `like_gpu`."""
