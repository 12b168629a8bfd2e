"""Base classes for objects of one process, which refuse to be copied or pickled."""

import copy
from typing import Any, ClassVar, Self


class OfOneProcess:
    """An object that holds threads, devices or places in a program.

    `copy.copy` gives a second object that shares the parts of the first one.
    `copy.deepcopy` and `pickle` would fail at a lock or a device somewhere inside, so
    they raise a `TypeError` that names the object. A subclass that defines
    `__reduce__` or `__getstate__` is copied as it says.
    """

    _why_not_copied: ClassVar[str]
    """Completes "cannot be copied, because ..."."""
    _copy_instead: ClassVar[str]
    """The advice, in sentences."""

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self)
        has_own_way = (
            kind.__reduce__ is not object.__reduce__
            or kind.__getstate__ is not object.__getstate__
        )
        if has_own_way:
            return super().__reduce_ex__(protocol)
        raise refuse_copy(f"A `{kind.__name__}`", self)


class OfOneProcessOnceUsed(OfOneProcess):
    """An object that may be copied deeply while it holds no threads or devices."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        try:
            vars(made).update(copy.deepcopy(vars(self), memo))
        except TypeError as error:
            del memo[id(self)]
            raise refuse_copy(f"A `{type(self).__name__}`", self) from error
        return made


def refuse_copy(subject: str, value: Any) -> TypeError:
    """Returns the error for a copy of an object of one process."""
    return TypeError(
        f"{subject} cannot be pickled or copied by `copy.deepcopy`, because "
        f"{value._why_not_copied}. {value._copy_instead}"
    )
