"""Cache of a method's results, kept with the object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def cached_method(method: Method) -> Method:
    """Decorate a method, or a function of an object, so that it computes each result once per object; a generator's
    items are kept as a list. The other positional arguments are the key, so they must be hashable. The results are
    freed with the object, unlike those of `functools.cache`."""
    name = f"_results_of_{method.__name__}"

    @wraps(method)
    def cached(self: Any, *arguments: Any) -> Any:
        """Return the result of `method` for these arguments, computed on the first call."""
        results = self.__dict__.setdefault(name, {})
        if arguments not in results:
            found = method(self, *arguments)
            results[arguments] = list(found) if isinstance(found, Iterator) else found
        return results[arguments]

    return cast(Method, cached)
