"""Checks for the tests of a program that trains.

`assert_strategies_agree` fails when a trainer gets other numbers under some strategy.
`assert_collectives` fails when a step begins to send more than it did, such as after a
change that makes it gather what it only had to sum. `assert_shardings` fails when an
array is no longer divided as it was.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.testing._asserts import assert_collectives as assert_collectives
from armillary.testing._asserts import assert_shardings as assert_shardings
from armillary.testing._asserts import (
    assert_strategies_agree as assert_strategies_agree,
)
from armillary.testing._asserts import find_collectives as find_collectives

_mark_public(globals())
