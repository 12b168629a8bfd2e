"""Reads environment variables, and says which one is wrong."""

import os
import re
from collections.abc import Mapping, Sequence

from armillary.cluster._spec import HIGHEST_PORT, ClusterSpec
from armillary.errors import ClusterError

Environ = Mapping[str, str]


def find_environ(environ: Environ | None) -> Environ:
    """Returns `environ`, or the environment of this process."""
    return os.environ if environ is None else environ


def has_variables(environ: Environ, *names: str) -> bool:
    """Returns whether all the variables are set and not empty."""
    return all(environ.get(name, "").strip() for name in names)


def find_name(environ: Environ, names: Sequence[str], purpose: str) -> str:
    """Returns the first of `names` that is set.

    Args:
        environ: The environment.
        names: Variables that hold the same, the best one first.
        purpose: A sentence that says what the variable is for and who sets it.

    Raises:
        ClusterError: If none is set.
    """
    for name in names:
        if has_variables(environ, name):
            return name
    listed = " and ".join(f"`{name}`" for name in names)
    are = "is" if len(names) == 1 else "are"
    raise ClusterError(f"{listed} {are} not set. {purpose}")


def read_text(environ: Environ, name: str, purpose: str) -> str:
    """Returns the value of a variable that must be set.

    Raises:
        ClusterError: If it is not.
    """
    return environ[find_name(environ, [name], purpose)].strip()


def read_int(environ: Environ, name: str, purpose: str, *, minimum: int = 0) -> int:
    """Returns the value of a variable that must be an integer.

    Raises:
        ClusterError: If it is not set, not an integer or below `minimum`.
    """
    text = read_text(environ, name, purpose)
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < minimum:
        raise ClusterError(
            f"`{name}` is {text!r}, but it must be an integer of at least {minimum}. "
            f"{purpose}"
        )
    return int(text)


def check_below(name: str, value: int, limit: int, what: str) -> None:
    """Raises if an index is not below the number of what it counts.

    Args:
        name: The variable that holds the index.
        value: The index.
        limit: The number.
        what: What the number is, as text.

    Raises:
        ClusterError: If `value` is not below `limit`.
    """
    if value >= limit:
        raise ClusterError(
            f"`{name}` is {value}, but it must be below {limit}, {what}. Set it to an "
            f"index from 0 to {limit - 1}, or correct the number."
        )


def make_cluster(
    cluster: Mapping[str, Sequence[str] | Mapping[int, str]], variables: str, fix: str
) -> ClusterSpec:
    """Returns the cluster that variables of the environment describe.

    Args:
        cluster: The addresses by job.
        variables: The variables that they were made from, as text.
        fix: A sentence that says who sets them or what they should hold.

    Raises:
        ClusterError: If the addresses cannot be used.
    """
    try:
        return ClusterSpec(cluster)
    except ValueError as error:
        raise ClusterError(
            f"{variables}: they describe a cluster that cannot be used. {error} {fix}"
        ) from error


def number_ports(hosts: Sequence[str], port: int) -> list[str]:
    """Returns an address for each task, given the host of each.

    Tasks on one host get `port`, `port + 1` and so on.

    Raises:
        ClusterError: If the ports of a host would go beyond the highest one.
    """
    addresses: list[str] = []
    used: dict[str, int] = {}
    for host in hosts:
        number = port + used.get(host, 0)
        used[host] = used.get(host, 0) + 1
        if number > HIGHEST_PORT:
            raise ClusterError(
                f"The first port is {port}, but {host!r} has more tasks than there are "
                f"ports up to {HIGHEST_PORT}. Use a lower first port."
            )
        addresses.append(f"{host}:{number}")
    return addresses
