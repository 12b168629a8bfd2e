"""Marks that functions of the library put on values, for the analyses of a step.

A mark is a name in the program of a step (`armillary._jaxpr.mark`).
"""

DIVISOR = "armillary divisor"
"""A number that divides a loss, whose sum over replicas is the loss of the batch."""

WEIGHT = "armillary weight"
"""A number that divides a loss, whose mean over replicas is the loss of the batch."""

AVERAGE = "armillary average"
"""A result of `compute_average_loss`."""

SUMMED = "armillary summed"
"""A number that a metric adds up over replicas."""

NUMERATOR = "armillary numerator"
"""The first sum of a metric that divides one sum by another."""

DENOMINATOR = "armillary denominator"
"""The second sum of a metric that divides one sum by another."""

METRIC = "armillary metric "
"""The beginning of a mark of a plain metric; the name of the metric follows."""

MADE_BY_OPS = {
    "armillary sum by cross-device operations": "sum",
    "armillary mean by cross-device operations": "mean",
    "armillary max by cross-device operations": "max",
    "armillary min by cross-device operations": "min",
}
"""Marks of the results of a `CrossDeviceOps`, and the operation of each."""
