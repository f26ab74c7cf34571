"""The run-time type checker of the tests: beartype, with an int taken where a float is asked for (PEP 484).

`jaxtyping.jaxtyped` binds the signature and checks the parameters twice at every call, and generates code for every
function each time it is defined: that was a fifth of the suite. Here a call is checked once, by code that is generated
at the first call and shared by all closures of one definition.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import wraps
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError))
one_call = jaxtyping.jaxtyped("context")
"""Within it an axis has one size; it holds no state of its own."""

checks: dict[tuple[Any, ...], tuple[types.CodeType, Callable[..., Any]]] = {}
"""By the identity of the code and the annotations, which differ where they are not text but a variable's value."""


def jaxtyped(thing: Any = None, *, typechecker: object = None) -> Any:
    """In place of `jaxtyping.jaxtyped`, as the decorator that its import hook puts below all others."""
    if thing is None:
        return jaxtyped
    if isinstance(thing, type):
        if dataclasses.is_dataclass(thing) and not hasattr(thing.__init__, "__wrapped__"):
            thing.__init__ = jaxtyped(thing.__init__)  # type: ignore[misc]
        return thing
    check: Callable[..., Any] | None = None

    @wraps(thing)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal check
        if jaxtyping.config.jaxtyping_disable:
            return thing(*args, **kwargs)
        check = check or check_of(thing)
        with one_call:
            return check(*args, **kwargs, __beartype_func=thing)

    return call


def check_of(function: types.FunctionType) -> Callable[..., Any]:
    """What beartype makes of a function; it takes the function to call as `__beartype_func`."""
    code = function.__code__
    key = id(code), *function.__annotations__.values()
    if key not in checks:
        check = checked(with_types(function))
        takes = "__beartype_func" in (check.__kwdefaults__ or {})
        checks[key] = code, check if takes else unchecked
    return checks[key][1]


def unchecked(*args: Any, __beartype_func: Callable[..., Any], **kwargs: Any) -> Any:
    """For a function without annotations, which beartype returns as it is."""
    return __beartype_func(*args, **kwargs)


def with_types(function: types.FunctionType) -> types.FunctionType:
    """A copy annotated with types instead of text: Any for a name that only type checkers import."""
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, closure=function.__closure__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    for name, annotation in function.__annotations__.items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hint = typing.get_type_hints(holder, function.__globals__, include_extras=True)[name]
        except NameError:
            hint = Any
        copy.__annotations__[name] = hint
    return copy
