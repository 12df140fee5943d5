"""Cache of a method's results, kept with the object."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

Owner, Result, Arguments = TypeVar("Owner"), TypeVar("Result"), ParamSpec("Arguments")


def cached_method(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Return a method that computes each result once for an object: by position, its arguments are the key, so they
    must be hashable. The results live as long as the object, unlike those of `functools.cache`."""
    name = f"_results_of_{method.__name__}"

    @wraps(method)
    def cached(self: Owner, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        """Return the result of `method` for these arguments, computed on the first call."""
        results = self.__dict__.setdefault(name, {})
        key = arguments, *named.items()
        if key not in results:
            results[key] = method(self, *arguments, **named)
        found: Result = results[key]
        return found

    return cached
